"""The environment `reward_model`: scores answers by a saved reward model."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from rl_algorithms.data.config import DataConfig
from rl_distributed.config import Config
from rl_envs.registry import register_env
from rl_envs.rewards.functional import FunctionalRewardWrapper
from rl_models.checkpoint.model_folder import check_model_folder

__all__ = ["RewardModelConfig", "RewardModelEnvironment"]


class RewardModelConfig(Config):
    """Settings of the environment `reward_model`."""

    model_path: str
    """Folder of the reward model: a sequence classification with one label."""
    batch_size: int = Field(default=32, gt=0)
    """Number of rows per forward pass."""
    apply_chat_template: bool | None = None
    """Value of `data.apply_chat_template` in the model's training; null for true if it
    has a chat template."""
    add_bos: bool | None = None
    """Value of `data.add_bos` in the model's training; null for its tokenizer's
    default."""
    add_eos: bool = True
    """Value of `data.add_eos` in the model's training."""

    @field_validator("model_path")
    @classmethod
    def _is_a_folder(cls, value: str) -> str:
        path = check_model_folder(value)
        # Workers may have another working directory.
        return value if path is None else str(path.resolve())


@register_env("reward_model")
class RewardModelEnvironment(FunctionalRewardWrapper):
    """Scores each response by a reward model, on the CPU of its process.

    The model is loaded in the first step. See `RewardModelFn`.

    Args:
        config: The settings.

    Raises:
        ModelLoadError: The model folder does not exist.
    """

    config_class = RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        # Imported late, because it needs torch, and environments are listed without it.
        from rl_algorithms.rm.scoring import RewardModelFn  # noqa: PLC0415

        texts = DataConfig(
            apply_chat_template=config.apply_chat_template,
            add_bos=config.add_bos,
            add_eos=config.add_eos,
        )
        super().__init__(
            RewardModelFn(
                Path(config.model_path), batch_size=config.batch_size, config=texts
            )
        )
