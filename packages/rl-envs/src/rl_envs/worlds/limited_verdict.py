"""Base of worlds whose checks may take forever, and run in separate processes."""

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
    """Settings of worlds that check in separate processes."""

    num_workers: int = Field(1, ge=1)
    """Number of processes that check responses."""
    timeout_s: float = Field(1.0, gt=0.0)
    """Time limit of the check of one response, in seconds. A response whose check
    exceeds it, or fails, earns nothing and counts in `unverified_fraction`."""


class LimitedVerdictEnvironment(VerdictEnvironment[TaskT]):
    """Checks responses in processes that are killed at a limit.

    A hostile response costs only its own time limit and the start of a new process.
    Subclasses build requests (`request`, and `row_request` for a row alone) and
    interpret replies (`verdict`). A reply with `unreadable` rejects the row itself.

    Args:
        config: The settings.
        server: The script that the processes run.
    """

    def __init__(self, config: LimitedConfig, server: Server) -> None:
        self.config = config
        self._calls = LimitedCalls(server, config.num_workers, config.timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes and locks cannot be pickled; a copy starts its own.
        return type(self), (self.config,)

    @abstractmethod
    def request(self, given: Given[TaskT]) -> Mapping[str, Any]:
        """Return the request to check a response."""

    @abstractmethod
    def row_request(self, task: TaskT) -> Mapping[str, Any] | None:
        """Return the request to check a row alone; None: none is needed."""

    @abstractmethod
    def verdict(self, given: Given[TaskT], reply: Mapping[str, Any]) -> Verdict:
        """Return the verdict for the reply of a process."""

    def check(self, given: Given[TaskT]) -> Verdict:
        """Judge one response."""
        return self.check_all([given])[0]

    def check_all(self, given: Sequence[Given[TaskT]]) -> list[Verdict]:
        """Judge the responses of a batch.

        Raises:
            SolutionError: A row is invalid.
            ConfigError: A package is missing.
            DeadlineExceededError: A process does not start.
        """
        replies = self._calls.ask([self.request(one) for one in given])
        bad = {
            one.row: reply["unreadable"]
            for one, reply in zip(given, replies, strict=True)
            if reply is not None and "unreadable" in reply
        }
        # Raised, not scored 0: no response could be right, so the fault is the data's.
        if bad:
            named = [f"metadata[{row}]: {bad[row]}" for row in list(bad)[:_MAX_NAMED]]
            raise SolutionError(
                f"{len(bad)} of {len(given)} rows are invalid: {'; '.join(named)}; "
                "fix these rows or leave them out"
            )
        return [
            self._verdict_of(one, reply)
            for one, reply in zip(given, replies, strict=True)
        ]

    def _verdict_of(self, given: Given[TaskT], reply: dict[str, Any] | None) -> Verdict:
        # 0 and not NaN: otherwise a policy could avoid a bad score by writing answers
        # that cannot be checked in time.
        if reply is None:
            reason = "incorrect: checking it took too long or too much memory"
            return Verdict(0.0, reason, columns={"verified": False})
        found = self.verdict(given, reply)
        columns = {**found.columns, "verified": True}
        return Verdict(found.score, found.reason, found.answer, columns)

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows that cannot be read or are invalid.

        Raises:
            ConfigError: A package is missing.
            DeadlineExceededError: A process does not start.
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
        # By row: those rejected here come after those that could not be read.
        return dict(sorted(found.items()))

    def shutdown(self) -> None:
        """Stop the processes; a later step starts new ones."""
        self._calls.close()
