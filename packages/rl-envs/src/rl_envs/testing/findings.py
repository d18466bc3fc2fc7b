"""Findings of checks, and settings of their strictness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rl_distributed.config import Config
from rl_envs.errors import EnvironmentContractError

__all__ = ["Examination", "Finding", "assert_passed"]


class Examination(Config):
    """Settings of the examination of an environment."""

    seed: int = Field(0, ge=0)
    """Seed of the wrong responses and of the orders to try."""
    full_reward: float = 1.0
    """Minimum reward of a right response."""
    gold_column: str | None = None
    """Column with a right response; null: `answer`, else `ground_truth`."""
    changes_per_row: int = Field(3, gt=0)
    """Number of gold answers with one changed character to try per row."""
    max_accepted_changes: float = Field(0.05, ge=0.0, le=1.0)
    """Maximum share of them that may earn the full reward; above 0, since a changed
    answer may be another right one."""
    deterministic: bool = True
    """Requirement that equal calls have equal results."""
    allow_unscored: bool = False
    """Permission for NaN rewards, for rows that are not scored."""
    max_row_s: float = Field(1.0, gt=0.0)
    """Maximum mean time per row of a batch, in seconds."""
    process_deadline_s: float = Field(120.0, gt=0.0)
    """Time limit of a copy in another process, from start to end, in seconds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    """Name of the check."""
    status: Literal["pass", "fail", "skip"]
    reason: str = ""
    """The problem, the reason for skipping, or the measurement."""
    row: int | None = None
    """The first row at fault."""
    response: str | None = None
    """The response to it."""

    def __str__(self) -> str:
        """Describe the finding in one line."""
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
