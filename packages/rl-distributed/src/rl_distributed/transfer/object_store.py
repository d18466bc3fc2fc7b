"""A link through Ray's object store, between any processes of a cluster.

Each block is put once, whatever the number of receivers, and nodes fetch it from each
other. A bounded queue per receiver carries headers and references.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from rl_distributed.batch.tensor_buffers import decode, encode
from rl_distributed.errors import (
    DeadlineExceededError,
    QueueClosedError,
    TransferError,
    WorkerDiedError,
)
from rl_distributed.extras import require_torch
from rl_distributed.process.closing import close_after
from rl_distributed.queues.queue import BoundedQueue
from rl_distributed.transfer.protocol import Header

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["ObjectStoreLink", "ObjectStoreReceiver", "ObjectStoreSender"]


@dataclass(frozen=True)
class ObjectStoreLink:
    """A link between processes of one Ray cluster; `create` makes it.

    At most `max_blocks` blocks (see `create`) wait for each receiver.
    """

    queues: tuple[BoundedQueue, ...]
    """One per receiver."""

    @classmethod
    def create(
        cls, num_receivers: int = 1, *, max_blocks: int = 2, deadline_s: float = 60.0
    ) -> Self:
        """Make what carries the references; Ray must be up.

        All links of a process have one actor, which its first link starts.
        """
        names = [f"transfer to receiver {index}" for index in range(num_receivers)]
        queues = BoundedQueue.create_many(
            max_blocks, names, beside=_carrier(deadline_s), deadline_s=deadline_s
        )
        return cls(tuple(queues))

    @property
    def num_receivers(self) -> int:
        """Number of receivers."""
        return len(self.queues)

    def sender(self, *, deadline_s: float = 60.0) -> ObjectStoreSender:
        """Return the sending end."""
        require_torch("ObjectStoreLink.sender")
        # Each copy of a queue is a separate client. If two ends in one process shared
        # one, closing either would close both.
        return ObjectStoreSender(tuple(map(copy.copy, self.queues)))

    def receiver(
        self, index: int = 0, *, deadline_s: float = 60.0
    ) -> ObjectStoreReceiver:
        """Return the end of receiver `index`."""
        require_torch("ObjectStoreLink.receiver")
        if not 0 <= index < self.num_receivers:
            raise TransferError(
                f"receiver must be in 0..{self.num_receivers - 1}: got {index}"
            )
        return ObjectStoreReceiver(copy.copy(self.queues[index]))

    def close(self) -> None:
        """End what carries the references."""
        for queue in self.queues:
            queue.shutdown()

    def __enter__(self) -> Self:
        """Return the link itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the link."""
        close_after(error, self.close, "the link")


_carriers: dict[str, BoundedQueue] = {}
_carriers_lock = threading.Lock()


def _carrier(deadline_s: float) -> BoundedQueue:
    """Return a queue whose actor takes the queues of this process's links."""
    # The id changes when this process connects to another Ray session, where these
    # actors do not exist.
    session = ray.get_runtime_context().get_worker_id()
    # Links may be created in several threads, but only one actor should start.
    with _carriers_lock:
        known = _carriers.get(session)
        if known is not None:
            try:
                # The actor may have died, for instance with its node; a new link then
                # needs another.
                known.qsize(deadline_s=deadline_s)
            except WorkerDiedError:
                known = None
        if known is None:
            _carriers.clear()  # the others are of sessions that are over
            known = BoundedQueue.create(1, name="links", deadline_s=deadline_s)
            _carriers[session] = known
    return known


class ObjectStoreSender:
    """Puts blocks into the store; its process owns them and must outlive their use."""

    def __init__(self, queues: tuple[BoundedQueue, ...]) -> None:
        self._queues = queues
        self._memory = torch.empty(0, dtype=torch.uint8)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory of this process, used again for the next block."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Put the block once, and its reference into the queue of every receiver."""
        # As a numpy array, whose bytes Ray stores out of band: pickling the tensor
        # takes eight times as long.
        references = [] if block is None else [ray.put(encode(block))]
        text = header.to_json()  # plain text, so that the queue's actor needs no torch
        for queue in self._queues:
            try:
                # Left to Ray to pickle, because it only counts references that it sees.
                queue.put_packed([(text, references)], deadline_s=deadline_s)
            except (QueueClosedError, WorkerDiedError) as error:
                raise TransferError(f"the link is gone: {error}") from error

    def close(self) -> None:
        """Say that nothing more will come."""
        for queue in self._queues:
            queue.close()


class ObjectStoreReceiver:
    """Gets blocks from the store."""

    def __init__(self, queue: BoundedQueue) -> None:
        self._queue = queue

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message.

        Its block is memory that all receivers of a node share.
        """
        try:
            ((text, references),) = self._queue.get_packed(1, deadline_s=deadline_s)
        except (QueueClosedError, WorkerDiedError) as error:
            raise TransferError(f"the sender is gone: {error}") from error
        header = Header.from_json(text)
        if not references:
            return header, torch.empty(0, dtype=torch.uint8)
        return header, _get(references[0], header, deadline_s)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _get(reference: Any, header: Header, deadline_s: float) -> torch.Tensor:
    first = header.entries[0].name
    try:
        block: torch.Tensor = decode(ray.get(reference, timeout=deadline_s))
    except GetTimeoutError as error:
        raise DeadlineExceededError(
            f"the block of tensor {first!r} did not arrive within {deadline_s:g} s"
        ) from error
    except ObjectLostError as error:
        raise TransferError(
            f"the block of tensor {first!r} is gone, because the sender died: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    except RayError as error:
        raise TransferError(f"cannot get the block of tensor {first!r}") from error
    return block
