"""The `dtensor` training backend: one rank of any Hugging Face causal LM.

A train step, per global batch:
```
count trained rows and tokens over all ranks
for each micro-batch: log-probs at trained positions -> loss / global count -> backward
gradients are summed over ranks in the last backward -> norm -> clip -> step -> schedule
```
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_distributed.suggestion import did_you_mean
from rl_models.config import PolicyConfig
from rl_models.interfaces import LossFunction
from rl_models.loss_traits import LossTraits
from rl_models.training.dtensor.forward import (
    forward_logits,
    forward_logprobs,
    forward_values,
)
from rl_models.training.dtensor.gradients import gradient_norm, local_gradients
from rl_models.training.dtensor.layout import Layout, forget_groups
from rl_models.training.dtensor.model import (
    RankModel,
    load_model,
    load_weights_into,
)
from rl_models.training.dtensor.schedule import run_micro_batches
from rl_models.training.dtensor.state import (
    load_training_state,
    save_training_state,
    saved_names,
)
from rl_models.training.dtensor.topk import student_inputs, topk_of_shard
from rl_models.training.dtensor.traits import (
    Traits,
    check_expert_layout,
    check_pipeline_layout,
)
from rl_models.training.dtensor.weight_parts import sharded_weights
from rl_models.training.dtensor.weight_source import WeightSource
from rl_models.training.global_batch import micro_batches, num_trained, part_of
from rl_models.training.global_loss import GlobalLoss, Metrics
from rl_models.training.huggingface_files import save_whole_model
from rl_models.training.optimizer import check_elementwise, check_optimizer
from rl_models.training.optimizer_steps import OptimizerSteps
from rl_models.training.positions import needed_for_logprobs, needed_for_values
from rl_models.training.process_group import (
    Ranks,
    join_process_group,
    leave_process_group,
)
from rl_models.training.rank_process import prepare_process
from rl_models.training.reference_model import no_reference_model
from rl_models.training.train_step import train_global_batches
from rl_models.types import (
    InputRows,
    LossInputType,
    TrainingRows,
)
from rl_models.weight_request import WeightKind
from rl_models.weights.adapters import sent_name
from rl_models.weights.collecting import ShardedWeights
from rl_models.weights.rounding import rounded, rounding_dtype

__all__ = ["DTensorTrainingBackend"]

_log = get_logger(__name__)


class DTensorTrainingBackend(Traits):
    """One rank; rank and world size come from `RANK` and `WORLD_SIZE`."""

    config: PolicyConfig
    ranks: Ranks
    model: RankModel

    def __init__(self) -> None:
        self._reference: RankModel | None = None

    @staticmethod
    def check_config(config: PolicyConfig) -> None:
        """Check the compiler, and build optimizer and schedule for a single number.

        Raises:
            ConfigError: A class or an argument of it does not exist or does not fit.
        """
        check_expert_layout(config)
        check_pipeline_layout(config)
        _check_compiler(config.dtensor.compile)
        if config.parallelism.tensor > 1:
            check_elementwise(config.optimizer)
        check_optimizer(config)

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        init_reference_model: bool = False,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
    ) -> None:
        """Load and shard the model; see `TrainingBackend.setup`."""
        self.config = PolicyConfig.from_dict(config)
        self.ranks = prepare_process(self.config)
        join_process_group(self.ranks, self.config.dtensor.deadline_s)
        self._layout = Layout(self.ranks, self.config)
        # Ranks that share a layer have the same tokens, so dropout must draw the same
        # numbers there.
        torch.manual_seed(self.config.seed + self._layout.random_rank)
        model, weights = load_model(self.config, self._layout)
        # A model with its adapters off is the reference for free.
        self._base_is_reference = init_reference_model and self.config.lora is not None
        if init_reference_model and not self._base_is_reference:
            # Copied before `RankModel` cuts and shards the model in place.
            self._add_reference(copy.deepcopy(model), weights)
        self.model = RankModel(
            model,
            weights,
            self.config,
            self._layout,
            keeps_base=self._base_is_reference,
        )
        self._steps = OptimizerSteps(self.config, self.model.trained, self.ranks.device)
        # Last, so that the reference keeps the weights that the policy was made of.
        if weights_path is not None or optimizer_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    def _add_reference(self, model: Any, weights: WeightSource | None) -> None:
        """Keep a frozen copy of the model of `policy.model_name`."""
        self._reference = RankModel(
            model, weights, self.config, self._layout, trainable=False
        )
        model.eval()

    def _keep_reference(self) -> None:
        """Have a reference of its own, before adapters get another base."""
        if self._base_is_reference:
            self._add_reference(*load_model(self.config, self._layout))
            self._base_is_reference = False
            self.model.forget_base()

    def train_step(
        self,
        data: TrainingRows,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> dict[str, Any]:
        """Train on this rank's shard; see `TrainingBackend.train_step`.

        Returns:
            `loss`, `grad_norm` and `lr` per global batch (the same on all ranks) and
            this rank's `all_mb_metrics`.
        """
        self.model.module.train(not eval_mode)
        result, metrics = train_global_batches(
            data,
            global_batch_size // self._layout.data_size,
            self._steps.optimizer,
            lambda batch: self._accumulate(batch, loss_fn, micro_batch_size, eval_mode),
            None if eval_mode else self._update,
        )
        # Frees the memory of the gradients for other work on this device.
        self._steps.optimizer.zero_grad(set_to_none=True)
        return {**result, "all_mb_metrics": metrics}

    def change_optimizer(self, settings: Mapping[str, float]) -> None:
        """Change settings of the optimizer; see `TrainingPolicy.change_optimizer`."""
        self._steps.change(settings)

    def _accumulate(
        self,
        batch: TrainingRows,
        loss_fn: LossFunction,
        micro_batch_size: int,
        eval_mode: bool,
    ) -> tuple[float, Metrics]:
        """Accumulate gradients of a global batch; return its loss over all ranks."""
        # Not only after the step: one that raised must leave no gradients behind.
        self._steps.optimizer.zero_grad(set_to_none=True)
        losses = GlobalLoss(
            loss_fn, batch, self.ranks.device, self._layout.sum_over_data
        )
        rows = micro_batches(batch, micro_batch_size)

        def forward(number: int) -> Tensor | None:
            part = part_of(batch, rows[number])
            with torch.set_grad_enabled(not eval_mode):
                inputs = self._loss_inputs(part, loss_fn)
                if not self.model.has_head:
                    return None
                loss, metrics = losses.share(part, inputs)
                if self.model.router_loss is not None and not eval_mode:
                    # A batch without a trained token must not divide by 0.
                    share = num_trained(part)[1] / losses.num_tokens.clamp(min=1.0)
                    balance = self.model.router_loss.take(share)
                    metrics = {**metrics, "router_loss": balance.detach()}
                    loss = loss + balance
            losses.add(loss, metrics)
            return loss

        run_micro_batches(self.model, len(rows), forward, backward=not eval_mode)
        metrics = self.model.from_last_stage(losses.metrics)
        if eval_mode:
            self.model.free_gathered()
        else:
            self.model.finish_gradients()
        return losses.over_ranks(), metrics

    def _loss_inputs(
        self, part: TrainingRows, loss_fn: LossFunction
    ) -> dict[str, Tensor]:
        traits = LossTraits.of(loss_fn)
        if traits.input_type is LossInputType.LOGIT:
            return {"logits": forward_logits(self.model, part.columns["input_ids"])}
        if traits.input_type is LossInputType.VALUE:
            needed = needed_for_values(part)
            return {
                "values": forward_values(self.model, part.columns["input_ids"], needed)
            }
        if traits.input_type is LossInputType.DISTILLATION:
            return student_inputs(
                self.model,
                part,
                self.config.logprob_temperature,
                needs_entropy=traits.needs_entropy,
            )
        logprobs = forward_logprobs(
            self.model,
            part.columns["input_ids"],
            needed_for_logprobs(part),
            self.config.logprob_temperature,
        )
        return {"next_token_logprobs": logprobs}

    def _update(self) -> tuple[float, Metrics]:
        """Take a step; return the norm of its gradients and its metrics."""
        parameters = self.model.parameters
        norm = gradient_norm(parameters, self.ranks, self.model.num_holders)
        is_taken = self._steps.take(norm, local_gradients(parameters))
        # Metrics of all ranks are put together, and a skipped step is one step.
        skipped = {"skipped_steps": [float(not is_taken)]}
        return norm, skipped if self.ranks.is_first else {}

    @torch.no_grad()
    def get_logprobs(
        self,
        data: InputRows,
        *,
        micro_batch_size: int,
        reference: bool = False,
    ) -> Tensor:
        """[B, S] log-probs of this shard; see `TrainingBackend.get_logprobs`."""
        if reference and self._base_is_reference:
            with self.model.base():
                return self._logprobs_of(self.model, data, micro_batch_size)
        model = self._reference if reference else self.model
        if model is None:
            raise no_reference_model()
        return self._logprobs_of(model, data, micro_batch_size)

    def _logprobs_of(
        self,
        model: RankModel,
        data: InputRows,
        micro_batch_size: int,
    ) -> Tensor:
        temperature = self.config.logprob_temperature
        return _by_rows(
            model,
            data,
            micro_batch_size,
            lambda part: forward_logprobs(
                model,
                part.columns["input_ids"],
                needed_for_logprobs(part),
                temperature,
            ),
            first_column=1,
        )

    @torch.no_grad()
    def get_values(self, data: InputRows, *, micro_batch_size: int) -> Tensor:
        """[B, S] values of this shard; see `TrainingBackend.get_values`."""
        model = self.model
        return _by_rows(
            model,
            data,
            micro_batch_size,
            lambda part: forward_values(
                model, part.columns["input_ids"], needed_for_values(part)
            ),
        )

    def get_topk_logits(
        self,
        data: InputRows,
        *,
        k: int,
        micro_batch_size: int,
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        """Columns of this shard; see `TrainingBackend.get_topk_logits`."""
        chosen = temperature or self.config.logprob_temperature
        return topk_of_shard(
            self.model, data, k=k, micro_batch_size=micro_batch_size, temperature=chosen
        )

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Write this rank's part; see `PolicyInterface.save_checkpoint`."""
        save_whole_model(
            self.model.module,
            self.model.full_tensors(),
            self.config,
            weights_path,
            tokenizer_path,
            is_first=self.ranks.is_first,
        )
        self._save_adapters(Path(weights_path) / "adapter")
        if optimizer_path is not None:
            save_training_state(
                Path(optimizer_path),
                self.model,
                self._steps.optimizer,
                self._steps.scheduler,
            )
        # No rank may report the checkpoint before all files are written.
        self.ranks.barrier()

    def _save_adapters(self, folder: Path) -> None:
        adapters = self.model.adapters
        if adapters is None:
            return
        parts = [
            (name, value)
            for name, value in self.model.full_parts(trained=True)
            if self.ranks.is_first
        ]
        if self.ranks.is_first:
            adapters.save(parts, folder)

    def load_checkpoint(
        self,
        weights_path: str | Path | None,
        optimizer_path: str | Path | None = None,
    ) -> None:
        """Load weights, or with `optimizer_path` the exact training state."""
        if optimizer_path is not None:
            folder = Path(optimizer_path)
            # Without a base it refers to that of `policy.model_name`, which then stays.
            if self._base_is_reference and self.model.has_base(saved_names(folder)):
                self._keep_reference()
            load_training_state(
                folder, self.model, self._steps.optimizer, self._steps.scheduler
            )
        elif weights_path is not None:
            self._keep_reference()
            load_weights_into(self.model, self.config, weights_path)

    def weight_specs(self) -> dict[str, Tensor]:
        """Return the tensors of `export_weights`, without data."""
        return self.model.whole_shapes()

    def export_weights(self, precision: str) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in Hugging Face names; see `TrainingBackend.export_weights`."""
        dtype = rounding_dtype(self.config.precision, precision)
        for name, value in self.model.full_tensors():
            yield name, rounded(value, dtype)

    def sharded_weights(self, precision: str, kind: WeightKind) -> ShardedWeights:
        """Return what this rank holds; see `ShardedExport.sharded_weights`."""
        dtype = rounding_dtype(self.config.precision, precision)
        return sharded_weights(self.model, kind, dtype)

    def adapter_specs(self, *, with_base: bool) -> dict[str, Tensor]:
        """Return the tensors of `export_adapters`, without data."""
        shapes = self.model.part_shapes(trained=not with_base)
        return {sent_name(name): shape for name, shape in shapes.items()}

    def export_adapters(
        self, precision: str, *, with_base: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of adapters; see `AdapterExport.export_adapters`."""
        dtype = rounding_dtype(self.config.precision, precision)
        for name, value in self.model.full_parts(trained=not with_base):
            yield sent_name(name), rounded(value, dtype)

    @property
    def frees_memory(self) -> bool:
        """Whether torch caches freed memory; on a CPU it is returned at once."""
        return self.ranks.device.type == "cuda"

    def prepare_for_training(self) -> None:
        """Do nothing: a step allocates the memory that it needs."""

    def finish_training(self) -> None:
        """Return the memory that torch has cached to the GPU."""
        if self.frees_memory:
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Leave the process group."""
        # First, because their groups hold connections of the process group.
        forget_groups()
        leave_process_group()


def _by_rows(
    model: RankModel,
    data: InputRows,
    micro_batch_size: int,
    forward: Callable[[InputRows], Tensor],
    *,
    first_column: int = 0,
) -> Tensor:
    """Return [B, S] results of this shard on every stage.

    Args:
        model: The model.
        data: The rows.
        micro_batch_size: Rows per pass.
        forward: Returns [b, columns] of a micro-batch.
        first_column: First column of these.
    """
    model.module.eval()
    whole = torch.zeros(data.columns["input_ids"].shape, dtype=torch.float32)
    for rows in micro_batches(data, micro_batch_size):
        found = forward(part_of(data, rows))
        end = first_column + found.shape[1]
        whole[rows.start : rows.stop, first_column:end] = found.cpu()
    # Forward passes without a backward pass leave FSDP's weights gathered.
    model.free_gathered()
    return model.from_last_stage(whole)


def _check_compiler(name: str | None) -> None:
    known = torch.compiler.list_backends(exclude_tags=None)
    if name is not None and name not in known:
        raise ConfigError(
            "policy.dtensor.compile must be a backend of torch.compile: got "
            f"{name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
        )
