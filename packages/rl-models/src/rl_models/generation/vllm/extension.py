"""Extension of vLLM's workers: weights that can be replaced in place.

vLLM imports this module in the process that holds the model, before the model is built;
on a CPU it then changes vLLM's layers, see `cpu_layers`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from vllm.platforms import current_platform

from rl_distributed.transfer.manifest import Manifest, TensorEntry
from rl_models.errors import WeightSyncError
from rl_models.generation.vllm.adapter import load_adapter, without_wrappers
from rl_models.generation.vllm.adapter_args import SCALE
from rl_models.generation.vllm.experts import experts_apart
from rl_models.generation.vllm.parameter_names import held_tensors
from rl_models.generation.vllm.process_watch import end_with_parent
from rl_models.generation.vllm.rank_weight_update import RankWeightUpdate
from rl_models.weights.adapters import is_of_adapter, set_apart
from rl_models.weights.loading import changed_tensors

__all__ = ["WeightExtension", "load_into", "missing_weights"]

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


# Here, because this module is the first of ours that runs in vLLM's own process.
end_with_parent()

if current_platform.is_cpu():
    from rl_models.generation.vllm.cpu_layers import adapt_cpu_layers

    adapt_cpu_layers()


class WeightExtension:
    """Methods that vLLM mixes into its worker; called by `collective_rpc`."""

    model_runner: Any
    reload_weights: Callable[..., None]
    rl_weights: RankWeightUpdate | None = None
    """Set in a worker that receives weights by itself and follows an engine
    elsewhere."""
    rl_adapter: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The last loaded adapter, as it was sent."""

    def rl_load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights in place, if the engine is in this process.

        An engine with an adapter gets the adapter, after the base or alone.

        Raises:
            WeightSyncError: Tensors are missing, unknown or of another shape.
        """
        model = self.model_runner.get_model()
        if not hasattr(model, "lora_manager"):
            self._load_all(model, tensors)
            return
        adapter: dict[str, torch.Tensor] = {}
        base = set_apart(tensors, adapter)
        # Looking for a first base tensor reads a stream that has none to its end;
        # loading an empty base would report every weight as missing.
        first = next(base, None)
        if first is not None:
            with without_wrappers(model):
                self._load_all(model, chain([first], base))
        scale = self.model_runner.vllm_config.additional_config[SCALE]
        load_adapter(model, adapter, float(scale))
        self.rl_adapter = adapter

    def _load_all(
        self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        reload = None if _is_plain(model) else self._reload
        load_into(model, experts_apart(model, tensors), reload)

    def rl_load_file(self, path: str, entries: Sequence[Sequence[Any]]) -> str:
        """Replace all weights by those in a file of raw bytes.

        Args:
            path: The file; a worker that receives weights by itself takes its own.
            entries: Name, name of the data type, shape and first byte of each tensor.

        Returns:
            The problem with them, or an empty string once they are loaded. It is no
            exception, because that would lose its type between processes.
        """
        staged = self.rl_weights
        problem = "the weights could not be loaded"
        try:
            if staged is not None:
                path, entries = staged.file()
            with open(path, "rb") as file:
                # Writable, because torch warns of buffers that are not; a private copy,
                # because other ranks may read the same file.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.rl_load_weights(_tensors_in(memory, entries))
            problem = ""
        except WeightSyncError as error:
            problem = str(error)
        finally:
            # Whatever happened: `offer` waits for it in another thread.
            if staged is not None:
                staged.loaded(problem)
        return problem

    def rl_staged(self, number: int) -> str | None:
        """Return the problem with the weights of an update, or an empty string.

        None if they have not all arrived.
        """
        # Rank 0 received its own before it asks.
        return "" if self.rl_weights is None else self.rl_weights.state(number)

    def rl_drop_staged(self, number: int, problem: str) -> None:
        """Give up an update, because a rank of the replica has no weights."""
        if self.rl_weights is not None:
            self.rl_weights.drop(number, problem)

    def rl_changed_weights(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Return the names of tensors that differ from what was sent.

        Args:
            entries: `TensorEntry.to_json()` of each that was sent.

        Returns:
            Their names; None if weights are in a form that cannot be compared.
        """
        model = self.model_runner.get_model()
        manifest = Manifest(tuple(map(TensorEntry.from_json, entries)))
        dtypes = {entry.name: entry.torch_dtype for entry in manifest.entries}
        found: list[str] = []

        def held() -> Iterator[tuple[str, torch.Tensor]]:
            base = [name for name in dtypes if not is_of_adapter(name)]
            for name, tensor in chain(
                held_tensors(model, base), self.rl_adapter.items()
            ):
                found.append(name)
                # Digests are of bytes, so the data type must be the one that was sent.
                yield name, tensor.to(dtypes[name])

        with without_wrappers(model):
            if not _is_plain(model):
                return None
            changed = changed_tensors(manifest, held())
        # A tensor whose parameter was not found cannot be compared, which is no
        # difference.
        return changed if len(found) == len(dtypes) else None

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=tensors)


