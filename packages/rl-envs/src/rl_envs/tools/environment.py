"""`ToolEnvironment`: conversations in which the policy calls tools.

```
response --parse--> calls? --yes--> run, each with a deadline --> tool messages
                       |
                       no --> the judge scores the finished conversation
```

Errors of a call (syntax, an unknown name, arguments, an exception, a deadline) are
reported to the policy, which may do better in its next turn. Only a tool that raises
`ToolUnavailableError` ends the conversation, which is then not scored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from rl_distributed.batch.arrays import from_numpy, to_numpy
from rl_distributed.config import Config
from rl_envs.call_lock import CallLock
from rl_envs.errors import MessageLogError, ToolError, ToolUnavailableError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Observation,
    Rewards,
    as_columns,
    has_own,
    last_response,
    num_rows,
)
from rl_envs.rewards.environments import as_environment
from rl_envs.tools.calls import JsonToolCallParser, ToolCall, ToolCallParser
from rl_envs.tools.functions import Tool, ToolArgumentError
from rl_envs.tools.runs import Job, ToolRun, run_jobs

if TYPE_CHECKING:
    import torch

__all__ = ["ToolEnvironment", "ToolLimits"]

Columns = Mapping[str, Any]
_COUNTERS = ("num_tool_turns", "num_tool_calls", "num_tool_errors")


class ToolLimits(Config):
    """Limits on the use of tools by a policy."""

    max_calls_per_turn: int = Field(8, ge=1)
    """Maximum number of calls run per response; further ones get an error."""
    max_tool_turns: int | None = Field(None, ge=1)
    """Maximum number of responses per conversation whose calls are run; the next one is
    scored as an answer regardless. null: only the limit on turns applies."""
    call_deadline_s: float = Field(10.0, gt=0)
    """Time limit of one call, in seconds."""
    max_concurrency: int = Field(16, ge=1)
    """Maximum number of calls of a batch that run at the same time."""
    max_conversations: int = Field(1, ge=1)
    """Number of conversations of an asynchronous run that one process judges at a time.
    Above 1, `step` is called by as many threads, and each conversation may run
    `max_concurrency` calls; the judge gets no more calls at a time than it takes."""
    max_result_chars: int = Field(4096, ge=1)
    """Length, in characters, beyond which results are cut off."""


@dataclass(slots=True)
class _Turn:
    """The calls of one row."""

    row: int
    columns: Columns
    calls: list[ToolCall]
    results: list[str] = field(default_factory=list)
    num_errors: int = 0
    is_lost: bool = False


class ToolEnvironment(EnvironmentInterface[Columns | None]):
    """Provides a policy with tools, and has a judge score the finished conversation.

    Judges and reward functions get additional columns for each row: `num_tool_calls`,
    `num_tool_errors`, `num_tool_turns` and `num_prompt_messages`.

    Args:
        tools: Functions, or `Tool` objects.
        judge: An environment, or one or more reward functions.
        parser: Parser of the calls in a response.
        limits: Limits on calls, time and length.
        result_role: Role of messages with results, as in the chat template.

    Raises:
        ToolError: There are no tools, two have the same name, or one cannot be
            described.
    """

    many_turns = True

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        judge: Any,
        *,
        parser: ToolCallParser | None = None,
        limits: ToolLimits | None = None,
        result_role: str = "tool",
    ) -> None:
        made = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        if not made or len(self._tools) < len(made):
            raise ToolError(
                "tools must hold at least one tool, and each name once: got "
                f"{[tool.name for tool in made]}"
            )
        self._judge = as_environment(judge)
        self._parser = parser if parser is not None else JsonToolCallParser()
        self.limits = limits if limits is not None else ToolLimits()
        self._result_role = result_role
        self.calls_at_once = self.limits.max_conversations
        self._judging = CallLock(self._judge.calls_at_once)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the description of each tool."""
        return [tool.schema for tool in self._tools.values()]

    def reset(
        self, metadata: Sequence[Columns | None], seeds: Sequence[int]
    ) -> Sequence[Columns | None]:
        """Begin conversations in the judge, if it does so."""
        if not has_own(self._judge, "reset"):
            return metadata
        with self._judging:
            begun: Sequence[Columns | None] = self._judge.reset(metadata, seeds)
        return begun

    def close(self, metadata: Sequence[Columns | None]) -> None:
        """Release what the judge keeps for conversations."""
        if has_own(self._judge, "close"):
            with self._judging:
                self._judge.close(metadata)

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Run the calls of each last response; score those without calls.

        Raises:
            MessageLogError: A conversation has no response, or the metadata are wrong.
            Exception: The judge raised it.
        """
        size = num_rows(message_log_batch, metadata)
        columns = [
            _with_counters(log, row, value)
            for row, (log, value) in enumerate(
                zip(message_log_batch, metadata, strict=True)
            )
        ]
        turns = self._parse(message_log_batch, columns)
        self._run(turns)
        calling = {turn.row for turn in turns}
        judged = [row for row in range(size) if row not in calling]
        with self._judging:
            verdict = self._judge.step(
                [message_log_batch[row] for row in judged],
                [columns[row] for row in judged],
            )
        return self._merge(size, turns, judged, verdict)

    def _parse(
        self, logs: Sequence[MessageLog], columns: Sequence[Columns]
    ) -> list[_Turn]:
        turns = []
        most = self.limits.max_tool_turns
        for row, (log, known) in enumerate(zip(logs, columns, strict=True)):
            # Not parsed: its calls are text of an answer, which the judge scores.
            if most is not None and known["num_tool_turns"] >= most:
                continue
            calls = self._parser(last_response(log, row=row))
            if calls:
                turns.append(_Turn(row, known, calls))
        return turns

    # Calls ----------------------------------------------------------------------

    def _run(self, turns: Sequence[_Turn]) -> None:
        """Set the results of all calls, running those of all rows concurrently."""
        jobs: list[Job] = []
        plans: list[tuple[_Turn, ToolCall, Job | str]] = []
        for turn in turns:
            for place, call in enumerate(turn.calls):
                plan = self._plan(turn, place, call)
                plans.append((turn, call, plan))
                if isinstance(plan, Job):
                    jobs.append(plan)
        # All rows together, so that one slow tool does not hold up the calls of others.
        runs = iter(
            run_jobs(
                jobs,
                deadline_s=self.limits.call_deadline_s,
                max_concurrency=self.limits.max_concurrency,
            )
        )
        for turn, call, plan in plans:
            if isinstance(plan, Job):
                self._add_run(turn, call, next(runs))
            else:
                turn.num_errors += 1
                turn.results.append(f"Error: {plan}")

    def _plan(self, turn: _Turn, place: int, call: ToolCall) -> Job | str:
        """Return the job to run, or the error of the call."""
        most = self.limits.max_calls_per_turn
        if place >= most:
            return f"only the first {most} calls of a turn are run"
        if call.error is not None:
            return call.error
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            # A name is text of the model, and may have any length.
            return f"there is no tool {call.name[:80]!r}; the tools are: {known}"
        try:
            return Job(tool.fn, tool.bind(call.arguments, turn.columns))
        except ToolArgumentError as error:
            return self._cut(f"{call.name}: {error}")

    def _add_run(self, turn: _Turn, call: ToolCall, run: ToolRun) -> None:
        if run.error is None:
            turn.results.append(self._cut(_as_text(run.value)))
            return
        turn.is_lost |= isinstance(run.error, ToolUnavailableError)
        turn.num_errors += 1
        what = f"{type(run.error).__name__}: {run.error}"
        turn.results.append(self._cut(f"Error: {call.name}: {what}"))

    def _cut(self, text: str) -> str:
        limit = self.limits.max_result_chars
        return text if len(text) <= limit else f"{text[:limit]}... (cut)"

    # Results --------------------------------------------------------------------

    def _merge(
        self,
        size: int,
        turns: Sequence[_Turn],
        judged: Sequence[int],
        verdict: EnvironmentReturn[Any],
    ) -> EnvironmentReturn[Columns | None]:
        # A judge may be anybody's environment, and return lists or numpy arrays.
        verdict = as_columns(verdict)
        ended = to_numpy(verdict.terminateds)
        observations: list[Observation] = [[] for _ in range(size)]
        metadata: list[Columns | None] = [None] * size
        stops: list[list[str] | None] = [None] * size
        answers: list[str | None] = [None] * size
        terminateds = np.zeros(size, dtype=np.bool_)
        for turn in turns:
            observations[turn.row] = [self._message(text) for text in turn.results]
            metadata[turn.row] = _counted(turn)
            terminateds[turn.row] = turn.is_lost
        for place, row in enumerate(judged):
            observations[row] = verdict.observations[place]
            metadata[row] = verdict.metadata[place]
            stops[row] = verdict.next_stop_strings[place]
            answers[row] = verdict.answers[place] if verdict.answers else None
            terminateds[row] = ended[place]
        lost = [turn.row for turn in turns if turn.is_lost]
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=stops,
            rewards=_spread_all(verdict.rewards, size, judged, lost),
            terminateds=from_numpy(terminateds),
            answers=answers,
        )

    def _message(self, text: str) -> dict[str, str]:
        # A call in JSON may hold half of a surrogate pair, which a tool may give back,
        # and no tokenizer takes it.
        text = text.encode("utf-8", "replace").decode()
        return {"role": self._result_role, "content": text}

    # Groups, metrics, end -------------------------------------------------------

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Columns | None]],
    ) -> list[Rewards] | None:
        """Score the conversations of each prompt together, if the judge can."""
        return self._judge.score_groups(message_logs, metadata)

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the judge's metrics, with calls per sample and their error rate."""
        batch, metrics = self._judge.global_post_process_and_metrics(batch)
        rows = [
            row
            for row in batch.get("metadata") or ()
            if isinstance(row, Mapping) and set(_COUNTERS) <= set(row)
        ]
        if rows:
            calls = sum(row["num_tool_calls"] for row in rows)
            metrics["tool_calls_per_sample"] = calls / len(rows)
            errors = sum(row["num_tool_errors"] for row in rows)
            metrics["tool_error_rate"] = errors / calls if calls else 0.0
        return batch, metrics

    def shutdown(self) -> None:
        """Shut the judge down."""
        self._judge.shutdown()


