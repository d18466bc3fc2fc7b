"""`PairTrainer`: data, steps and validation of trainers that learn from pairs.

Shapes: B pairs are 2 B rows, chosen and rejected alternating.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_algorithms.data import DataModule
from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.trainers.algorithm import ConfigT
from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_algorithms.trainers.settings.pair_config import PairSettings
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batch.batched_data_dict import AnyRows
from rl_distributed.metrics import reduce_metrics
from rl_distributed.metrics.values import Mean, Sum
from rl_models.types import (
    TRAINING_ROWS,
    TrainingRows,
)

__all__ = ["PairTrainer"]


class PairTrainer(BaseTrainer[ConfigT]):
    """Base of the trainers that learn which of two answers is better."""

    loss_parts: ClassVar[tuple[str, ...]] = ("loss",)
    """Metrics that are means over pairs, reported as shares by micro-batches."""

    @property
    @abstractmethod
    def _pairs(self) -> PairSettings:
        """The algorithm's section of the configuration."""

    @abstractmethod
    def _complete(self, rows: TrainingRows) -> None:
        """Add the columns that the loss needs beyond tokens and masks."""

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        settings = self._pairs
        size = settings.val_global_batch_size
        data = DataModule(
            self.config.data,
            self.components.required.tokenizer,
            kind="preferences",
            batch_size=self.plan.num_prompts,
            val_batch_size=size,
            max_length=self.config.policy.row_limit,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
            max_val_rows=settings.val_batches and settings.val_batches * size,
        )
        self._data = data
        return data.train_loader, data.validation_loader()

    def _setup_algorithm(self) -> None:
        self._loss = self._build_loss()

    def _train_step(self, batch: AnyRows) -> Mapping[str, Any]:
        metrics: dict[str, Any] = dict(count_tokens(batch))
        pairs = TRAINING_ROWS.checked(batch)
        # In pairs, since the loss compares neighboring rows.
        rows, global_batch_size = pad_to_plan(pairs, self.plan, rows_per_sample=2)
        # After padding, so that padding rows have all columns, too.
        self._complete(rows)
        output = self.train_policy(rows, self._loss, global_batch_size)
        return metrics | train_metrics(output)

    def _validate(self, loader: Loader) -> ValidationResult:
        """Measure the loss and its metrics over all held-out pairs."""
        found = []
        for batch in map(TRAINING_ROWS.checked, loader):
            self._complete(batch)
            output = self.components.required.policy.train(
                batch, self._loss, eval_mode=True, global_batch_size=batch.size
            )
            self._at_work.note_progress()
            metrics = train_metrics(output)
            num_pairs = float(batch["sample_mask"].sum()) / 2
            for name in self.loss_parts:
                # As typed means, so that a smaller last batch gets its proper weight.
                metrics[name] = Mean(float(metrics[name]) * num_pairs, num_pairs)
            for name in ("grad_norm", "lr", "num_valid_samples"):
                # Nothing is trained here, so these describe no step.
                metrics.pop(name, None)
            found.append(metrics | {"num_valid_samples": Sum(num_pairs)})
        return ValidationResult(reduce_metrics(found))