def load_into(
    model: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    reload: Callable[[Iterable[tuple[str, torch.Tensor]]], None] | None = None,
) -> None:
    """Load tensors by their Hugging Face names and check that none was left out.

    Args:
        model: A model of vLLM.
        tensors: All of its weights; errors of the iterator are passed on.
        reload: Loads weights that are kept in a form of their own (quantized layers,
            experts); None: the model's `load_weights`.

    Raises:
        WeightSyncError: Tensors are missing, unknown or of another shape.
    """
    seen: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            seen.append(name)
            yield name, tensor

    stream = watched()
    loaded: set[str] | None = None
    try:
        with torch.no_grad():
            if reload is None:
                loaded = model.load_weights(stream)
            else:
                reload(stream)
            for _ in stream:
                # The digests that verify the stream come at its end.
                pass
    except (
        AssertionError,
        KeyError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        # A WeightSyncError is one of these, and comes from the stream. vLLM's loaders
        # check shapes by assertions and find names by subscripts and attributes.
        if isinstance(error, WeightSyncError):
            raise
        at = seen[-1] if seen else "the first tensor"
        raise WeightSyncError(
            f"vLLM cannot load {at}: {type(error).__name__}: {error}. Trainer and "
            "generator must be built from the same model."
        ) from error
    missing = missing_weights(model, seen, loaded)
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise WeightSyncError(
            f"{len(missing)} tensors of the model were not among those sent: {shown}. "
            "Trainer and generator must be built from the same model."
        )


def missing_weights(
    model: Any, seen: Iterable[str], loaded: set[str] | None
) -> list[str]:
    """Return the names of weights that were not sent.

    vLLM keeps some tensors fused (`q_proj`, `k_proj` and `v_proj` as `qkv_proj`) and
    counts these as loaded once a single part has arrived; here every part must have
    arrived. Tied weights are one parameter.

    Args:
        model: A model of vLLM.
        seen: Names that were sent.
        loaded: vLLM's own names of the loaded parameters; None if not known.
    """
    sent = set(seen)
    fused = getattr(model, "packed_modules_mapping", None) or {}
    missing = []
    for name, _ in model.named_parameters():
        if loaded is not None and name not in loaded:
            missing.append(name)
            continue
        parts = _parts(name, fused)
        if any(part in sent for part in parts):
            missing += [part for part in parts if part not in sent]
    return missing


def _parts(name: str, fused: dict[str, list[str]]) -> list[str]:
    words = name.split(".")
    for place, word in enumerate(words):
        if word in fused:
            return [
                ".".join([*words[:place], part, *words[place + 1 :]])
                for part in fused[word]
            ]
    return []


def _is_plain(model: Any) -> bool:
    """Return whether weights are kept as in a checkpoint, apart from fusing."""
    return all(
        type(method).__name__ in _PLAIN_METHODS
        for module in model.modules()
        if (method := getattr(module, "quant_method", None)) is not None
    )


def _tensors_in(
    memory: Any, entries: Sequence[Sequence[Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, start in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        count = 1
        for size in shape:
            count *= size
        if not count:
            # `frombuffer` refuses a buffer of no bytes.
            yield name, torch.empty(tuple(shape), dtype=dtype)
            continue
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        yield name, flat.view(tuple(shape))
