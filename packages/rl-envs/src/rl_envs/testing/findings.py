"""What a check found, and how strict the checks are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rl_distributed.config import Config
from rl_envs.errors import EnvironmentContractError

__all__ = ["Examination", "Finding", "assert_passed"]


class Examination(Config):
    """How an environment is examined."""

    seed: int = Field(0, ge=0)
    """Seed of the wrong responses and of the orders that are tried."""
    full_reward: float = 1.0
    """A response is right if its reward is at least this."""
    gold_column: str | None = None
    """Column with a response that is right; null: `answer`, else `ground_truth`."""
    changes_per_row: int = Field(3, gt=0)
    """Number of gold answers with one changed character that are tried per row."""
    max_accepted_changes: float = Field(0.05, ge=0.0, le=1.0)
    """Share of them that may earn the full reward: some tasks have several right
    answers, and a changed one may be among them."""
    deterministic: bool = True
    """Whether equal calls must have equal results."""
    allow_unscored: bool = False
    """Whether rewards may be NaN, for rows that are not scored."""
    max_row_s: float = Field(1.0, gt=0.0)
    """Longest mean time of a row in a batch, in seconds."""
    process_deadline_s: float = Field(120.0, gt=0.0)
    """Seconds that a copy in another process has, from its start to its end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    """Its name."""
    status: Literal["pass", "fail", "skip"]
    reason: str = ""
    """What is wrong, why it was skipped, or what was measured."""
    row: int | None = None
    """The first row that is at fault."""
    response: str | None = None
    """The response to it."""

    def __str__(self) -> str:
        """Return one line."""
        where = "" if self.row is None else f" (row {self.row}: {self.response!r:.80})"
        return f"{self.check}: {self.reason}{where}"


def assert_passed(findings: Iterable[Finding]) -> None:
    """Do nothing if no check failed.

    Raises:
        EnvironmentContractError: The message lists the failures.
    """
    failed = [str(finding) for finding in findings if finding.status == "fail"]
    if failed:
        listed = "\n".join(f"- {line}" for line in failed)
        raise EnvironmentContractError(f"{len(failed)} checks failed:\n{listed}")
