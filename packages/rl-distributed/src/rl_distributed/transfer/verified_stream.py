"""Named tensors over a link, in buckets, verified at the other end.

```
sender     tensors -> buckets by bytes -> pack, digest -> block ... -> end: manifest
receivers  block -> digest of each tensor as sent? -> hand out ... -> end: manifest
           nothing missing, nothing extra?
```
A damaged tensor is never handed out. That nothing is missing is known at the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rl_distributed.errors import DeadlineExceededError, DistributedError, TransferError
from rl_distributed.transfer.manifest import (
    Manifest,
    TensorEntry,
    digest_of,
    dtype_name,
)
from rl_distributed.transfer.messages import tensor_messages
from rl_distributed.transfer.protocol import Header, ReceivingEnd, SendingEnd

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["TensorStream", "receive_tensors", "send_messages", "send_tensors"]

_ABORT_DEADLINE_S = 10.0
_SHOWN = 5


def send_tensors(
    end: SendingEnd,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    label: str = "",
    bucket_bytes: int = 64 << 20,
    dtype: torch.dtype | None = None,
    deadline_s: float = 120.0,
) -> Manifest:
    """Send tensors to all receivers of a link.

    An iterable is consumed while it is sent, so that only one bucket needs memory; if
    it raises, the receivers get the reason. An end can send several times in a row.

    Args:
        end: The result of `link.sender()`.
        tensors: Dense tensors of any dtype, shape and device, by unique names.
        label: Name of the transfer, for the receivers' manifest, such as a version.
        bucket_bytes: Tensors travel together up to this size; a larger one alone.
        dtype: Floating-point tensors are cast to it on the way; None: sent as they are.
        deadline_s: How long the whole transfer may take.

    Returns:
        The manifest; its `digest` equals that of every receiver's manifest.

    Raises:
        TransferError: A name occurs twice, a tensor is not dense, or a receiver is
            gone.
        DeadlineExceededError: The receivers were too slow.
    """
    messages = tensor_messages(
        tensors, end.buffer, label=label, bucket_bytes=bucket_bytes, dtype=dtype
    )
    return send_messages(end, messages, label=label, deadline_s=deadline_s)


def send_messages(
    end: SendingEnd,
    messages: Iterable[tuple[Header, torch.Tensor | None]],
    *,
    label: str = "",
    deadline_s: float = 120.0,
) -> Manifest:
    """Send messages, which `tensor_messages` or a `BlockPacker` makes on the way.

    Args:
        end: The result of `link.sender()`, whose `buffer` the messages are packed in.
        messages: Headers and blocks, up to the end of the transfer. If the next one
            cannot be made, the receivers get the reason.
        label: Name of the transfer.
        deadline_s: How long the whole transfer may take.

    Returns:
        The manifest of what was sent over this end.

    Raises:
        TransferError: A receiver is gone.
        DeadlineExceededError: The receivers were too slow.
    """
    until_s = time.monotonic() + deadline_s
    number = 0
    header = Header("end", 0, label)
    try:
        for header, block in messages:
            is_end = header.kind == "end"
            what = "the manifest" if is_end else f"tensor {header.entries[0].name!r}"
            left_s = _left_s(until_s, f"before {what}")
            with _naming(f"{what} could not be sent"):
                end.send(header, block, deadline_s=left_s)
            number += 1
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        # Best effort: if the abort cannot be sent either, the first error
        # is the one to raise.
        with suppress(DistributedError):
            abort = Header("abort", number, label, text=reason)
            # Receivers that were too slow already get no more time.
            late = isinstance(error, DeadlineExceededError)
            end.send(abort, None, deadline_s=0.1 if late else _ABORT_DEADLINE_S)
        raise
    return Manifest(header.entries, label)


def receive_tensors(
    end: ReceivingEnd,
    *,
    expected: Mapping[str, torch.Tensor] | None = None,
    deadline_s: float = 120.0,
) -> TensorStream:
    """Receive what one call of `send_tensors` sends.

    Args:
        end: The result of `link.receiver(index)`.
        expected: Tensors (also without data, on `meta`) that say which names, shapes
            and dtypes must come, such as a `state_dict`; None: any.
        deadline_s: How long the whole transfer may take, from the first tensor asked
            for.
    """
    return TensorStream(end, expected, deadline_s)


class TensorStream:
    """The tensors of one transfer, as they come; `receive_tensors` makes it.

    ```python
    for name, tensor in receive_tensors(link.receiver(0)):
        ...
    ```

    Tensors from the object store lie in memory that all its readers share (clone them
    before a write in place); those from every other link are the receiver's own.
    """

    def __init__(
        self,
        end: ReceivingEnd,
        expected: Mapping[str, torch.Tensor] | None,
        deadline_s: float,
    ) -> None:
        self._end = end
        self._expected = expected
        self._deadline_s = deadline_s
        self.manifest: Manifest | None = None
        """Of the received tensors, once all are there and equal to those sent."""

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors by name, once the whole transfer is verified."""
        return dict(self)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once it is verified.

        Raises:
            TransferError: A tensor is damaged, missing, extra or not as expected, or
                the sender gave up or is gone.
            DeadlineExceededError: The sender was too slow.
        """
        until_s = time.monotonic() + self._deadline_s
        received: list[TensorEntry] = []
        for number in itertools.count():
            after = f"after tensor {received[-1].name!r}" if received else "at all"
            left_s = _left_s(until_s, after)
            with _naming(f"nothing came {after}"):
                header, block = self._end.receive(deadline_s=left_s)
            if header.kind == "abort":
                raise TransferError(
                    f"the sender gave up{_called(header)} {after}: {header.text}"
                )
            # Links promise order; one that breaks it could silently mix two transfers.
            if header.number != number:
                raise TransferError(
                    f"message {header.number}{_called(header)} came where message "
                    f"{number} was due, {after}: the link lost, doubled or swapped one"
                )
            if header.kind == "end":
                self.manifest = self._checked(header, received)
                return
            for entry in header.entries:
                tensor, found = _unpack(entry, block)
                self._check(entry, found)
                received.append(found)
                yield entry.name, tensor

    def _check(self, sent: TensorEntry, found: TensorEntry) -> None:
        if sent != found:
            raise TransferError(
                f"tensor {sent.name!r} ({sent.dtype}{list(sent.shape)}) arrived "
                f"damaged: its digest is {found.digest} instead of {sent.digest}; "
                "send it again"
            )
        if self._expected is None:
            return
        if sent.name not in self._expected:
            raise TransferError(
                f"tensor {sent.name!r} is not among the {len(self._expected)} expected "
                "ones; sender and receiver must speak of the same tensors"
            )
        like = self._expected[sent.name]
        wanted = (dtype_name(like.dtype), tuple(like.shape))
        if wanted != (sent.dtype, sent.shape):
            raise TransferError(
                f"tensor {sent.name!r} must be {wanted[0]}{list(wanted[1])}: got "
                f"{sent.dtype}{list(sent.shape)}"
            )

    def _checked(self, header: Header, received: list[TensorEntry]) -> Manifest:
        """Return the manifest of the received tensors, once it matches all rules."""
        found = Manifest(tuple(received), header.label)
        problems = Manifest(header.entries, header.label).differences(found)
        if self._expected is not None:
            names = {entry.name for entry in received}
            # What arrived may equal what was sent and still lack tensors
            # that were expected.
            absent = [name for name in self._expected if name not in names]
            problems += [f"{name} is missing: it was never sent" for name in absent]
        if problems:
            more = ", ..." if len(problems) > _SHOWN else ""
            raise TransferError(
                f"what was received{_called(header)} is not what was sent: "
                f"{', '.join(problems[:_SHOWN])}{more}"
            )
        return found


def _unpack(
    entry: TensorEntry, block: torch.Tensor
) -> tuple[torch.Tensor, TensorEntry]:
    """View a tensor in its block; return it and its entry with the digest found."""
    part = block[entry.start : entry.start + entry.num_bytes]
    found = TensorEntry(entry.name, entry.dtype, entry.shape, digest_of(part))
    if part.numel() != entry.num_bytes:
        raise TransferError(
            f"tensor {entry.name!r} has {entry.num_bytes} bytes, but its block ends "
            f"after {part.numel()}; send it again"
        )
    return part.view(entry.torch_dtype).view(entry.shape), found


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Add the name of the tensor to errors of a link, which knows only messages."""
    try:
        yield
    except (DeadlineExceededError, TransferError) as error:
        raise type(error)(f"{what}: {error}") from error


def _called(header: Header) -> str:
    return f" in the transfer {header.label!r}" if header.label else ""


def _left_s(until_s: float, where: str) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceededError(
            f"the transfer ran out of time {where}; raise deadline_s or look at the "
            "other side"
        )
    return left_s
