"""The `megatron` training backend: one rank of a causal LM of Megatron-core.

A train step, per global batch:
```
count trained rows and tokens over the ranks that have different rows
for each micro-batch: layers -> log-probs at trained positions -> loss / global count
    -> backward
gradients are added up over ranks -> norm -> clip -> step -> schedule
```
Ranks that share layers or stages have the same rows, and give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_distributed.errors import ConfigError
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import LossFunction
from rl_models.loss_traits import LossTraits
from rl_models.training.dtensor.microbatch import ModelBatch
from rl_models.training.global_batch import micro_batches, part_of
from rl_models.training.global_loss import GlobalLoss, Metrics
from rl_models.training.huggingface_files import save_whole_model
from rl_models.training.megatron.families import check_layout, model_config
from rl_models.training.megatron.traits import Traits
from rl_models.training.optimizer import check_elementwise, check_optimizer
from rl_models.training.optimizer_steps import OptimizerSteps
from rl_models.training.positions import needed_for_logprobs, needed_for_values
from rl_models.training.process_group import (
    Ranks,
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
from rl_models.weights.collecting import ShardedWeights
from rl_models.weights.rounding import rounded, rounding_dtype

# The driver calls the checks of this class, and has no Megatron-core.
_HAS_MEGATRON = find_spec("megatron") is not None
if _HAS_MEGATRON:
    from rl_models.training.megatron.decoder import MegatronDecoder
    from rl_models.training.megatron.forward import (
        logits_of,
        logprobs_of,
        plan,
        values_of,
    )
    from rl_models.training.megatron.gradients import (
        gradient_norm,
        gradients_of,
        sum_gradients,
    )
    from rl_models.training.megatron.layout import (
        RankLayout,
        join_layout,
        leave_layout,
    )
    from rl_models.training.megatron.model import MegatronModel
    from rl_models.training.megatron.pipeline import run_micro_batches
    from rl_models.training.megatron.state import load_state, save_state
    from rl_models.training.megatron.weight_parts import sharded_weights

__all__ = ["MegatronTrainingBackend"]


class MegatronTrainingBackend(Traits):
    """One rank; rank and world size come from `RANK` and `WORLD_SIZE`."""

    config: PolicyConfig
    ranks: Ranks
    layout: RankLayout
    model: MegatronModel

    def __init__(self) -> None:
        self._reference: MegatronModel | None = None

    @staticmethod
    def check_config(config: PolicyConfig) -> None:
        """Check optimizer, schedule, model, and settings that are not supported.

        Raises:
            ConfigError: A setting cannot work.
            UnsupportedModelError: The model in this folder cannot be trained.
        """
        stages = config.megatron.virtual_stages
        if config.sequence_packing is not None and stages > 1:
            raise ConfigError(
                "policy.sequence_packing must be null with "
                "policy.megatron.virtual_stages above 1, whose micro-batches have one "
                f"shape: got a section and {stages} stages; use "
                "policy.dynamic_batching, or 1 stage"
            )
        _check_sampling(config)
        if config.megatron.distributed_optimizer:
            check_elementwise(config.optimizer, "policy.megatron.distributed_optimizer")
        elif config.parallelism.tensor > 1:
            check_elementwise(config.optimizer)
        check_optimizer(config)
        # A model on the hub is checked by its workers, which download it anyway.
        if check_model_folder(config.model_name) is not None:
            check_layout(config, model_config(config))

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        init_reference_model: bool = False,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
    ) -> None:
        """Load this rank's part of the model; see `TrainingBackend.setup`.

        Raises:
            ConfigError: This process has no Megatron-core.
        """
        if not _HAS_MEGATRON:
            raise ConfigError(
                "the training backend 'megatron' needs Megatron-core, which this "
                "process does not have: install rl-models[megatron], or train by a "
                "TrainingPolicy, which starts workers in an environment that has it"
            )
        self.config = PolicyConfig.from_dict(config)
        self.ranks = prepare_process(self.config)
        # Before any model: Megatron-core asks its process groups for sizes of layers.
        shape = model_config(self.config)
        check_layout(self.config, shape)
        has_experts = bool(getattr(shape, "num_experts", 0))
        self.layout = join_layout(self.config, self.ranks, has_experts=has_experts)
        if init_reference_model:
            self._reference = MegatronModel(self.config, self.layout, trainable=False)
        self.model = MegatronModel(self.config, self.layout)
        self._steps = OptimizerSteps(
            self.config, self.model.masters.parameters, self.layout.device
        )
        if weights_path is not None or optimizer_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

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
        self.model.train(not eval_mode)
        result, metrics = train_global_batches(
            data,
            global_batch_size // self.layout.data_size,
            self._steps.optimizer,
            lambda batch: self._accumulate(batch, loss_fn, micro_batch_size, eval_mode),
            None if eval_mode else self._update,
        )
        # Frees the memory of the gradients for other work on this device.
        self.model.masters.zero_grad()
        # The driver reads metrics from the first stage; the last one computes them.
        last = self.layout.num_stages - 1
        return {
            **result,
            "all_mb_metrics": self.layout.object_from_stage(metrics, last),
        }

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
        self.model.masters.zero_grad()
        losses = GlobalLoss(
            loss_fn, batch, self.layout.device, self.layout.sum_over_data
        )
        parts = [
            part_of(batch, some) for some in micro_batches(batch, micro_batch_size)
        ]
        inputs = [self._model_input(part, loss_fn) for part in parts]

        def finish(number: int, hidden: Tensor) -> Tensor:
            part = parts[number]
            given = self._loss_inputs(part, inputs[number], hidden, loss_fn)
            loss, metrics = losses.share(part, given)
            losses.add(loss, metrics)
            return loss

        given = [
            {"input_ids": part.columns["input_ids"].to(self.layout.device)}
            if planned is None
            else planned.inputs
            for part, planned in zip(parts, inputs, strict=True)
        ]
        run_micro_batches(self.model, given, finish, backward=not eval_mode)
        # Only the last stage has computed losses.
        self.layout.from_stage(losses.total, self.layout.num_stages - 1)
        return losses.over_ranks(), losses.metrics

    def _model_input(
        self, part: TrainingRows, loss_fn: LossFunction
    ) -> ModelBatch | None:
        """Plan the forward pass of a micro-batch; None if all of it is needed."""
        kind = LossTraits.of(loss_fn).input_type
        if kind is LossInputType.LOGIT:
            return None
        if kind is LossInputType.VALUE:
            return plan(self.model, part.columns["input_ids"], needed_for_values(part))
        if kind is not LossInputType.LOGPROB:
            raise UnsupportedModelError(
                "the training backend 'megatron' computes log-probs, logits and "
                f"values: got a loss of {kind.name.lower()}; use "
                "policy.backend=dtensor"
            )
        return plan(self.model, part.columns["input_ids"], needed_for_logprobs(part))

    def _loss_inputs(
        self,
        part: TrainingRows,
        planned: ModelBatch | None,
        hidden: Tensor,
        loss_fn: LossFunction,
    ) -> dict[str, Tensor]:
        if planned is None:
            rows, columns = part.columns["input_ids"].shape
            return {"logits": logits_of(self.model, hidden, rows, columns)}
        if LossTraits.of(loss_fn).input_type is LossInputType.VALUE:
            return {"values": values_of(self.model, hidden, planned)}
        temperature = self.config.logprob_temperature
        logprobs = logprobs_of(self.model, hidden, planned, temperature)
        return {"next_token_logprobs": logprobs}

    def _update(self) -> tuple[float, Metrics]:
        """Take a step; return the norm of its gradients and its metrics."""
        sum_gradients(self.model)
        norm = gradient_norm(self.model)
        is_taken = self._steps.take(norm, gradients_of(self.model))
        if is_taken:
            self.model.masters.publish()
        # The ranks of the first copy of the model: metrics of copies are put together,
        # and a skipped step is one step.
        skipped = {"skipped_steps": [float(not is_taken)]}
        return norm, skipped if self.layout.data_rank == 0 else {}

    def get_logprobs(
        self,
        data: InputRows,
        *,
        micro_batch_size: int,
        reference: bool = False,
    ) -> Tensor:
        """[B, S] log-probs of this shard; see `TrainingBackend.get_logprobs`."""
        model = self._reference if reference else self.model
        if model is None:
            raise no_reference_model()
        temperature = self.config.logprob_temperature
        return self._by_rows(
            model,
            data,
            micro_batch_size,
            needed_for_logprobs,
            lambda hidden, batch: logprobs_of(model, hidden, batch, temperature),
            first_column=1,
        )

    def get_values(self, data: InputRows, *, micro_batch_size: int) -> Tensor:
        """[B, S] values of this shard; see `TrainingBackend.get_values`."""
        model = self.model
        return self._by_rows(
            model,
            data,
            micro_batch_size,
            needed_for_values,
            lambda hidden, batch: values_of(model, hidden, batch),
        )

    def _by_rows(
        self,
        model: MegatronModel,
        data: InputRows,
        micro_batch_size: int,
        needed: Callable[[InputRows], Tensor],
        finish: Callable[[Tensor, ModelBatch], Tensor],
        *,
        first_column: int = 0,
    ) -> Tensor:
        """Return [B, S] results of this shard, without gradients, on every stage.

        Args:
            model: The model.
            data: The rows.
            micro_batch_size: Rows per pass.
            needed: Returns the positions of a micro-batch that results are needed for.
            finish: Returns [b, columns] from the last stage's hidden states.
            first_column: First column of these.
        """
        model.train(False)
        input_ids = data.columns["input_ids"]
        rows = micro_batches(data, micro_batch_size)
        parts = [part_of(data, some) for some in rows]
        plans = [plan(model, p.columns["input_ids"], needed(p)) for p in parts]
        device = self.layout.device
        whole = torch.zeros(input_ids.shape, dtype=torch.float32, device=device)

        def write(number: int, hidden: Tensor) -> Tensor:
            some = rows[number]
            found = finish(hidden, plans[number])
            end = first_column + found.shape[1]
            whole[some.start : some.stop, first_column:end] = found
            # Megatron-core's schedule wants a number, and does not use it without
            # gradients.
            return found.sum()

        given = [each.inputs for each in plans]
        run_micro_batches(model, given, write, backward=False)
        return self.layout.from_stage(whole, self.layout.num_stages - 1).cpu()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.layout.device

    def decoder(self) -> MegatronDecoder:
        """Return a decoder that samples with the weights in training."""
        return MegatronDecoder(self.model)

    def get_topk_logits(
        self,
        data: InputRows,
        *,
        k: int,
        micro_batch_size: int,
        temperature: float | None = None,
    ) -> dict[str, Tensor]:
        """Refuse, because teachers need another backend.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(
            "the training backend 'megatron' does not give the most probable tokens; "
            "use a teacher with policy.backend=dtensor"
        )

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Write this rank's part; see `PolicyInterface.save_checkpoint`."""
        save_whole_model(
            self.model.whole,
            self.model.full_tensors(),
            self.config,
            weights_path,
            tokenizer_path,
            is_first=self.ranks.is_first,
        )
        if optimizer_path is not None:
            save_state(
                Path(optimizer_path),
                self.model,
                self._steps.optimizer,
                self._steps.scheduler,
                self.ranks,
            )
        # No rank may report the checkpoint before all files are written.
        self.layout.barrier()

    def load_checkpoint(
        self,
        weights_path: str | Path | None,
        optimizer_path: str | Path | None = None,
    ) -> None:
        """Load weights, or with `optimizer_path` the exact training state."""
        if optimizer_path is not None:
            load_state(
                Path(optimizer_path),
                self.model,
                self._steps.optimizer,
                self._steps.scheduler,
                self.ranks,
            )
        elif weights_path is not None:
            self.model.load(weights_path)

    def weight_specs(self) -> dict[str, Tensor]:
        """Return the tensors of `export_weights`, without data."""
        return {
            source: torch.empty(self.model.shapes[source], device="meta")
            for entry in self.model.entries.values()
            for source in entry.sources
        }

    def export_weights(self, precision: str) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in Hugging Face names; see `TrainingBackend.export_weights`."""
        dtype = rounding_dtype(self.config.precision, precision)
        for name, value in self.model.full_tensors(computed=True):
            yield name, rounded(value, dtype)

    def sharded_weights(self, precision: str, kind: WeightKind) -> ShardedWeights:
        """Return what this rank holds; see `ShardedExport.sharded_weights`."""
        dtype = rounding_dtype(self.config.precision, precision)
        return sharded_weights(self.model, self.weight_specs(), dtype)

    def shutdown(self) -> None:
        """Leave the process groups."""
        if _HAS_MEGATRON:
            leave_layout()
        leave_process_group()


def _check_sampling(config: PolicyConfig) -> None:
    """Refuse to sample on ranks that share experts with ranks of other rows."""
    # Every step of decoding needs all of them, and rows end after different steps.
    expert, generation = config.parallelism.expert, config.generation
    if expert > 1 and generation is not None and generation.backend == "megatron":
        raise ConfigError(
            "policy.generation.backend must be one with replicas, such as vllm or "
            f"huggingface, with policy.parallelism.expert {expert}, whose ranks decode "
            "rows of their own: got 'megatron'"
        )
