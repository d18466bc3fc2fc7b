"""Limits of a run and its validations: the same keys for every algorithm."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_distributed.config import Config, changeable

__all__ = ["RunSettings"]


class RunSettings(Config):
    """Base of an algorithm's section, with the keys that the training loop reads."""

    max_num_epochs: int | None = Field(None, gt=0, json_schema_extra=changeable())
    """Maximum number of passes over the data; null for no limit if `max_num_steps` is
    set, and 1 otherwise."""
    max_num_steps: int | None = Field(None, gt=0, json_schema_extra=changeable())
    """Maximum number of steps; null for no limit."""
    val_period: int = Field(10, ge=0, json_schema_extra=changeable())
    """Number of steps between two validations; 0 for none."""
    val_start_at: int = Field(-1, json_schema_extra=changeable())
    """First step for a periodic validation; -1 for no such limit."""
    val_at_start: bool = False
    """Whether to validate before the first step."""
    val_at_end: bool = Field(False, json_schema_extra=changeable())
    """Whether to validate after the last step."""
    stop_at_validation_metric: str | None = Field(None, json_schema_extra=changeable())
    """Metric that ends the run when it reaches its threshold, such as `val:accuracy` or
    `val:val_loss`; null for none."""
    stop_at_validation_threshold: float | None = Field(
        None, json_schema_extra=changeable()
    )
    """Threshold of that metric; a loss must fall to it, anything else rise to it."""

    @property
    def epoch_limit(self) -> int | None:
        """Maximum number of passes over the data; None for no limit."""
        if self.max_num_epochs is None and self.max_num_steps is None:
            return 1
        return self.max_num_epochs

    @model_validator(mode="after")
    def _check_goal(self) -> Self:
        if (self.stop_at_validation_metric is None) != (
            self.stop_at_validation_threshold is None
        ):
            raise ValueError(
                "stop_at_validation_metric and stop_at_validation_threshold belong "
                f"together: got {self.stop_at_validation_metric!r} and "
                f"{self.stop_at_validation_threshold!r}"
            )
        return self
