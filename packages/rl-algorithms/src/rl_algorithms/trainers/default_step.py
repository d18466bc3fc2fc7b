"""What a trainer does that says only how its loss is computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rl_algorithms.data import DataModule
from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers.algorithm import ConfigT
from rl_algorithms.trainers.loop import TrainerLoop
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.steps.method_loss import MethodLoss
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["DefaultStep"]


class DefaultStep(TrainerLoop[ConfigT]):
    """Rows with answers, one optimizer step for each batch, and a loss."""

    plan: BatchPlan
    _own_names: set[str]

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        kind = self.config.kind_of_data()
        if kind is None:
            raise AlgorithmError(
                f"{type(self).__name__} must say how its data are read: set data_kind "
                f"of {type(self.config).__name__}, or override _load_data"
            )
        data = DataModule(
            self.config.data,
            self.components.tokenizer,
            kind=kind,
            batch_size=self.plan.num_prompts,
            max_length=self.config.policy.row_limit,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
        )
        return data.train_loader, data.validation_loader()

    def _build_loss(self) -> Any:
        method = inspect.getattr_static(type(self), "_compute_loss")
        if isinstance(method, staticmethod):
            return super()._build_loss()
        return MethodLoss(self, self._own_names)

    def _setup_algorithm(self) -> None:
        self._loss = self._build_loss()

    def _train_step(self, batch: BatchedDataDict[Any]) -> Mapping[str, Any]:
        self._start_alone()
        metrics: dict[str, Any] = dict(count_tokens(batch))
        rows, global_batch_size = pad_to_plan(batch, self.plan)
        output = self.train_policy(rows, self._loss, global_batch_size)
        return metrics | train_metrics(output)

    def _start_alone(self) -> None:
        """Start what a step needs, where it is called without `fit`."""

    def _validate(self, loader: Loader) -> ValidationResult:
        """Measure the loss on held-out rows."""
        total = count = 0.0
        for batch in loader:
            output = self.components.policy.train(
                batch, self._loss, eval_mode=True, gbs=batch.size
            )
            total += float(output["loss"].mean()) * batch.size
            count += batch.size
        return ValidationResult({"val_loss": total / count if count else 0.0})
