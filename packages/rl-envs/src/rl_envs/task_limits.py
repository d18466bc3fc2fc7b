"""`TaskLimits`: limits of a single task, enforced by whoever plays its conversation.

They come from three places, each of which overrides those after it, limit by limit: the
column `task_limits` of the row, `env.limits` of the run, and the environment's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_envs.errors import TaskError

__all__ = ["LIMITS_KEY", "TaskLimits", "limits_of", "wrong_limits"]

LIMITS_KEY = "task_limits"
"""Column of a row with the limits of its task."""


class TaskLimits(Config):
    """Limits of a task; null: none beyond those of the run."""

    turns: int | None = Field(None, ge=1)
    """Maximum number of answers; `max_rollout_turns` of the algorithm still applies."""
    tokens: int | None = Field(None, ge=1)
    """Maximum number of sampled tokens, over all answers. The answer that exceeds it is
    cut off before it is judged."""
    seconds: float | None = Field(None, gt=0)
    """Seconds from the first answer's start after which no further answer begins; an
    agent is ended then. A call in progress is bounded by `env.deadline_s`."""
    memory_mib: int | None = Field(None, ge=1)
    """Memory of each program that is run for the task, in MiB, for environments that
    run programs (`code`, `code_interpreter`)."""

    def over(self, others: TaskLimits) -> TaskLimits:
        """Return these limits, and the others' where these have none."""
        own = {name: value for name, value in self if value is not None}
        return others.model_copy(update=own)


_NAMES = ", ".join(TaskLimits.model_fields)


def limits_of(columns: Any, default: TaskLimits | None = None) -> TaskLimits:
    """Return the limits of a row.

    Args:
        columns: Columns of the row; without `task_limits`, the default applies.
        default: Limits where the row has none.

    Raises:
        TaskError: The column is not a mapping of limits.
    """
    default = default or TaskLimits()
    given = columns.get(LIMITS_KEY) if isinstance(columns, Mapping) else None
    if given is None:
        return default
    if isinstance(given, TaskLimits):
        return given.over(default)
    if not isinstance(given, Mapping):
        raise TaskError(
            f"column {LIMITS_KEY!r} must be a mapping of {_NAMES}: got "
            f"{type(given).__name__} {given!r:.60}"
        )
    try:
        own = TaskLimits.from_dict(dict(given), source=f"column {LIMITS_KEY!r}")
    except ConfigError as error:
        raise TaskError(str(error)) from None
    return own.over(default)


def wrong_limits(columns: Any) -> str | None:
    """Return what is wrong with the limits of a row; None: nothing."""
    try:
        limits_of(columns)
    except TaskError as error:
        return str(error)
    return None
