"""Protocols for carrying tensors between processes: a link and its ends.

A link has one sender and a fixed number of receivers, each of which gets everything.
It carries messages in order: a header, and with most of them a block of bytes. Their
meaning, and the check that they arrive whole, are the business of `verified_stream`.

```
driver:    link = SomeLink(...)         made once, pickled to both sides
sender:    end = link.sender()          end.buffer(n) -> fill -> end.send(header, block)
receiver:  end = link.receiver(index)   end.receive() -> header, block
```
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from rl_distributed.transfer.manifest import TensorEntry

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["Header", "ReceivingEnd", "SendingEnd", "TensorLink"]


@dataclass(frozen=True, slots=True)
class Header:
    """The description that travels with each block."""

    kind: Literal["block", "end", "abort"]
    """Tensors; the end of a transfer; or the sender gave up."""
    number: int = 0
    """The place of the message in its transfer."""
    label: str = ""
    """The sender's name for the transfer."""
    entries: tuple[TensorEntry, ...] = ()
    """The tensors in the block; at the end, all tensors of the transfer."""
    text: str = ""
    """Why the sender gave up."""

    def to_json(self) -> str:
        """Return the header as text."""
        tensors = [entry.to_json() for entry in self.entries]
        return json.dumps([self.kind, self.number, self.label, tensors, self.text])

    @classmethod
    def from_json(cls, text: str | bytes) -> Header:
        """Undo `to_json`."""
        kind, number, label, tensors, reason = json.loads(text)
        entries = tuple(TensorEntry.from_json(value) for value in tensors)
        return cls(kind, number, label, entries, reason)


class SendingEnd(Protocol):
    """The end that messages are sent from. Used by one thread."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory for the next block: `[num_bytes]` uint8, to be filled and sent."""
        ...

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Send a header, and the block that `buffer` gave last.

        Raises:
            DeadlineExceededError: The receivers did not make room in time.
            TransferError: A receiver is gone.
        """
        ...

    def close(self) -> None:
        """Give up what the end holds. Messages that were sent still arrive."""
        ...


class ReceivingEnd(Protocol):
    """The end that messages are received at. Used by one thread."""

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message; without a block, an empty tensor.

        Raises:
            DeadlineExceededError: Nothing came in time.
            TransferError: The sender is gone.
        """
        ...

    def close(self) -> None:
        """Give up what the end holds; tensors that were received stay valid."""
        ...


@runtime_checkable
class TensorLink(Protocol):
    """Connects one sender with `num_receivers` receivers. It can be pickled."""

    @property
    def num_receivers(self) -> int:
        """Number of receivers."""
        ...

    def sender(self, *, deadline_s: float = 60.0) -> SendingEnd:
        """Return the end of the sender, in the process that calls this."""
        ...

    def receiver(self, index: int = 0, *, deadline_s: float = 60.0) -> ReceivingEnd:
        """Return the end of a receiver, in the process that calls this."""
        ...

    def close(self) -> None:
        """Free the link's resources; called once, by the process that made it."""
        ...

    def __enter__(self) -> Self:
        """Return the link itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the link."""
        ...
