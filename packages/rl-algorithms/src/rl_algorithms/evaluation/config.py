"""Configuration of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rl_algorithms.data.config import DataConfig, DatasetConfig
from rl_algorithms.rollout.config import RolloutSettings
from rl_algorithms.trainers.settings.config import EnvConfig
from rl_algorithms.trainers.settings.unused_keys import refuse_unread
from rl_distributed.cluster.config import ClusterConfig
from rl_distributed.config import Config
from rl_models.generation.config import GenerationConfig

__all__ = ["EvalConfig"]

DEFAULT_MAX_NEW_TOKENS = 256
_OF_TRAINING = (
    "data.train",
    "data.validation",
    "data.split_validation_size",
    "data.shuffle",
    "data.drop_last",
    "data.pass_rate_filter",
)
"""Keys of `data` that are not read, because `datasets` gives the prompts, in order."""


class EvalConfig(Config):
    """Prompts of an evaluation, sampling of answers, and their scoring."""

    datasets: dict[str, DatasetConfig] = Field(default_factory=dict)
    """Prompts by the name used in results; also a plain path."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Reading of prompts: columns, templates, and handling of over-long ones."""
    env: EnvConfig | None = None
    """Environment that scores answers; null if a reward function or an environment
    object is passed."""
    generation: GenerationConfig = Field(
        default_factory=lambda: GenerationConfig(max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
    )
    """Generation backend and its sampling parameters; the `val_` keys are not read."""
    max_rollout_turns: int = Field(1, gt=0)
    """Maximum number of answers per conversation of a multi-turn environment."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Handling of failed, over-long and rewritten conversations."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Nodes and devices of the evaluation."""
    num_generations: int = Field(1, gt=0)
    """Number of answers per prompt."""
    greedy: bool | None = None
    """Whether to always take the most likely token; null: if `num_generations` is 1."""
    ks: list[int] | None = None
    """Values of k for pass@k and cons@k; null: 1, 2, 4, ... and `num_generations`."""
    pass_threshold: float = 1.0
    """Minimum reward of a correct answer."""
    max_samples: int | None = Field(None, gt=0)
    """Maximum number of prompts of each dataset, taken from its start; null: all."""
    batch_size: int = Field(256, gt=0)
    """Number of prompts per call of the generator; does not affect results."""
    seed: int = Field(0, ge=0)
    """Seed of the sampled answers."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        if isinstance(filled.get("generation"), Mapping):
            default = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
            filled["generation"] = default | dict(filled["generation"])
        if isinstance(filled.get("datasets"), Mapping):
            filled["datasets"] = {
                name: {"path": value} if isinstance(value, str) else value
                for name, value in filled["datasets"].items()
            }
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_unread(self, _OF_TRAINING)
        if self.is_greedy and self.num_generations > 1:
            raise ValueError(
                "greedy gives the same answer each time: got num_generations "
                f"{self.num_generations} with greedy=true; set one of them"
            )
        if self.rollout.on_template_rewrite == "branch":
            raise ValueError(
                "rollout.on_template_rewrite=branch makes several rows of a "
                "conversation, which an evaluation cannot count: use error"
            )
        wrong = [k for k in self.ks or [] if not 1 <= k <= self.num_generations]
        if wrong or self.ks == []:
            raise ValueError(
                f"ks must be from 1 to num_generations ({self.num_generations}): got "
                f"{self.ks}; raise num_generations, or leave them out"
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy."""
        return self.num_generations == 1 if self.greedy is None else self.greedy

    def all_ks(self) -> list[int]:
        """Return the values of k to report, in order."""
        if self.ks is not None:
            return sorted(set(self.ks))
        powers = [2**i for i in range(self.num_generations.bit_length())]
        return sorted({*powers, self.num_generations})
