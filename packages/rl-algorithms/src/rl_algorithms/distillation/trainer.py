"""The trainer of distillation.

```
prompts -> the student's answers -> the teacher's top k -> rows -> train -> sync
```
Off-policy, the answers come from the data. Sampled ahead (`asynchronous`), they may be
of older weights, which the loss need not correct: see `DistillationLossFn`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rl_algorithms.data import DataModule
from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.distillation.config import DistillationConfig, DistillationSettings
from rl_algorithms.distillation.unscored import Unscored
from rl_algorithms.distillation.vocabulary import check_same_vocabulary
from rl_algorithms.losses.distillation import DistillationLossFn
from rl_algorithms.rollout import unfold_branches
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.trainers.ahead_trainer import AheadTrainer
from rl_algorithms.trainers.sampling.validation import ValidationResult, validation_loss
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batch.batched_data_dict import AnyRows, BatchedDataDict
from rl_models.tokens.tokenizer import load_tokenizer
from rl_models.types import (
    TRAINING_ROWS,
    InputRows,
    TrainingRows,
)

__all__ = ["DistillationTrainer"]

_COLUMNS = ("input_ids", "input_lengths", "token_mask", "sample_mask", "branches")
# Validations use the seeds of this step number, which no training step has.
_VALIDATION_STEP = -1


class DistillationTrainer(AheadTrainer[DistillationConfig]):
    """Teaches a student a teacher's distribution (Agarwal et al., arXiv:2306.13649)."""

    algorithm: ClassVar[str] = "distillation"
    config_class: ClassVar[type[DistillationConfig]] = DistillationConfig

    @property
    def _sampling(self) -> DistillationSettings:
        return self.config.distillation

    def _needs(self, has_environment: bool) -> Needs:
        samples = self._sampling.on_policy
        return replace(
            super()._needs(has_environment),
            generation=samples,
            environment=samples and has_environment,
            teacher=True,
        )

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        settings, teacher = self._sampling, self.config.teacher
        tokenizer = self.components.required.tokenizer
        name = teacher.tokenizer.name or teacher.model_name
        check_same_vocabulary(tokenizer, load_tokenizer(name))
        # A tiny vocabulary has fewer than k tokens, and topk would raise.
        self._k = min(settings.topk_logits_k, len(tokenizer.get_vocab()))
        if settings.on_policy:
            return super()._load_data(dataset, val_dataset)
        data = DataModule(
            self.config.data,
            tokenizer,
            kind="demonstrations",
            batch_size=self.plan.num_prompts,
            val_batch_size=settings.val_batch_size,
            max_length=self.config.policy.row_limit,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
            max_val_rows=settings.max_val_samples,
        )
        return data.train_loader, data.validation_loader()

    def _build_loss(self) -> DistillationLossFn:
        return DistillationLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        self._is_scored = self.components.environment is not None
        if not self._sampling.on_policy:
            self._loss = self._build_loss()
            return
        if not self._is_scored:
            # The rollout engine needs an environment, if only to end conversations.
            self.components = replace(self.components, environment=Unscored())
        super()._setup_algorithm()

    def _watch_rewards(self) -> None:
        """Watch nothing: the teacher is what is learned from; rewards only measure."""

    def _train_step(self, batch: AnyRows) -> Mapping[str, Any]:
        if not self._sampling.on_policy:
            return self._train_on(TRAINING_ROWS.checked(batch))
        metrics = super()._train_step(batch)
        if self._is_scored:
            return metrics
        return {k: v for k, v in metrics.items() if not k.startswith("reward")}

    def _learn(self, rows: TrajectoryRows) -> Mapping[str, Any]:
        found = _to_train_on(rows)
        # If all conversations failed, there is nothing to learn from.
        return self._train_on(found) if found.size else {}

    def _train_on(self, rows: TrainingRows) -> Mapping[str, Any]:
        metrics: dict[str, Any] = dict(count_tokens(rows))
        rows, global_batch_size = pad_to_plan(rows, self.plan)
        with self.phase("teacher_logprob_inference"):
            self._ask_teacher(rows)
        output = self.train_policy(rows, self._loss, global_batch_size)
        return metrics | train_metrics(output)

    def _take_answers(self) -> Sequence[Mapping[str, Any]]:
        if not self._sampling.on_policy:
            return ()
        answers = super()._take_answers()
        if self._is_scored:
            return answers
        return [{k: v for k, v in a.items() if k != "reward"} for a in answers]

    def _ask_teacher(self, rows: InputRows) -> None:
        """Add the teacher's columns, at the student's temperature."""
        temperature = self.config.policy.logprob_temperature
        found = self.components.required.teacher.get_topk_logits(
            rows, self._k, temperature=temperature
        )
        rows.update(found)

    def _validate(self, loader: Loader) -> ValidationResult:
        """Measure the rewards of answers if they are scored, otherwise the loss."""
        if self._is_scored:
            return super()._validate(loader)
        if not self._sampling.on_policy:
            batches = map(TRAINING_ROWS.checked, loader)
            return ValidationResult(self._validation_loss(batches))
        self.sync_weights()
        # Sample all answers first: scoring them needs the memory of the generator's
        # cache.
        answers = list(self._answers(loader))
        self.finish_sampling()
        return ValidationResult(self._validation_loss(answers))

    def _answers(self, loader: Iterable[Any]) -> Iterator[TrainingRows]:
        """Yield the student's answers to held-out prompts."""
        generation = self.config.policy.generation
        assert generation is not None
        greedy, first = self._sampling.val_greedy, 0
        for batch in loader:
            result = self._rollouts.run(
                batch,
                num_generations=self._sampling.val_num_generations_per_prompt,
                seed=self.config.seed,
                step=_VALIDATION_STEP,
                first_prompt_index=first,
                greedy=greedy,
                sampling=None
                if greedy
                else generation.sampling_params(validation=True),
            )
            # Seeds derive from the index in the set, and so do not depend on the batch
            # size.
            first += batch.size
            yield _to_train_on(result.rows)

    def _validation_loss(self, batches: Iterable[TrainingRows]) -> dict[str, float]:
        policy = self.components.required.policy
        return validation_loss(policy, self._scored_batches(batches), self._loss)

    def _scored_batches(
        self, batches: Iterable[TrainingRows]
    ) -> Iterator[TrainingRows]:
        """Yield the batches that have rows, with the teacher's columns."""
        for rows in batches:
            if rows.size:
                self._ask_teacher(rows)
                yield rows


def _to_train_on(rows: TrajectoryRows) -> TrainingRows:
    """Keep the rows and columns for training."""
    columns: TrainingRows = BatchedDataDict({n: rows[n] for n in _COLUMNS})
    found = unfold_branches(columns)
    kept = (found["sample_mask"] != 0).nonzero().flatten()
    return found if len(kept) == found.size else found.select_indices(kept)
