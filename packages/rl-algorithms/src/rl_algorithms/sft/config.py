"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from rl_algorithms.data.config import DataKind
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_algorithms.trainers.settings.unused_keys import OF_PAIRS
from rl_distributed.errors import ConfigError

__all__ = ["SFTConfig", "SFTSettings"]


class SFTSettings(RunSettings):
    """Section `sft`."""

    val_global_batch_size: int = Field(32, gt=0)
    """Number of examples per validation batch."""
    val_batches: int | None = Field(None, gt=0)
    """Number of validation batches to use, from the first; null for all rows."""
    val_greedy: bool = True
    """Whether to take the most likely token when a validation samples answers."""
    accuracy_threshold: float | None = None
    """Minimum reward of a right answer, for `val:accuracy`; null for the environment's
    own accuracy, if it reports one."""


class SFTConfig(TrainerConfig):
    """Configuration of a supervised run.

    With `policy.generation` and an environment (section `env`, or one given to `fit`)
    each validation also samples answers. It then reports `val:reward`, and
    `val:accuracy` if the environment or `sft.accuracy_threshold` defines right answers.
    """

    data_kind: ClassVar[DataKind | None] = "demonstrations"

    sft: SFTSettings = Field(default_factory=SFTSettings)
    """Settings of the algorithm."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys of other algorithms, and of sampling if there is none."""
        if self.policy.generation is not None:
            return OF_PAIRS
        return (*OF_PAIRS, "sft.val_greedy", "sft.accuracy_threshold")

    def check_scorer(self, *, is_given: bool) -> None:
        """Check that the answers sampled in validations can be scored."""
        if self.policy.generation is not None and not is_given:
            raise ConfigError(
                "policy.generation samples answers in validations, and nothing scores "
                "them: name an environment in the section env, in Python pass "
                "reward_fn or environment, or leave policy.generation out (null)"
            )

    @model_validator(mode="after")
    def _check_env(self) -> Self:
        if self.env is not None and self.policy.generation is None:
            raise ValueError(
                "env scores the answers of validations, and policy.generation says how "
                "they are sampled: give it max_new_tokens, or leave env out"
            )
        return self