def _with_counters(log: MessageLog, row: int, columns: Columns | None) -> Columns:
    if columns is not None and not isinstance(columns, Mapping):
        raise MessageLogError(
            f"metadata[{row}] must be a mapping of the data set's columns: got "
            f"{type(columns).__name__}"
        )
    # Counters live in the metadata, not the environment: rows may move to another
    # worker between turns.
    known = dict(columns or {})
    # Set in the first turn only, when the prompt is all but the last message.
    known.setdefault("num_prompt_messages", max(len(log) - 1, 0))
    for name in _COUNTERS:
        known.setdefault(name, 0)
    return known


def _spread_all(
    rewards: Rewards, size: int, judged: Sequence[int], lost: Sequence[int]
) -> Rewards:
    if not isinstance(rewards, dict):
        return _spread(rewards, size, judged, lost)
    if judged:
        return {name: _spread(r, size, judged, lost) for name, r in rewards.items()}
    return _spread([], size, judged, lost)


def _spread(
    values: Any, size: int, judged: Sequence[int], lost: Sequence[int]
) -> torch.Tensor:
    """Scatter the scores of judged rows; others are 0 if they continue, NaN if lost."""
    rewards = np.zeros(size, dtype=np.float32)
    rewards[list(judged)] = to_numpy(values)
    rewards[list(lost)] = np.nan
    return from_numpy(rewards)


def _counted(turn: _Turn) -> Columns:
    added = (1, len(turn.calls), turn.num_errors)
    counts = {
        name: turn.columns[name] + number
        for name, number in zip(_COUNTERS, added, strict=True)
    }
    return {**turn.columns, **counts}


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        # Not escaped: a model reads text, and escapes cost tokens.
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        return str(value)
