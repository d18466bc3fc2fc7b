"""Comparison of pairs of responses in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rl_envs.worlds.judge.chat import Chat
from rl_envs.worlds.judge.questions import preference_in, question_of_pair

__all__ = ["Comparison", "compared"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Verdicts of the judge on two responses, the left and the right one."""

    left_first: tuple[float, ...]
    """One verdict per reply with the left response shown first: 1.0 if it is better,
    0.0 if the other one is, 0.5 for a tie. Unreadable replies are left out."""
    right_first: tuple[float, ...]
    """The same with the right response shown first: 1.0 if that one is better."""
    num_replies: int
    """Number of replies of the server, in both orders."""

    @property
    def share(self) -> float | None:
        """Share of wins of the left response; None if an order has no verdict.

        One order alone would measure the judge's bias for a position as well.
        """
        if not self.left_first or not self.right_first:
            return None
        return (fmean(self.left_first) + 1.0 - fmean(self.right_first)) / 2

    @property
    def is_consistent(self) -> bool | None:
        """True if both orders agree; None if one of them has no verdict."""
        if not self.left_first or not self.right_first:
            return None
        # Not `==`: means of votes carry rounding errors.
        return abs(fmean(self.left_first) + fmean(self.right_first) - 1.0) < 1e-9

    @property
    def first_share(self) -> float:
        """Share of verdicts for the response shown first."""
        return fmean([*self.left_first, *self.right_first])

    @property
    def num_unread(self) -> int:
        """Number of replies without a verdict."""
        return self.num_replies - len(self.left_first) - len(self.right_first)

    @property
    def spread(self) -> float | None:
        """Mean standard deviation of the votes in an order; None for single votes."""
        orders = [o for o in (self.left_first, self.right_first) if len(o) > 1]
        return fmean(pstdev(order) for order in orders) if orders else None


def compared(
    chat: Chat, pairs: Sequence[tuple[str, str, str, str]], *, limit: int
) -> list[Comparison]:
    """Compare pairs of responses.

    Args:
        chat: The judge.
        pairs: Request, left response, right response and rubric of each.
        limit: Maximum number of characters shown of a response.

    Raises:
        JudgeError: As `Chat.ask`.
    """
    questions = [
        question_of_pair(request, *shown, rubric=rubric, limit=limit)
        for request, left, right, rubric in pairs
        for shown in ((left, right), (right, left))
    ]
    replies = [
        [reply for reply in votes if reply is not None] for votes in chat.ask(questions)
    ]
    return [
        Comparison(
            left_first=_verdicts(left),
            right_first=_verdicts(right),
            num_replies=len(left) + len(right),
        )
        # Questions alternate between the two orders of each pair, as they were built
        # above.
        for left, right in zip(replies[::2], replies[1::2], strict=True)
    ]


def _verdicts(replies: Sequence[str]) -> tuple[float, ...]:
    found = (preference_in(reply) for reply in replies)
    return tuple(verdict for verdict in found if verdict is not None)
