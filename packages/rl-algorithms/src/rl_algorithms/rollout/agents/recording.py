"""`Recording`: the tokens sampled in a task, as a tree of answers.

```
system, question -> [answer 1] -> result -> [answer 2] -> [answer 3]      a row
                        |-> another result -> [answer 4]                  a row
                        (n=2) [answer 1'] , never continued               a row
another system prompt -> [answer 5]                                       a row
```
The answer that a request continues is found by the messages of the request; its tokens
are reused, and only later messages are tokenised. Each path from a root to a leaf is a
row. Tokens shared by several rows are trained on in only one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_algorithms.data.types import LLMMessageLogType
from rl_algorithms.rollout.branches import Branch

__all__ = ["Answer", "Recording"]


@dataclass(eq=False)
class Answer:
    """One sampled answer."""

    parent: Answer | None
    """The answer that it continues; None: it begins a row."""
    conversation: str
    """Name of the conversation."""
    prompt: list[int]
    """Unsampled tokens between those of the parent and its own."""
    log: LLMMessageLogType
    """All messages up to and including the answer, in the form of the template."""
    tokens: list[int]
    logprobs: list[float] | None
    """Log-probs of its tokens; None if the generator returns none."""
    versions: list[int]
    """Weight version that sampled each token."""
    is_cut: bool
    """Whether it was cut off by a length limit."""
    num_questions: int = 0
    """Messages of the first request of its row."""
    is_given: bool = True
    """Whether the client has received it."""

    def path(self) -> list[Answer]:
        """Return the answers of its row, the first one first."""
        found: list[Answer] = []
        answer: Answer | None = self
        while answer is not None:
            found.append(answer)
            answer = answer.parent
        return found[::-1]

    def row(self) -> list[int]:
        """Return all tokens up to its end."""
        return [
            token
            for answer in self.path()
            for part in (answer.prompt, answer.tokens)
            for token in part
        ]


class Recording:
    """The answers of one task; used by one thread at a time."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._by_history: dict[bytes, Answer] = {}

    def find(self, histories: Sequence[bytes]) -> tuple[Answer | None, int]:
        """Return the answer that a request continues.

        Args:
            histories: Digests of the prefixes of its messages.

        Returns:
            The answer, or None for a new conversation, and the number of messages that
            it covers.
        """
        # The longest first, so that as few messages as possible are tokenised again.
        for count in range(len(histories), 0, -1):
            found = self._by_history.get(histories[count - 1])
            if found is not None:
                return found, count
        return None, 0

    def add(self, answer: Answer, history: bytes) -> None:
        """Keep an answer.

        Args:
            answer: The answer.
            history: Digest of the messages up to and including it, as the client sees
                them.
        """
        self._answers.append(answer)
        # If a client cannot tell two answers apart, it may continue either.
        self._by_history.setdefault(history, answer)

    @property
    def answers(self) -> list[Answer]:
        """Answers that the agent has received, in order."""
        return [answer for answer in self._answers if answer.is_given]

    def ends(self, rewarded: Mapping[str, float]) -> list[Answer]:
        """Return the last answers of all rows; the main row comes last.

        Args:
            rewarded: Names of conversations that have their own rewards.
        """
        given = self.answers
        followed = {id(answer.parent) for answer in given}
        ends = [answer for answer in given if id(answer) not in followed]
        # The sort is stable: of rows with the task's reward, the newest comes last.
        return sorted(ends, key=lambda end: end.conversation not in rewarded)

    def rows(self, ends: Sequence[Answer]) -> Iterator[Branch]:
        """Make the rows of `ends`; each sampled token is trained on in one of them.

        Args:
            ends: Result of `ends`; shared tokens are trained on in the last row.
        """
        owner: dict[int, int] = {}
        # The main row first: it owns all of its tokens.
        for place in (len(ends) - 1, *range(len(ends) - 1)):
            for answer in ends[place].path():
                owner.setdefault(id(answer), place)
        for place, end in enumerate(ends):
            path = end.path()
            yield _row(path, [owner[id(answer)] == place for answer in path])


def _row(path: Sequence[Answer], owned: Sequence[bool]) -> Branch:
    tokens: list[int] = []
    mask: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for answer, is_own in zip(path, owned, strict=True):
        count = len(answer.tokens)
        given = answer.logprobs if is_own and answer.logprobs else [0.0] * count
        blank = len(answer.prompt)
        tokens += [*answer.prompt, *answer.tokens]
        mask += [0.0] * blank + [float(is_own)] * count
        logprobs += [0.0] * blank + list(given)
        versions += [-1] * blank + (answer.versions if is_own else [-1] * count)
    return Branch(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.float32),
        torch.tensor(logprobs, dtype=torch.float32),
        torch.tensor(versions, dtype=torch.int64),
    )
