"""Concatenation of the replies to consecutive chunks of a batch, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_distributed.batch.arrays import concat, to_numpy
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import EnvironmentReturn, Rewards, as_columns

if TYPE_CHECKING:
    import torch

__all__ = ["join_returns", "split_return"]


def join_returns(
    parts: Sequence[EnvironmentReturn[Any]],
) -> EnvironmentReturn[Any]:
    """Concatenate the replies to consecutive chunks of a batch.

    Raises:
        EnvironmentContractError: The chunks have different rewards.
    """
    parts = [as_columns(part) for part in parts]
    if len(parts) == 1:
        return parts[0]
    answers: list[str | None] | None = None
    if any(part.answers is not None for part in parts):
        answers = []
        for part in parts:
            # Answers are optional per chunk, but a column must have one entry per row.
            answers.extend(part.answers or [None] * len(part.terminateds))
    return EnvironmentReturn(
        observations=[row for part in parts for row in part.observations],
        metadata=[row for part in parts for row in part.metadata],
        next_stop_strings=[row for part in parts for row in part.next_stop_strings],
        rewards=_join_rewards(parts),
        terminateds=concat([part.terminateds for part in parts]),
        answers=answers,
    )


def split_return(result: Any, num_rows: int) -> list[EnvironmentReturn[Any]]:
    """Split the reply to a batch into one reply per row.

    Raises:
        EnvironmentContractError: A column does not have one entry per row.
    """
    whole = as_columns(result)
    rewards = whole.rewards if isinstance(whole.rewards, dict) else {"": whole.rewards}
    columns = {
        "observations": whole.observations,
        "metadata": whole.metadata,
        "next_stop_strings": whole.next_stop_strings,
        "terminateds": whole.terminateds,
        "answers": whole.answers if whole.answers is not None else [None] * num_rows,
        **rewards,
    }
    wrong = {name: len(c) for name, c in columns.items() if len(c) != num_rows}
    if wrong:
        raise EnvironmentContractError(
            f"step must return one of each per row: got {wrong} for {num_rows} rows; "
            "test the environment with check_environment"
        )
    parts = []
    for row in range(num_rows):
        here = slice(row, row + 1)
        own = {name: column[here] for name, column in rewards.items()}
        parts.append(
            EnvironmentReturn(
                observations=[whole.observations[row]],
                metadata=[whole.metadata[row]],
                next_stop_strings=[whole.next_stop_strings[row]],
                rewards=own if isinstance(whole.rewards, dict) else own[""],
                terminateds=whole.terminateds[here],
                answers=None if whole.answers is None else [whole.answers[row]],
            )
        )
    return parts


def _join_rewards(parts: Sequence[EnvironmentReturn[Any]]) -> Rewards:
    rewards = [part.rewards for part in parts]
    named = [part for part in rewards if isinstance(part, dict)]
    if not named:
        return concat([part for part in rewards if not isinstance(part, dict)])
    names = list(named[0])
    columns: list[dict[str, torch.Tensor]] = []
    for part in parts:
        values = part.rewards
        # A chunk without a scored row may not have seen the names; its one column says
        # the same under each of them.
        if not isinstance(values, dict) and _knows_no_name(values, part):
            values = dict.fromkeys(names, values)
        if not isinstance(values, dict) or set(values) != set(names):
            got = sorted(values) if isinstance(values, dict) else "one reward per row"
            raise EnvironmentContractError(
                f"an environment must give the same rewards for every row: got {got} "
                f"and {sorted(names)} in one batch"
            )
        columns.append(values)
    return {name: concat([column[name] for column in columns]) for name in names}


def _knows_no_name(rewards: torch.Tensor, part: EnvironmentReturn[Any]) -> bool:
    """Return True if no row was scored: each failed, or continues unrewarded."""
    values, ended = to_numpy(rewards), to_numpy(part.terminateds)
    return bool((np.isnan(values) | (~ended & (values == 0))).all())
