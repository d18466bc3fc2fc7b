"""Worlds of one verdict whose check may take forever: it has processes of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from rl_distributed.config import Config
from rl_envs.errors import SolutionError
from rl_envs.limited_calls import LimitedCalls, Server
from rl_envs.worlds.verdict import (
    Columns,
    Given,
    TaskT,
    Verdict,
    VerdictEnvironment,
)

__all__ = ["LimitedConfig", "LimitedVerdictEnvironment"]

_MAX_NAMED = 5


class LimitedConfig(Config):
    """Settings of worlds that check in processes of their own."""

    num_workers: int = Field(1, ge=1)
    """Processes that check responses."""
    timeout_s: float = Field(1.0, gt=0.0)
    """Seconds that the check of one response may take; then it earns nothing, and
    counts in the metric `unverified_fraction`, as one does whose check fails."""


class LimitedVerdictEnvironment(VerdictEnvironment[TaskT]):
    """Checks responses in processes that are ended at a limit.

    A hostile response costs its own limit, and the start of another process. A subclass
    says what to ask (`request`, and `row_request` for a row alone) and what a reply
    means (`verdict`). A reply with `unreadable` says why the row has no meaning.

    Args:
        config: The settings.
        server: What the processes run.
    """

    def __init__(self, config: LimitedConfig, server: Server) -> None:
        self.config = config
        self._calls = LimitedCalls(server, config.num_workers, config.timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    @abstractmethod
    def request(self, given: Given[TaskT]) -> Mapping[str, Any]:
        """Return what a process is asked about a response."""

    @abstractmethod
    def row_request(self, task: TaskT) -> Mapping[str, Any] | None:
        """Return what a process is asked about a row alone; None: nothing."""

    @abstractmethod
    def verdict(self, given: Given[TaskT], reply: Mapping[str, Any]) -> Verdict:
        """Return what the reply of a process means."""

    def check(self, given: Given[TaskT]) -> Verdict:
        """Judge one response."""
        return self.check_all([given])[0]

    def check_all(self, given: Sequence[Given[TaskT]]) -> list[Verdict]:
        """Judge the responses of a batch.

        Raises:
            SolutionError: A row has no meaning.
            ConfigError: A package is missing.
            DeadlineExceededError: A process does not come up.
        """
        replies = self._calls.ask([self.request(one) for one in given])
        bad = {
            one.row: reply["unreadable"]
            for one, reply in zip(given, replies, strict=True)
            if reply is not None and "unreadable" in reply
        }
        if bad:
            named = [f"metadata[{row}]: {bad[row]}" for row in list(bad)[:_MAX_NAMED]]
            raise SolutionError(
                f"{len(bad)} of {len(given)} rows have no meaning: {'; '.join(named)}; "
                "mend these rows or leave them out"
            )
        return [
            self._verdict_of(one, reply)
            for one, reply in zip(given, replies, strict=True)
        ]

    def _verdict_of(self, given: Given[TaskT], reply: dict[str, Any] | None) -> Verdict:
        if reply is None:
            reason = "incorrect: checking it took too long or too much memory"
            return Verdict(0.0, reason, columns={"verified": False})
        found = self.verdict(given, reply)
        columns = {**found.columns, "verified": True}
        return Verdict(found.score, found.reason, found.answer, columns)

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows that cannot be read, or have no meaning.

        Raises:
            ConfigError: A package is missing.
            DeadlineExceededError: A process does not come up.
        """
        found = super().unusable_rows(metadata)
        asked: dict[int, Mapping[str, Any]] = {}
        for row, columns in enumerate(metadata):
            if row not in found:
                request = self.row_request(self.read_row(columns, row))
                if request is not None:
                    asked[row] = request
        replies = self._calls.ask(list(asked.values()))
        for row, reply in zip(asked, replies, strict=True):
            if reply is None:
                found[row] = f"metadata[{row}]: reading it takes too long"
            elif "unreadable" in reply:
                found[row] = f"metadata[{row}]: {reply['unreadable']}"
        return dict(sorted(found.items()))

    def shutdown(self) -> None:
        """End the processes; a later step starts others."""
        self._calls.close()
