"""The search for rows that an environment cannot judge, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rl_algorithms.errors import DataError
from rl_envs.interfaces import EnvironmentInterface

__all__ = ["check_rows"]

_MAX_NAMED = 5


def check_rows(
    environment: EnvironmentInterface[Any],
    rows: Iterable[Mapping[str, Any]],
    name: str,
) -> None:
    """Ask an environment whether it can judge all rows.

    Args:
        environment: What judges the answers to the rows.
        rows: Processed prompts.
        name: What to call the dataset in messages.

    Raises:
        DataError: It cannot judge some of them, whatever the answer.
    """
    indices, metadata = [], []
    for row in rows:
        indices.append(row["idx"])
        metadata.append(row["extra_env_info"])
    found = environment.unusable_rows(metadata)
    if not found:
        return
    named = "; ".join(
        f"row {indices[place]}: {reason}"
        for place, reason in list(found.items())[:_MAX_NAMED]
    )
    more = f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    raise DataError(
        f"dataset {name}: {len(found)} of {len(indices)} rows cannot be judged by the "
        f"environment: {named}{more}. Mend these rows, or leave them out"
    )
