"""Several senders of one transfer, which take turns with its blocks.

```
sender 0   block 0          block 2   end ---link 0--\
                                                      TurnReceiver -> one transfer
sender 1            block 1           end ---link 1--/
```
Each sender numbers its own blocks and ends with the entries of these alone. Whose turn
it is, all sides know beforehand, so that the blocks arrive in one order everywhere and
no sender waits for a receiver that waits for another sender.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_distributed.errors import TransferError
from rl_distributed.transfer.protocol import (
    Header,
    ReceivingEnd,
    SendingEnd,
    TensorLink,
)

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["LinkSet", "TurnReceiver"]


@dataclass(frozen=True)
class LinkSet:
    """A link from each of several senders to the same receivers. It can be pickled."""

    links: tuple[TensorLink, ...]
    """One per sender."""
    senders: tuple[int, ...]
    """A number for each sender, such as its rank."""

    @property
    def num_receivers(self) -> int:
        """Number of receivers, each of which gets everything."""
        return self.links[0].num_receivers

    def sender(self, number: int, *, deadline_s: float = 60.0) -> SendingEnd:
        """Return the end of sender `number`, in the process that calls this."""
        return self.links[self.senders.index(number)].sender(deadline_s=deadline_s)

    def receivers(
        self, index: int = 0, *, deadline_s: float = 60.0
    ) -> tuple[ReceivingEnd, ...]:
        """Return the ends of receiver `index`, one per sender."""
        until_s = time.monotonic() + deadline_s
        return tuple(
            link.receiver(index, deadline_s=max(until_s - time.monotonic(), 0.001))
            for link in self.links
        )

    def close(self) -> None:
        """Free all links; called once, by the process that made them."""
        _close_all(self.links)


class TurnReceiver:
    """One receiving end over those of several senders.

    Args:
        ends: One per sender.
        turns: For each block the number of its sender.
    """

    def __init__(self, ends: Sequence[ReceivingEnd], turns: Sequence[int]) -> None:
        self._ends = ends
        self._turns = turns
        self._number = 0
        self._counts = [0] * len(ends)

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next block; after the last one, the end with the entries of all.

        Raises:
            DeadlineExceededError: Nothing came in time.
            TransferError: A sender is gone, or sends something out of turn.
        """
        if self._number == len(self._turns):
            return self._end(time.monotonic() + deadline_s)
        sender = self._turns[self._number]
        header, block = self._ends[sender].receive(deadline_s=deadline_s)
        if header.kind != "abort":
            self._check(header, sender, "block")
            header = replace(header, number=self._number)
        self._counts[sender] += 1
        self._number += 1
        return header, block

    def _end(self, until_s: float) -> tuple[Header, torch.Tensor]:
        """Return the end of the transfer, put together from those of all senders."""
        ends: list[Header] = []
        block = torch.empty(0, dtype=torch.uint8)
        for sender, end in enumerate(self._ends):
            left_s = max(until_s - time.monotonic(), 0.001)
            header, block = end.receive(deadline_s=left_s)
            if header.kind == "abort":
                return header, block
            self._check(header, sender, "end")
            ends.append(header)
        labels = sorted({header.label for header in ends})
        if len(labels) > 1:
            raise TransferError(
                f"the senders speak of different transfers: {', '.join(labels)}"
            )
        entries = tuple(entry for header in ends for entry in header.entries)
        return Header("end", self._number, labels[0], entries), block

    def _check(self, header: Header, sender: int, kind: str) -> None:
        wanted = kind, self._counts[sender]
        if (header.kind, header.number) != wanted:
            raise TransferError(
                f"{header.kind} {header.number} of sender {sender} came where {kind} "
                f"{wanted[1]} was due: its link lost, doubled or swapped a message"
            )

    def close(self) -> None:
        """Close all ends."""
        _close_all(self._ends)


def _close_all(parts: Sequence[TensorLink] | Sequence[ReceivingEnd]) -> None:
    # All of them, also where one raises.
    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.close)
