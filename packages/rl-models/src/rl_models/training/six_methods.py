"""Adapter that makes a training backend of six methods a whole one.

| needed by a worker              | derived from                                   |
|---------------------------------|------------------------------------------------|
| one step per global batch       | `train_step(batch, loss_fn)` for each          |
| the loss of held-out rows       | `get_logprobs` and the loss, without gradients |
| metrics of a loss not called    | the same, with the weights after the step      |
| log-probs of the initial model  | a second object, which is never trained        |
| a checkpoint, resume            | `save_checkpoint(path)`, `load_checkpoint`     |
| weights for a generator         | `state_dict()` if there is one, else the       |
|                                 | safetensors that `save_checkpoint` writes      |
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rl_distributed.errors import BatchError, CheckpointError
from rl_distributed.logs.logging import get_logger
from rl_models.backend_forms import own_method, training_form
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import AnyPath, LossFunction, TrainingBackend
from rl_models.registry import get_training_backend
from rl_models.training.batch_loss import BatchLoss
from rl_models.training.checkpoint_tokenizer import save_tokenizers
from rl_models.training.reference_model import no_reference_model
from rl_models.types import (
    InputRows,
    LossInputType,
    TrainingRows,
)

__all__ = ["SixMethodBackend", "build_training_backend"]

_logger = get_logger(__name__)

_STATE = "state.json"


def build_training_backend(name: str) -> TrainingBackend:
    """Make a training backend by name, completing one of six methods.

    Raises:
        RegistryError: The name is unknown, or the class has neither form.
    """
    backend = get_training_backend(name)
    if training_form(name, backend) == "whole":
        made: TrainingBackend = backend()
        return made
    return SixMethodBackend(name, backend)


class SixMethodBackend:
    """A `TrainingBackend` of one rank, made from a class with six methods.

    Args:
        name: The name that the class is registered under.
        backend: The class; made without arguments.
    """

    def __init__(self, name: str, backend: type[Any]) -> None:
        self._name = name
        self._class = backend
        self._backend: Any = None
        self._reference: Any = None
        self._specs: dict[str, Tensor] | None = None
        self._has_told = False

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        init_reference_model: bool = False,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
    ) -> None:
        """Set up the object, and with a reference model a second one."""
        self._config = PolicyConfig.from_dict(config)
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        self._backend = self._made(config)
        if init_reference_model:
            self._reference = self._made(config)
        if weights_path is not None or optimizer_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    def _made(self, config: Mapping[str, Any]) -> Any:
        # Policy and reference must begin with the same weights, also random ones.
        torch.manual_seed(self._config.seed)
        made = self._class()
        made.setup(dict(config))
        return made

    def train_step(
        self,
        data: TrainingRows,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> dict[str, Any]:
        """Call `train_step` per global batch; micro-batches are up to the backend."""
        del micro_batch_size
        results = []
        metrics: dict[str, list[Any]] = {}
        # One at a time and not as a whole: the loss divides by counts of a global
        # batch.
        for index in range(data.size // global_batch_size):
            # The whole shard as it is, without a copy, in the usual case.
            batch = (
                data
                if data.size == global_batch_size
                else data.get_batch(index, global_batch_size)
            )
            loss = BatchLoss(loss_fn, batch)
            # Never `train_step`, which would take a step.
            if eval_mode:
                results.append({"loss": self._evaluated(batch, loss)})
            else:
                results.append(self._checked(self._backend.train_step(batch, loss)))
                # A backend may compute its loss by itself; the algorithm's metrics are
                # then those of the weights after the step.
                if not loss.was_called:
                    self._measure(batch, loss)
            for name, values in loss.metrics.items():
                metrics.setdefault(name, []).extend(values)
        self._add_own_metrics(results, metrics)
        return {**_columns(results), "all_mb_metrics": metrics}

    def _evaluated(self, batch: TrainingRows, loss: BatchLoss) -> float:
        value = self._measure(batch, loss)
        if value is None:
            raise self._unsupported(
                f"way to give the loss of held-out rows from {loss.input_type.value}"
            )
        return value

    @torch.no_grad()
    def _measure(self, batch: TrainingRows, loss: BatchLoss) -> float | None:
        """Compute the loss and its metrics; None if the backend lacks its input."""
        if loss.input_type is LossInputType.LOGPROB:
            return float(loss(batch, self._logprobs(self._backend, batch)))
        offers_values = own_method(self._class, "get_values") is not None
        if loss.input_type is LossInputType.VALUE and offers_values:
            return float(
                loss(batch, self.get_values(batch, micro_batch_size=batch.size))
            )
        if not self._has_told:
            _logger.warning(
                "train_step of training backend %r does not call loss_fn, and the "
                "metrics of %s cannot be computed from get_logprobs: they are left out",
                self._name,
                type(loss.loss_fn).__name__,
            )
            self._has_told = True
        return None

    def _checked(self, result: Any) -> dict[str, float]:
        """Return the numbers that `train_step` returned."""
        if not isinstance(result, Mapping) or "loss" not in result:
            raise BatchError(
                f"train_step of training backend {self._name!r} must return a mapping "
                f'with "loss": got {result!r}; return {{"loss": loss.item()}}'
            )
        try:
            return {name: float(value) for name, value in result.items()}
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"train_step of training backend {self._name!r} must return numbers: "
                f"got {dict(result)!r} ({error})"
            ) from error

    def _add_own_metrics(
        self, results: list[dict[str, float]], metrics: dict[str, list[Any]]
    ) -> None:
        """Add further numbers of a step as metrics, unless the loss reports them."""
        names = {n for result in results for n in result} - {"loss", "grad_norm", "lr"}
        # A metric of the loss has a value per call, and is what an algorithm expects.
        for name in names - set(metrics):
            metrics[name] = [result[name] for result in results if name in result]

    def get_logprobs(
        self,
        data: InputRows,
        *,
        micro_batch_size: int,
        reference: bool = False,
    ) -> Tensor:
        """Return [B, S] log-probs; 0.0 where they are not needed."""
        del micro_batch_size
        if reference and self._reference is None:
            raise no_reference_model()
        with torch.no_grad():
            return self._logprobs(self._reference if reference else self._backend, data)

    def _logprobs(self, backend: Any, data: InputRows) -> Tensor:
        logprobs = torch.as_tensor(backend.get_logprobs(data))
        shape = data.columns["input_ids"].shape
        if logprobs.shape != shape:
            raise BatchError(
                f"get_logprobs of training backend {self._name!r} must return [B, S] = "
                f"{list(shape)}, one log-prob per token of input_ids: got "
                f"{list(logprobs.shape)}"
            )
        # Zeros elsewhere, as with other backends: this one may have any number there.
        positions = torch.arange(shape[1])
        is_asked = (positions > 0) & (
            positions < data.columns["input_lengths"][:, None]
        )
        if "token_mask" in data:
            is_asked = is_asked & (data["token_mask"] != 0)
        return torch.where(is_asked, logprobs.detach().float().cpu(), 0.0)

    def get_values(self, data: InputRows, *, micro_batch_size: int) -> Tensor:
        """Pass on to the backend, if it has the method."""
        found: Tensor = self._offered("get_values")(
            data, micro_batch_size=micro_batch_size
        )
        return found

    def get_topk_logits(
        self, data: InputRows, **arguments: Any
    ) -> Mapping[str, Tensor]:
        """Pass on to the backend, if it has the method."""
        found: Mapping[str, Tensor] = self._offered("get_topk_logits")(
            data, **arguments
        )
        return found

    def _offered(self, method: str) -> Any:
        if own_method(self._class, method) is None:
            raise self._unsupported(method)
        return getattr(self._backend, method)

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"training backend {self._name!r} ({self._class.__qualname__}) has no "
            f"{what}; give its class the method, see rl_models.TrainingBackend, or use "
            "the backend dtensor"
        )

    def save_checkpoint(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        tokenizer_path: AnyPath | None = None,
    ) -> None:
        """Have the backend write its state, and save the tokenizer beside it.

        The folder of the training state holds the path to it.
        """
        folder = Path(weights_path)
        folder.mkdir(parents=True, exist_ok=True)
        # One checkpoint for weights and training state, which only the class can tell
        # apart.
        self._backend.save_checkpoint(str(folder))
        save_tokenizers(self._config, weights_path, tokenizer_path)
        if optimizer_path is not None:
            target = Path(optimizer_path)
            target.mkdir(parents=True, exist_ok=True)
            # Relative, so that a checkpoint can be moved.
            place = {"checkpoint": os.path.relpath(folder, target)}
            (target / _STATE).write_text(json.dumps(place), encoding="utf-8")

    def load_checkpoint(
        self, weights_path: AnyPath | None, optimizer_path: AnyPath | None = None
    ) -> None:
        """Have the backend load a checkpoint that it wrote."""
        path = weights_path
        if path is None and optimizer_path is not None:
            file = Path(optimizer_path) / _STATE
            try:
                place = json.loads(file.read_text(encoding="utf-8"))["checkpoint"]
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{file} does not say where training backend {self._name!r} saved "
                    f"its state ({error}); resume from a checkpoint that it wrote"
                ) from error
            path = str(Path(optimizer_path) / place)
        if path is not None:
            self._backend.load_checkpoint(path)

    def weight_specs(self) -> dict[str, Tensor]:
        """Return the tensors of `export_weights`, without data."""
        # Kept: without `state_dict` they cost writing a checkpoint, and do not change.
        if self._specs is None:
            self._specs = {
                name: torch.empty(value.shape, dtype=value.dtype, device="meta")
                for name, value in self._weights()
            }
        return self._specs

    def export_weights(self, precision: str) -> Iterator[tuple[str, Tensor]]:
        """Return whole weights by name, tied ones once.

        Raises:
            UnsupportedModelError: The backend offers no way to get them.
        """
        del precision  # the caller casts
        return self._weights()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        if own_method(self._class, "state_dict") is None:
            yield from self._saved_weights()
            return
        seen = set()
        for name, value in self._backend.state_dict().items():
            # Tied weights share memory. Shape and stride too, because a view of a part
            # may begin at the same address; empty tensors all have address 0.
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if value.numel() and key in seen:
                continue
            seen.add(key)
            yield name, value.detach()

    def _saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a Hugging Face folder, if the backend writes one."""
        with tempfile.TemporaryDirectory(prefix="rl-weights-") as folder:
            # The only way left to its weights. Sorted, because exports must give them
            # in the order of `weight_specs`.
            self._backend.save_checkpoint(folder)
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                raise UnsupportedModelError(
                    f"training backend {self._name!r} ({self._class.__qualname__}) "
                    "hands out no weights, so nothing can be sampled from it: it has "
                    "no state_dict(), and its save_checkpoint writes no *.safetensors; "
                    "give its class a method state_dict() that returns tensors by the "
                    "names that the generation backend knows"
                )
            for file in files:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        yield name, tensors.get_tensor(name)

    def shutdown(self) -> None:
        """Shut both objects down."""
        # Either may be missing: `setup` may have failed before it.
        for backend in (self._reference, self._backend):
            if backend is not None:
                backend.shutdown()


def _columns(results: list[dict[str, float]]) -> dict[str, Tensor]:
    """Return loss, norm and rate per global batch, empty if the backend has none."""
    columns = {}
    for name in ("loss", "grad_norm", "lr"):
        known = [result[name] for result in results if name in result]
        dtype = torch.float64 if name == "lr" else torch.float32
        columns[name] = torch.tensor(known, dtype=dtype)
    return columns
