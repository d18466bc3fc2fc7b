"""How long a run trains and when it validates: the same keys for every algorithm."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rl_distributed.config import Config, changeable

__all__ = ["RunSettings"]


class RunSettings(Config):
    """Base of the section of an algorithm; the trainer loop reads these keys."""

    max_num_epochs: int | None = Field(None, gt=0, json_schema_extra=changeable())
    """Passes over the data; null: no limit where `max_num_steps` is set, else 1."""
    max_num_steps: int | None = Field(None, gt=0, json_schema_extra=changeable())
    """Steps; null: no limit."""
    val_period: int = Field(10, ge=0, json_schema_extra=changeable())
    """Steps between two validations; 0: none."""
    val_start_at: int = Field(-1, json_schema_extra=changeable())
    """No periodic validation before this step."""
    val_at_start: bool = False
    """Also validate before the first step."""
    val_at_end: bool = Field(False, json_schema_extra=changeable())
    """Also validate after the last step."""
    stop_at_validation_metric: str | None = Field(None, json_schema_extra=changeable())
    """Name such as `val:accuracy` or `val:val_loss` whose goal ends the run; null:
    none."""
    stop_at_validation_threshold: float | None = Field(
        None, json_schema_extra=changeable()
    )
    """The goal; a loss must fall to it, anything else must rise to it."""

    @property
    def epoch_limit(self) -> int | None:
        """Passes over the data after which the run ends; None: no limit."""
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
