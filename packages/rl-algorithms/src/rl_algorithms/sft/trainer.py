"""The trainer of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_algorithms.data import DataModule, ValidationParts
from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.losses import NLLLossFn
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_algorithms.sft.config import SFTConfig
from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.sampling.answer_validation import validate_by_answers
from rl_algorithms.trainers.sampling.validation import ValidationResult, validation_loss
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batch.batched_data_dict import AnyRows
from rl_distributed.errors import ConfigError
from rl_models.types import TRAINING_ROWS

__all__ = ["SFTTrainer"]


class SFTTrainer(BaseTrainer[SFTConfig]):
    """Supervised fine-tuning on prompts with answers, conversations or plain text."""

    algorithm: ClassVar[str] = "sft"
    config_class: ClassVar[type[SFTConfig]] = SFTConfig
    # A start that failed early closes as well, before `_setup_algorithm` has run.
    _rollouts: RolloutEngine | None = None

    _prompts_of: Mapping[Loader, Loader | None]
    """Prompts of the examples in each validation loader."""

    def _needs(self, has_environment: bool) -> Needs:
        samples = self.config.policy.generation is not None
        self.config.check_scorer(is_given=has_environment)
        return Needs(generation=samples, environment=samples)

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        settings, policy = self.config.sft, self.config.policy
        size = settings.val_global_batch_size
        data = DataModule(
            self.config.data,
            self.components.required.tokenizer,
            kind="demonstrations",
            batch_size=self.plan.num_prompts,
            val_batch_size=size,
            max_length=policy.row_limit,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
            max_val_rows=settings.val_batches and settings.val_batches * size,
        )
        loader = data.validation_loader()
        if loader is None and self.needs.generation:
            raise ConfigError(
                "policy.generation samples answers in validations, and there are no "
                "held-out data: give them (data.validation, or val_dataset), or leave "
                "out policy.generation and whatever scores answers"
            )
        if not isinstance(loader, ValidationParts):
            sets: Mapping[str, Loader] = {} if loader is None else {"": loader}
        else:
            sets = loader
        self._prompts_of = {
            part: self._prompts(data, title) for title, part in sets.items()
        }
        return data.train_loader, loader

    def _prompts(self, data: DataModule, title: str) -> Loader | None:
        """Return the prompts of a held-out set, if answers are sampled."""
        policy = self.config.policy
        if not self.needs.generation or policy.generation is None:
            return None
        rows = [datum["extra_env_info"] for datum in data.validation_datasets[title]]
        prompts = DataModule(
            self.config.data.replace(
                shuffle=False,
                drop_last=False,
                streaming=False,
                split_validation_size=0,
                validation=None,
            ),
            self.components.required.tokenizer,
            kind="prompts",
            batch_size=len(rows),
            max_length=policy.row_limit - policy.generation.max_new_tokens,
            train=rows,
        )
        self.sample_prompt = prompts.train_dataset[0]
        return prompts.train_loader

    def _build_loss(self) -> NLLLossFn:
        return NLLLossFn()

    def _setup_algorithm(self) -> None:
        self._loss = self._build_loss()
        if self.components.generation is not None:
            self._rollouts = RolloutEngine(
                self.components.required.generation,
                self.components.required.environment,
                self.components.required.tokenizer,
                RolloutConfig(
                    max_total_sequence_length=(self.config.policy.row_limit),
                ),
                use_chat_template=self.config.data.apply_chat_template,
                on_progress=self._at_work.note_progress,
            )

    def _close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()

    def _train_step(self, batch: AnyRows) -> Mapping[str, Any]:
        metrics: dict[str, Any] = dict(count_tokens(batch))
        demonstrations = TRAINING_ROWS.checked(batch)
        rows, global_batch_size = pad_to_plan(demonstrations, self.plan)
        output = self.train_policy(rows, self._loss, global_batch_size)
        return metrics | train_metrics(output)

    def _validate(self, loader: Loader) -> ValidationResult:
        policy = self.components.required.policy
        metrics = validation_loss(
            policy, map(TRAINING_ROWS.checked, loader), self._loss
        )
        prompts = self._prompts_of.get(loader)
        if self._rollouts is None or prompts is None:
            return ValidationResult(metrics)
        self.sync_weights()
        generation = self.config.policy.generation
        assert generation is not None
        answers = validate_by_answers(
            self._rollouts,
            prompts,
            num_generations=1,
            seed=self.config.seed,
            greedy=self.config.sft.val_greedy,
            sampling=generation.sampling_params(validation=True),
            accuracy_threshold=self.config.sft.accuracy_threshold,
        )
        return ValidationResult({**answers.metrics, **metrics}, answers.samples)
