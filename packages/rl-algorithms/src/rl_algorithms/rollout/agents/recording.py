"""`Recording`: what was sampled in a task, token by token, as a tree of answers.

```
system, question -> [answer 1] -> result -> [answer 2] -> [answer 3]      a row
                        |-> another result -> [answer 4]                  a row
                        (n=2) [answer 1'] , nobody went on from it        a row
another system prompt -> [answer 5]                                       a row
```
An answer that a request goes on from is found by the messages of the request; its
tokens are reused, and only messages that follow it are tokenised. Rows are the paths to
answers that nothing follows. Tokens that several rows share are trained on in one.
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
    """One answer that was sampled."""

    parent: Answer | None
    """The answer whose tokens its own follow; None: it begins a row."""
    conversation: str
    """Name of the conversation."""
    prompt: list[int]
    """Tokens between the parent's and its own that were not sampled."""
    log: LLMMessageLogType
    """All messages up to it and with it, as a template is given them."""
    tokens: list[int]
    logprobs: list[float] | None
    """Of its tokens; None where the generator gives none."""
    versions: list[int]
    """Weights that sampled each token."""
    is_cut: bool
    """Whether a limit of length ended it."""
    num_questions: int = 0
    """Messages of the first request of its row."""
    is_given: bool = True
    """Whether the client has got it."""

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
        """Return the answer that a request goes on from.

        Args:
            histories: Digests of the beginnings of its messages.

        Returns:
            The answer, None where the request begins something new, and how many of the
            messages it covers.
        """
        for count in range(len(histories), 0, -1):
            found = self._by_history.get(histories[count - 1])
            if found is not None:
                return found, count
        return None, 0

    def add(self, answer: Answer, history: bytes) -> None:
        """Keep an answer.

        Args:
            answer: The answer.
            history: Digest of the messages up to it and with it, as a client has them.
        """
        self._answers.append(answer)
        # Where two are the same to a client, either may be gone on from.
        self._by_history.setdefault(history, answer)

    @property
    def answers(self) -> list[Answer]:
        """Answers that the agent has got, in the order in which they came."""
        return [answer for answer in self._answers if answer.is_given]

    def ends(self, rewarded: Mapping[str, float]) -> list[Answer]:
        """Return the last answers of all rows; the main row comes last.

        Args:
            rewarded: Names of conversations with rewards of their own.
        """
        given = self.answers
        followed = {id(answer.parent) for answer in given}
        ends = [answer for answer in given if id(answer) not in followed]
        # Stable: of those that share the task's reward the newest is the last.
        return sorted(ends, key=lambda end: end.conversation not in rewarded)

    def rows(self, ends: Sequence[Answer]) -> Iterator[Branch]:
        """Make the rows of `ends`; each sampled token is trained on in one of them.

        Args:
            ends: As `ends` gave them; the last one keeps what it shares with others.
        """
        owner: dict[int, int] = {}
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
