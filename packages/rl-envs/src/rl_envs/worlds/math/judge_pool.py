"""`JudgePool`: comparisons in processes that may be killed at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_envs.limited_calls import LimitedCalls, Server

__all__ = ["JudgePool", "Judgement"]

_SERVER = Server(
    Path(__file__).with_name("judge_process.py"),
    "compares mathematical answers",
    "environment 'math' needs sympy, which is not installed",
    "install rl-envs[math]",
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of one comparison."""

    correct: bool
    answer: str | None
    """Answer extracted from the response."""
    verified: bool = True
    """False if it took too long or too much memory, or raised; then not correct."""
    unreadable: str | None = None
    """Reason why the solution cannot be read; None: it can."""


_UNVERIFIED = Judgement(correct=False, answer=None, verified=False)


class JudgePool:
    """Compares pairs of texts in a fixed number of processes, started on demand.

    Args:
        num_processes: Number of processes.
        limit_s: Time limit of one comparison, in seconds.
    """

    def __init__(self, num_processes: int, limit_s: float) -> None:
        self._calls = LimitedCalls(_SERVER, num_processes, limit_s)

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Judgement]:
        """Compare responses with solutions.

        Args:
            pairs: Responses with their solutions.

        Raises:
            ConfigError: sympy is missing.
            DeadlineExceededError: A process does not start.
        """
        requests = [{"response": said, "solution": gold} for said, gold in pairs]
        return [_judgement(reply) for reply in self._calls.ask(requests)]

    def read(self, solutions: Sequence[str]) -> list[str | None]:
        """Return for each solution the reason why it cannot be read; None: it can.

        Args:
            solutions: As in `judge`.

        Raises:
            As `judge`.
        """
        replies = self._calls.ask([{"solution": text} for text in solutions])
        return [
            judged.unreadable
            if judged.verified
            else "reading it takes too long or too much memory"
            for judged in map(_judgement, replies)
        ]

    def close(self) -> None:
        """Stop the processes; a later call starts new ones."""
        self._calls.close()


def _judgement(reply: dict[str, Any] | None) -> Judgement:
    if reply is None:
        return _UNVERIFIED
    return Judgement(
        correct=reply.get("correct") is True,
        answer=reply.get("answer"),
        unreadable=reply.get("unreadable"),
    )
