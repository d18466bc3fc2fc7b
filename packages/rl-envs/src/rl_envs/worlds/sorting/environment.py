"""The sorting environment."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from rl_distributed.batch.arrays import as_array, full, to_numpy
from rl_distributed.config import Config
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    last_response,
    num_rows,
)
from rl_envs.metrics import reward_metrics
from rl_envs.registry import register_env
from rl_envs.tasks import stable_fraction

__all__ = ["SortingConfig", "SortingEnvironment"]

_RANDOM_RATE = 0.3
Columns: TypeAlias = Mapping[str, Any]


class SortingConfig(Config):
    """Settings of the sorting environment."""

    credit: Literal["exact", "positions", "random"] = "exact"
    """Scoring. `exact`: reward 1 for the right answer, else 0. `positions`: the share
    of characters in the right place, relative to the longer text, 1 only for the right
    answer. `random`: 1 for three of ten responses, drawn from a hash of the
    conversation regardless of correctness; a control from which nothing can be
    learnt."""


def _share_of_positions(response: str, answer: str) -> float:
    # Not strict: a response of another length is wrong, not an error.
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return right / max(len(response), len(answer), 1)


@register_env("sorting")
class SortingEnvironment(EnvironmentInterface[Columns]):
    """Compares a response with the sorted digits and ends the conversation.

    The right answer is the column `answer` of the row. Whitespace around the response
    is ignored; any other addition or omission is wrong.

    Args:
        config: The settings.
    """

    config_class = SortingConfig
    many_turns = False

    def __init__(self, config: SortingConfig | None = None) -> None:
        self.config = config or SortingConfig()

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row no answer.
        """
        size = num_rows(message_log_batch, metadata)
        responses = [
            last_response(log, row=row).strip()
            for row, log in enumerate(message_log_batch)
        ]
        answers = [_answer(columns, row) for row, columns in enumerate(metadata)]
        pairs = list(zip(responses, answers, strict=True))
        correct = [response == answer for response, answer in pairs]
        if self.config.credit == "exact":
            rewards = [float(right) for right in correct]
        elif self.config.credit == "positions":
            rewards = [_share_of_positions(*pair) for pair in pairs]
        else:
            rewards = [_drawn(*pair) for pair in pairs]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": _verdict(right)} for right in correct
            ],
            metadata=[
                {**columns, "correct": right}
                for columns, right in zip(metadata, correct, strict=True)
            ],
            next_stop_strings=[None] * size,
            rewards=as_array(rewards, "float32"),
            terminateds=full(size, True, "bool"),
            answers=list(responses),
        )

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged; `accuracy` is the share of right answers."""
        metrics = reward_metrics(batch)
        judged = [
            row for row in batch.get("metadata") or () if "correct" in (row or {})
        ]
        if judged:
            metrics["accuracy"] = sum(row["correct"] for row in judged) / len(judged)
        # A batch without the columns of this environment: only its rewards tell.
        elif metrics:
            scores = to_numpy(batch.get("rewards", batch.get("total_reward")))
            metrics["accuracy"] = float(np.mean(scores == 1.0))
        return batch, metrics


def _drawn(response: str, answer: str) -> float:
    # A hash, not a draw: equal calls must earn equal rewards.
    return float(stable_fraction(f"{answer}/{response}", salt="control") < _RANDOM_RATE)


def _verdict(correct: bool) -> str:
    return "correct" if correct else "incorrect"


def _answer(columns: Columns, row: int) -> str:
    answer = columns.get("answer") if isinstance(columns, Mapping) else None
    if not isinstance(answer, str):
        known = sorted(columns) if isinstance(columns, Mapping) else columns
        raise MessageLogError(
            f"metadata[{row}] must have the column 'answer', a text: it has {known!r}"
        )
    return answer.strip()
