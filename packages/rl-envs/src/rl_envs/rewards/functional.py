"""`FunctionalRewardWrapper`: turns a plain function into an environment."""

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
from rl_envs.rewards.lists import RewardFns, build_reward_call
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
    """Convert scores to [B] float32; rows without one become NaN."""
    named = [score for score in scores if isinstance(score, dict)]
    plain = [score for score in scores if isinstance(score, float)]
    if named and plain:
        raise RewardValueError(
            f"reward function {name!r} returned numbers for some rows and mappings for "
            "others; return one kind"
        )
    if not named:
        numbers = [math.nan if s is None else s for s in scores]
        # The contract of environments: rewards are float32.
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
    - None: the row is not scored. Its reward is NaN, training skips it, and metrics
      count it. A batch without a single scored row is an error, because it nearly
      always means a forgotten `return`.

    Several functions, as a list or with weights, score each row in turn; see
    `RewardList`.

    Args:
        fn: The reward function, or several.
        name: Its name in messages and metrics; None: its own name.
        batched: True if it takes lists; None: determined by inspection.
        deadline_s: Time limit of the asynchronous calls of one batch, in seconds.
        max_concurrency: Number of asynchronous calls that run at the same time.

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
        self._call = build_reward_call(
            fn,
            name,
            batched=batched,
            deadline_s=deadline_s,
            max_concurrency=max_concurrency,
        )

    @property
    def name(self) -> str:
        """Name of the function in messages and metrics."""
        return self._call.name

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Score the last response of each conversation.

        Raises:
            RewardError: The function raised, or returned an invalid reward.
            MessageLogError: A conversation has no response, or the number of metadata
                entries differs.
        """
        return as_columns(self.plain_step(message_log_batch, metadata))

    def plain_step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Score with numpy arrays as the result, as in a process without torch.

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
        """Return only the rewards.

        Raises:
            RewardError: As `step`.
        """
        return as_rewards(self._plain_score(message_log_batch, metadata))

    def _plain_score(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> PlainRewards:
        rows = self._rows(message_log_batch, metadata)
        scores = self._call(rows)
        # A single prompt may well be unscorable, with all its responses, which may be a
        # worker's whole share of a batch; several prompts point to a mistake.
        if all(map(_is_unscored, scores)) and len(set(rows.prompts)) > 1:
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
        # Copied, as a function may change them, and only where they are needed.
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
    """Call a reward function once before a run, to catch mistakes early.

    Args:
        fn: The reward function, or several as for `FunctionalRewardWrapper`.
        sample: A row of the data set: `prompt`, text or messages, and further columns.
        response: Text to score; None: the row's `response` or `answer`, or else "".
        prompt_messages: The prompt as the policy sees it; None: the row's `prompt`.
        batched: True if it takes lists; None: determined by inspection.

    Returns:
        The score; None if the function does not score the row.

    Raises:
        RewardError: The function's parameters cannot be filled, it raises, or returns
            an invalid reward; the message names the function and the sample.
    """
    call = build_reward_call(fn, batched=batched)
    messages = _prompt_messages(
        sample.get("prompt", "") if prompt_messages is None else list(prompt_messages)
    )
    if response is None:
        found = sample.get("response", sample.get("answer", ""))
        response = found if isinstance(found, str) else str(found)
    messages.append({"role": "assistant", "content": response})
    columns = {key: value for key, value in sample.items() if key not in call.taken}
    # Two rows expose a batch function that returns one number for all.
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
