"""Pairs of responses, compared in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rl_envs.worlds.judge.chat import Chat
from rl_envs.worlds.judge.questions import preference_in, question_of_pair

__all__ = ["Comparison", "compared"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the judge says of two responses, the left and the right one."""

    left_first: tuple[float, ...]
    """By reply with the left response shown first: 1.0 where it is better, 0.0 where
    the other one is, 0.5 for a tie. Replies that cannot be read are left out."""
    right_first: tuple[float, ...]
    """The same with the right response shown first: 1.0 where that one is better."""
    num_replies: int
    """Replies of the server, in both orders."""

    @property
    def share(self) -> float | None:
        """How far the left response wins, 0 to 1; None where an order has no verdict.

        One order alone says as much about the place as about the response.
        """
        if not self.left_first or not self.right_first:
            return None
        return (fmean(self.left_first) + 1.0 - fmean(self.right_first)) / 2

    @property
    def is_consistent(self) -> bool | None:
        """Whether both orders have one verdict; None where one of them has none."""
        if not self.left_first or not self.right_first:
            return None
        return abs(fmean(self.left_first) + fmean(self.right_first) - 1.0) < 1e-9

    @property
    def first_share(self) -> float:
        """Share of verdicts for the response that is shown first."""
        return fmean([*self.left_first, *self.right_first])

    @property
    def num_unread(self) -> int:
        """Replies without a verdict."""
        return self.num_replies - len(self.left_first) - len(self.right_first)

    @property
    def spread(self) -> float | None:
        """Mean standard deviation of the votes in an order; None with one vote each."""
        orders = [o for o in (self.left_first, self.right_first) if len(o) > 1]
        return fmean(pstdev(order) for order in orders) if orders else None


def compared(
    chat: Chat, pairs: Sequence[tuple[str, str, str, str]], *, limit: int
) -> list[Comparison]:
    """Compare pairs of responses.

    Args:
        chat: The judge.
        pairs: Request, left response, right response and rubric of each.
        limit: Characters of a response that are shown.

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
        for left, right in zip(replies[::2], replies[1::2], strict=True)
    ]


def _verdicts(replies: Sequence[str]) -> tuple[float, ...]:
    found = (preference_in(reply) for reply in replies)
    return tuple(verdict for verdict in found if verdict is not None)
