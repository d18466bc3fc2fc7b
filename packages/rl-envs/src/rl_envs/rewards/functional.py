"""`FunctionalRewardWrapper`: a plain function becomes an environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_envs.errors import MessageLogError, RewardValueError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    as_columns,
    as_rewards,
    last_response,
    num_rows,
    prompt_text,
)
from rl_envs.metrics import reward_metrics
from rl_envs.rewards.call import Score
from rl_envs.rewards.lists import RewardFns, make_reward_call
from rl_envs.rewards.rows import RewardRows

__all__ = ["FunctionalRewardWrapper", "check_reward_fn"]

Columns: TypeAlias = Mapping[str, Any]
PlainRewards: TypeAlias = "npt.NDArray[np.float32] | dict[str, npt.NDArray[np.float32]]"


def _columns_of(metadata: Sequence[Columns | None]) -> list[Columns]:
    columns: list[Columns] = []
    for row, value in enumerate(metadata):
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise MessageLogError(
                f"metadata[{row}] must be a mapping of the data set's columns: got "
                f"{type(value).__name__}"
            )
        columns.append(value)
    return columns


def _plain_rewards(scores: Sequence[Score], name: str) -> PlainRewards:
    """Make [B] float32 of scores; rows without one become NaN."""
    named = [score for score in scores if isinstance(score, dict)]
    plain = [score for score in scores if isinstance(score, float)]
    if named and plain:
        raise RewardValueError(
            f"reward function {name!r} returned numbers for some rows and mappings for "
            "others; return one kind"
        )
    if not named:
        numbers = [math.nan if s is None else s for s in scores]
        return np.asarray(numbers, dtype=np.float32)
    keys = list(named[0])
    for row, score in enumerate(scores):
        if isinstance(score, dict) and set(score) != set(keys):
            raise RewardValueError(
                f"reward function {name!r} must return the same names for every row: "
                f"got {sorted(score)} for row {row}, and {sorted(keys)} before; give "
                "None for a reward that does not apply to a row"
            )
    return {
        f"reward/{key}": np.asarray([_part(s, key) for s in scores], dtype=np.float32)
        for key in keys
    }


def _is_unscored(score: Score) -> bool:
    if isinstance(score, dict):
        return all(value is None for value in score.values())
    return score is None


def _part(score: Score, key: str) -> float:
    value = score[key] if isinstance(score, dict) else None
    return math.nan if value is None else value


class FunctionalRewardWrapper(EnvironmentInterface[Columns | None]):
    """Scores each response with a function and ends the conversation.

    The function takes one row, `fn(prompt, response)`, or a batch,
    `fn(prompts, responses)`; further parameters are columns of the data set;
    `reward_signature` has the rules. It may be asynchronous. Per row it returns

    - a number or a bool: the reward;
    - a mapping of numbers: several rewards, each named `reward/<key>` in the result;
      None in place of a number: this reward does not apply to the row;
    - None: the row is not scored. Its reward is NaN, training leaves it out, and
      metrics count it. A batch of which no row is scored is an error, because it
      nearly always means a forgotten `return`.

    Several functions, as a list or with weights, score each row one after the other;
    see `RewardList`.

    Args:
        fn: The reward function, or several.
        name: Its name in messages and metrics; its own name if None.
        batched: Whether it takes lists; None: found out by inspection.
        deadline_s: Seconds that the asynchronous calls of one batch may take.
        max_concurrency: Asynchronous calls that run at the same time.

    Raises:
        RewardSignatureError: The function's parameters cannot be filled.
    """

    many_turns = False

    def __init__(
        self,
        fn: RewardFns,
        name: str | None = None,
        *,
        batched: bool | None = None,
        deadline_s: float = 600.0,
        max_concurrency: int = 64,
    ) -> None:
        self._call = make_reward_call(
            fn,
            name,
            batched=batched,
            deadline_s=deadline_s,
            max_concurrency=max_concurrency,
        )

    @property
    def name(self) -> str:
        """The function's name in messages and metrics."""
        return self._call.name

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Score the last response of each conversation.

        Raises:
            RewardError: The function raised, or returned no reward.
            MessageLogError: A conversation has no response, or there is not one
                metadata per conversation.
        """
        return as_columns(self.plain_step(message_log_batch, metadata))

    def plain_step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Do the same with numpy arrays, which a process without torch can give.

        Raises:
            RewardError: As `step`.
            MessageLogError: As `step`.
        """
        size = num_rows(message_log_batch, metadata)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in range(size)],
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=self._plain_score(message_log_batch, metadata),
            terminateds=np.ones(size, dtype=np.bool_),
            answers=None,
        )

    def score(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> Rewards:
        """Return the rewards alone.

        Raises:
            RewardError: As `step`.
        """
        return as_rewards(self._plain_score(message_log_batch, metadata))

    def _plain_score(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> PlainRewards:
        scores = self._call(self._rows(message_log_batch, metadata))
        if len(scores) > 1 and all(map(_is_unscored, scores)):
            raise RewardValueError(
                f"reward function {self.name!r} returned None for all {len(scores)} "
                "responses: a `return` is missing, or no row of the batch can be scored"
            )
        return _plain_rewards(scores, self.name)

    def _rows(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> RewardRows:
        logs = message_log_batch
        messages: list[list[dict[str, Any]]] = []
        if self._call.needs_messages:
            messages = [[dict(message) for message in log] for log in logs]
        columns = _columns_of(metadata)
        return RewardRows(
            prompts=[
                prompt_text(log, row=row, end=known.get("num_prompt_messages"))
                for row, (log, known) in enumerate(zip(logs, columns, strict=True))
            ],
            responses=[last_response(log, row=row) for row, log in enumerate(logs)],
            columns=columns,
            messages=messages,
        )

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, with statistics of its rewards."""
        return batch, reward_metrics(batch)


def check_reward_fn(
    fn: RewardFns,
    sample: Mapping[str, Any],
    *,
    response: str | None = None,
    prompt_messages: MessageLog | None = None,
    batched: bool | None = None,
) -> Score:
    """Call a reward function once before a run, so that mistakes show at once.

    Args:
        fn: The reward function, or several as `FunctionalRewardWrapper` takes them.
        sample: A row of the data set: `prompt`, text or messages, and further columns.
        response: What to score; None: the row's `response` or `answer`, else no text.
        prompt_messages: The prompt as the policy is given it; None: the row's `prompt`.
        batched: Whether it takes lists; None: found out by inspection.

    Returns:
        The score; None where the function leaves the row out.

    Raises:
        RewardError: The function's parameters cannot be filled, it raises, or returns
            no reward; the message names the function and the sample.
    """
    call = make_reward_call(fn, batched=batched)
    messages = _prompt_messages(
        sample.get("prompt", "") if prompt_messages is None else list(prompt_messages)
    )
    if response is None:
        found = sample.get("response", sample.get("answer", ""))
        response = found if isinstance(found, str) else str(found)
    messages.append({"role": "assistant", "content": response})
    columns = {key: value for key, value in sample.items() if key not in call.taken}
    # Two rows: a batch function that returns one number is found out.
    size = 2 if call.batched else 1
    rows = RewardRows(
        prompts=[prompt_text(messages)] * size,
        responses=[response] * size,
        columns=[columns] * size,
        messages=[messages] * size,
    )
    return call(rows)[0]


def _prompt_messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, list) and all(isinstance(m, Mapping) for m in prompt):
        return [dict(message) for message in prompt]
    text = prompt if isinstance(prompt, str) else str(prompt)
    return [{"role": "user", "content": text}]
