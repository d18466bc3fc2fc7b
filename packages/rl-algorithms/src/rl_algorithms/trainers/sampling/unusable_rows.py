"""Check for rows that an environment cannot judge, before a run starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rl_algorithms.errors import DataError
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.task_limits import wrong_limits

__all__ = ["check_rows"]

_MAX_NAMED = 5


def check_rows(
    environment: EnvironmentInterface[Any],
    rows: Iterable[Mapping[str, Any]],
    name: str,
) -> None:
    """Check that an environment can judge all rows.

    Args:
        environment: Environment that judges the answers.
        rows: Processed prompts.
        name: Name of the dataset in messages.

    Raises:
        DataError: The environment cannot judge some rows, whatever the answer.
    """
    indices, metadata = [], []
    for row in rows:
        indices.append(row["idx"])
        metadata.append(row["extra_env_info"])
    limits = {
        place: wrong
        for place, columns in enumerate(metadata)
        if (wrong := wrong_limits(columns)) is not None
    }
    found = environment.unusable_rows(metadata) | limits
    if not found:
        return
    named = "; ".join(
        f"row {indices[place]}: {reason}"
        for place, reason in list(found.items())[:_MAX_NAMED]
    )
    more = f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    raise DataError(
        f"dataset {name}: {len(found)} of {len(indices)} rows cannot be judged by the "
        f"environment: {named}{more}. Correct these rows, or remove them"
    )
