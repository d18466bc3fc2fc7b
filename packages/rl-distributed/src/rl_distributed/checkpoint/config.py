"""Configuration of checkpoints."""

from __future__ import annotations

from pydantic import Field, field_validator

from rl_distributed.config import Config, changeable
from rl_distributed.timing.timer import convert_to_seconds

__all__ = ["CheckpointingConfig"]


class CheckpointingConfig(Config):
    """When checkpoints are written, where, and which of them stay."""

    enabled: bool = True
    """Whether checkpoints are written."""
    checkpoint_dir: str | None = None
    """Folder of the step folders; None: the program's own choice, which is inside the
    run folder in training."""
    metric_name: str | None = None
    """Key of the training information that ranks checkpoints, such as
    `val:accuracy`; None ranks the newer one higher."""
    higher_is_better: bool = True
    """Whether a higher value of the metric is better."""
    save_period: int = Field(default=10, ge=1, json_schema_extra=changeable())
    """Steps between two checkpoints."""
    keep_top_k: int | None = Field(default=None, ge=1, json_schema_extra=changeable())
    """Number of best checkpoints that stay; None: none for being good. All stay where
    `keep_latest_k` is None too."""
    keep_latest_k: int | None = Field(
        default=None, ge=1, json_schema_extra=changeable()
    )
    """Number of newest checkpoints that stay, besides the best ones; None: one with
    `keep_top_k`, else all."""
    checkpoint_must_save_by: str | None = Field(
        default=None, json_schema_extra=changeable()
    )
    """Time from the start of the job until a checkpoint must have been written,
    `DD:HH:MM:SS`; None: no limit."""
    save_optimizer: bool = True
    """Whether the optimizer's state is saved too; exact resume needs it."""

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _check_duration(cls, value: str | None) -> str | None:
        if value is not None:
            convert_to_seconds(value, name="checkpoint_must_save_by")
        return value
