"""Rewards given by a language model."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any, TypeAlias

from rl_distributed.batch.arrays import as_array, full
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    last_response,
    num_rows,
    prompt_text,
)
from rl_envs.metrics import reward_metrics
from rl_envs.registry import register_env
from rl_envs.worlds.judge.chat import Chat, Costs
from rl_envs.worlds.judge.comparison import Comparison, compared
from rl_envs.worlds.judge.config import JudgeConfig
from rl_envs.worlds.judge.questions import question_of_score, score_in

__all__ = ["JudgeEnvironment"]

Columns: TypeAlias = Mapping[str, Any]

_NAN = float("nan")


@register_env("judge")
class JudgeEnvironment(EnvironmentInterface[Columns]):
    """Asks a language model on a server to judge; ends the conversation.

    Depending on `compare`, the reward is the judge's score, scaled to [0, 1], or the
    share of comparisons won by the response, against the reference answer of its row or
    against other responses to its prompt. Each comparison is made in both orders. A
    response without a readable verdict is not scored (NaN). Requires `rl-envs[judge]`.

    Args:
        config: The settings, or a mapping of them.

    Raises:
        MissingExtraError: The package `openai` is missing.
        ConfigError: The settings are invalid, or the variable of the key is not set.
        JudgeError: `cache_folder` cannot be written.
    """

    config_class = JudgeConfig
    many_turns = False

    def __init__(self, config: JudgeConfig | Mapping[str, Any]) -> None:
        if not isinstance(config, JudgeConfig):
            config = JudgeConfig.from_dict(dict(config), source="environment 'judge'")
        self.config = config
        self._chat = Chat(config)
        self._opponents = config.opponents
        self._reported = Costs()
        self._comparisons: list[Comparison] = []
        self._spreads: list[float] = []
        self._num_verdicts = self._num_unread = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # The database and its client cannot be pickled; a copy opens its own.
        return type(self), (self.config,)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        With `compare: group` these rewards are 0; `score_groups` adds the actual ones.

        Raises:
            MessageLogError: A conversation has no response, or a row no reference.
            JudgeError: The server does not answer, refuses, or `max_calls` is reached.
        """
        size = num_rows(message_log_batch, metadata)
        responses = [
            last_response(log, row=row) for row, log in enumerate(message_log_batch)
        ]
        requests = [
            prompt_text(log, row=row) for row, log in enumerate(message_log_batch)
        ]
        rows = [self._row_of(columns, row) for row, columns in enumerate(metadata)]
        rewards = [0.0] * size
        if self.config.compare == "rubric":
            rewards = self._scores(requests, responses, rows)
        elif self.config.compare == "reference":
            rewards = self._against_reference(requests, responses, rows)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": self._verdict(reward)}
                for reward in rewards
            ],
            metadata=[dict(columns) for columns in metadata],
            next_stop_strings=[None] * size,
            rewards=as_array(rewards, "float32"),
            terminateds=full(size, True, "bool"),
            answers=[None] * size,
        )

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Columns]],
    ) -> list[Rewards] | None:
        """Compare the responses to each prompt, if `compare` is `group`.

        A single response to a prompt is not scored.

        Raises:
            MessageLogError: A conversation has no response.
            JudgeError: As `step`.
        """
        if self.config.compare != "group":
            return None
        comparisons, members = [], []
        for prompt, (logs, rows) in enumerate(zip(message_logs, metadata, strict=True)):
            responses = [last_response(log, row=row) for row, log in enumerate(logs)]
            for a, b in _pairs(len(responses), self._opponents):
                rubric = self._row_of(rows[a], a)[0]
                request = prompt_text(logs[a], row=a)
                comparisons.append((request, responses[a], responses[b], rubric))
                members.append((prompt, a, b))
        won: list[list[list[float]]] = [[[] for _ in logs] for logs in message_logs]
        found = self._compare(comparisons)
        for (prompt, a, b), comparison in zip(members, found, strict=True):
            if comparison.share is not None:
                won[prompt][a].append(comparison.share)
                won[prompt][b].append(1.0 - comparison.share)
        return [
            as_array([fmean(one) if one else _NAN for one in group], "float32")
            for group in won
        ]

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows without the reference required by the settings."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                self._row_of(columns, row)
            except MessageLogError as error:
                found[row] = str(error)
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and metrics of judging since the last call.

        `judge/calls`, `judge/kept` (questions answered from kept replies),
        `judge/retries`, `judge/failures` and `judge/tokens` are counts; `judge/unread`
        is the share of replies without a verdict. Among comparisons,
        `judge/same_in_both_orders` is the share with the same verdict in both orders,
        and `judge/prefers_first` the share won by the response shown first, 0.5 if the
        order does not matter. With several votes, `judge/votes_spread` is their mean
        standard deviation, on the scale of the reward.
        """
        metrics = reward_metrics(batch)
        now, before = asdict(self._chat.costs), asdict(self._reported)
        metrics |= {f"judge/{name}": float(now[name] - before[name]) for name in now}
        # A copy of the counters, which go on: each step reports only what it added.
        self._reported = Costs(**now)
        if self._num_verdicts:
            metrics["judge/unread"] = self._num_unread / self._num_verdicts
        orders = [c for c in self._comparisons if c.is_consistent is not None]
        if orders:
            metrics["judge/same_in_both_orders"] = fmean(
                bool(comparison.is_consistent) for comparison in orders
            )
            metrics["judge/prefers_first"] = fmean(
                comparison.first_share for comparison in orders
            )
        if self._spreads:
            metrics["judge/votes_spread"] = fmean(self._spreads)
        self._comparisons, self._spreads = [], []
        self._num_verdicts = self._num_unread = 0
        return batch, metrics

    def shutdown(self) -> None:
        """Close the table of kept replies."""
        self._chat.close()

    def _scores(
        self,
        requests: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[tuple[str, str | None]],
    ) -> list[float]:
        config = self.config
        scale = (config.min_score, config.max_score)
        questions = [
            question_of_score(
                request,
                response,
                rubric=rubric,
                scale=scale,
                reference=reference,
                limit=config.max_response_characters,
            )
            for request, response, (rubric, reference) in zip(
                requests, responses, rows, strict=True
            )
        ]
        rewards = []
        for replies in self._chat.ask(questions):
            scores = self._read([score_in(r, scale) for r in replies if r is not None])
            shares = [(score - scale[0]) / (scale[1] - scale[0]) for score in scores]
            rewards.append(fmean(shares) if shares else _NAN)
            if len(shares) > 1:
                self._spreads.append(pstdev(shares))
        return rewards

    def _against_reference(
        self,
        requests: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[tuple[str, str | None]],
    ) -> list[float]:
        found = self._compare(
            [
                (request, response, reference or "", rubric)
                for request, response, (rubric, reference) in zip(
                    requests, responses, rows, strict=True
                )
            ]
        )
        return [_NAN if c.share is None else c.share for c in found]

    def _compare(
        self, comparisons: Sequence[tuple[str, str, str, str]]
    ) -> list[Comparison]:
        """Compare pairs of responses, given with their request and rubric."""
        found = compared(
            self._chat, comparisons, limit=self.config.max_response_characters
        )
        for comparison in found:
            self._num_verdicts += comparison.num_replies
            self._num_unread += comparison.num_unread
            if comparison.spread is not None:
                self._spreads.append(comparison.spread)
        self._comparisons += found
        return found

    def _read(self, verdicts: Sequence[float | None]) -> list[float]:
        read = [verdict for verdict in verdicts if verdict is not None]
        self._num_verdicts += len(verdicts)
        self._num_unread += len(verdicts) - len(read)
        return read

    def _row_of(self, columns: Columns, row: int) -> tuple[str, str | None]:
        """Return the rubric and the reference of a row.

        Raises:
            MessageLogError: One of them is not a text.
        """
        given = columns if isinstance(columns, Mapping) else {}
        rubric = given.get("rubric", self.config.rubric)
        if not isinstance(rubric, str):
            raise MessageLogError(
                f"metadata[{row}]['rubric'] must be a text: got {rubric!r:.80}"
            )
        name = self.config.reference_column
        if name is None:
            return rubric, None
        reference = given.get(name)
        if not isinstance(reference, str):
            raise MessageLogError(
                f"metadata[{row}] must have the text {name!r}, named by "
                f"reference_column: got {reference!r:.80}; correct the setting or the "
                "row"
            )
        return rubric, reference

    def _verdict(self, reward: float) -> str:
        if self.config.compare == "group":
            return "compared with the other responses"
        # NaN.
        if reward != reward:
            return "not scored"
        if self.config.compare == "reference":
            return f"share of comparisons won against the reference: {reward:.2f}"
        low, high = self.config.min_score, self.config.max_score
        return f"score {low + reward * (high - low):g} of {low} to {high}"


def _pairs(size: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return pairs that give each member of a group at least that many opponents."""
    if opponents is None or size - 1 <= opponents:
        return list(combinations(range(size), 2))
    # Neighbours on a ring: all members get the same number of comparisons.
    reach = (opponents + 1) // 2
    pairs = {
        tuple(sorted((place, (place + step) % size)))
        for place in range(size)
        for step in range(1, reach + 1)
    }
    return sorted((a, b) for a, b in pairs)
