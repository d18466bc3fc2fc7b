"""The trainer of direct preference optimisation.

```
pairs -> [log-probs of the reference, once] -> rows -> train
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rl_algorithms.data import DataModule
from rl_algorithms.dpo.config import DPOConfig
from rl_algorithms.dpo.reference import (
    ReferenceLogprobs,
    answer_logprobs,
    reference_identity,
)
from rl_algorithms.losses.dpo import DPOLossFn
from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.components import Needs, resume_paths
from rl_algorithms.trainers.data_limits import keep_small_data
from rl_algorithms.trainers.schedule import EarlyStop, ValidationSchedule
from rl_algorithms.trainers.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_algorithms.trainers.validation import ValidationResult
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.logging import get_logger
from rl_distributed.metrics import reduce_metrics
from rl_distributed.metrics.values import Mean, Sum

__all__ = ["DPOTrainer"]

_logger = get_logger(__name__)
_CACHE_FILE = "reference_logprobs.npz"
_PAIRS_PER_CALL = 512
_SHARES = ("loss", "preference_loss", "sft_loss")


class DPOTrainer(BaseTrainer[DPOConfig]):
    """Direct preference optimisation (Rafailov et al., 2305.18290) and its forms."""

    algorithm: ClassVar[str] = "dpo"
    config_class: ClassVar[type[DPOConfig]] = DPOConfig

    def _needs(self, has_environment: bool) -> Needs:
        return Needs(reference_policy=not self._precomputes)

    @property
    def _precomputes(self) -> bool:
        return self.config.dpo.precompute_reference_logprobs

    def _load_data(self, dataset: Any, val_dataset: Any) -> tuple[Any, Any]:
        settings = self.config.dpo
        size = settings.val_global_batch_size
        data = DataModule(
            keep_small_data(self.config.data, dataset, self.plan.num_prompts),
            self.components.tokenizer,
            kind="preferences",
            batch_size=self.plan.num_prompts,
            val_batch_size=size,
            max_length=self.config.policy.max_total_sequence_length,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
            max_val_rows=settings.val_batches and settings.val_batches * size,
        )
        self._data = data
        return data.train_loader, data.validation_loader()

    def _limits(self) -> tuple[int | None, int | None]:
        return self.config.dpo.max_num_epochs, self.config.dpo.max_num_steps

    def _validation_schedule(self) -> ValidationSchedule:
        s = self.config.dpo
        return ValidationSchedule(
            s.val_period, s.val_start_at, s.val_at_start, s.val_at_end
        )

    def _early_stop(self) -> EarlyStop:
        s = self.config.dpo
        metric, threshold = s.stop_at_validation_metric, s.stop_at_validation_threshold
        if metric is None or threshold is None:
            return EarlyStop()
        return EarlyStop(metric, threshold, higher_is_better="loss" not in metric)

    def _build_loss(self) -> DPOLossFn:
        return DPOLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        self._loss = self._build_loss()
        self._reference: ReferenceLogprobs | None = None

    def _train_step(self, batch: Any) -> Mapping[str, Any]:
        metrics: dict[str, Any] = dict(count_tokens(batch))
        rows, rows_per_step = pad_to_plan(batch, self.plan, rows_per_sample=2)
        rows["reference_policy_logprobs"] = self._reference_logprobs(rows)
        output = self.train_policy(rows, self._loss, rows_per_step)
        return metrics | train_metrics(output)

    def _validate(self, loader: Any) -> ValidationResult:
        """Measure the loss and its metrics over all held-out pairs."""
        found = []
        for batch in loader:
            batch["reference_policy_logprobs"] = self._reference_logprobs(batch)
            output = self.components.policy.train(
                batch, self._loss, eval_mode=True, gbs=batch.size
            )
            metrics = train_metrics(output)
            num_pairs = float(batch["sample_mask"].sum()) / 2
            for name in _SHARES:
                metrics[name] = Mean(float(metrics[name]) * num_pairs, num_pairs)
            for name in ("grad_norm", "lr", "num_valid_samples"):
                metrics.pop(name, None)
            found.append(metrics | {"num_valid_samples": Sum(num_pairs)})
        return ValidationResult(reduce_metrics(found))

    # The reference --------------------------------------------------------------

    def _reference_logprobs(self, rows: BatchedDataDict[Any]) -> Tensor:
        """[2 B] sums over the answers."""
        if not self._precomputes:
            with self.phase("reference_logprobs"):
                policy = self.components.policy
                found = policy.get_reference_policy_logprobs(rows)
                return answer_logprobs(found["reference_logprobs"], rows)
        if self._reference is None:
            self._reference = self._precompute()
        return self._reference.column(rows)

    def _precompute(self) -> ReferenceLogprobs:
        """Compute what the run folder does not have, with the weights it began with."""
        config = self.config.policy
        known = ReferenceLogprobs(
            self.run_dir / _CACHE_FILE, reference_identity(config)
        )
        if known.knows(self._all_pairs()):
            return known
        with self.phase("reference_logprobs"):
            policy = self.components.policy
            checkpoint = self.state.last_checkpoint
            resumed = self.state.step > 0 and checkpoint is not None
            if resumed:
                policy.load_checkpoint(config.model_name)
            try:
                added = known.add(self._all_pairs(), self._policy_logprobs)
            finally:
                if checkpoint is not None and resumed:
                    policy.load_checkpoint(*resume_paths(Path(checkpoint)))
        _logger.info("computed reference log-probs of %d rows", added)
        return known

    def _policy_logprobs(self, rows: BatchedDataDict[Any]) -> Tensor:
        found = self.components.policy.get_logprobs(rows)
        return answer_logprobs(found["logprobs"], rows)

    def _all_pairs(self) -> Iterator[BatchedDataDict[Any]]:
        """All pairs that the run can ask for, in the order of their length."""
        for dataset in (self._data.train_dataset, self._data.validation_dataset):
            pairs: Sequence[Any] = sorted(dataset or (), key=lambda p: p["length"])
            for first in range(0, len(pairs), _PAIRS_PER_CALL):
                yield self._data.collate(list(pairs[first : first + _PAIRS_PER_CALL]))
