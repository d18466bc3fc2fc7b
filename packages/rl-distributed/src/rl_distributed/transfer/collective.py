"""A link over a process group of torch: each message is broadcast.

gloo moves blocks through the memory of the CPUs; NCCL between GPUs, where blocks are
packed, digested and received on the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

from rl_distributed.cluster.ports import PortAllocator
from rl_distributed.errors import (
    DeadlineExceededError,
    ResourceInsufficientError,
    TransferError,
)
from rl_distributed.extras import require_torch
from rl_distributed.transfer.protocol import Header

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["CollectiveLink", "CollectiveReceiver", "CollectiveSender"]

_SENDER = 0


@dataclass(frozen=True)
class CollectiveLink:
    """A link over a process group of its own: the sender is rank 0.

    All ends are made at the same time, because a group forms when all of it is there.
    Processes may be members of other groups as well. To send over a group that exists
    already, use `CollectiveSender` and `CollectiveReceiver` on it.
    """

    address: str
    """Where the sender runs: a name or an address that all receivers reach."""
    port: int
    """A free port there, such as `PortAllocator` finds."""
    num_receivers: int = 1
    backend: Literal["gloo", "nccl"] = "gloo"

    @classmethod
    def local(cls, num_receivers: int = 1) -> Self:
        """Return a gloo link on this machine."""
        (port,) = PortAllocator().allocate("127.0.0.1")
        return cls("127.0.0.1", port, num_receivers)

    def sender(self, *, deadline_s: float = 60.0) -> CollectiveSender:
        """Return the sending end, once all receivers have joined."""
        require_torch("CollectiveLink.sender")
        return CollectiveSender(self._group(_SENDER, deadline_s), self._device())

    def receiver(
        self, index: int = 0, *, deadline_s: float = 60.0
    ) -> CollectiveReceiver:
        """Return the end of receiver `index`, once all others have joined."""
        require_torch("CollectiveLink.receiver")
        if not 0 <= index < self.num_receivers:
            raise TransferError(
                f"receiver must be in 0..{self.num_receivers - 1}: got {index}"
            )
        return CollectiveReceiver(self._group(index + 1, deadline_s), self._device())

    def close(self) -> None:
        """Do nothing: each end holds and closes its own share of the group."""

    def __enter__(self) -> Self:
        """Return the link itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the link."""
        self.close()

    def _device(self) -> torch.device:
        if self.backend == "gloo":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _group(self, rank: int, deadline_s: float) -> Any:
        limit = timedelta(seconds=deadline_s)
        size = self.num_receivers + 1
        if self.backend == "nccl" and not torch.cuda.is_available():
            raise ResourceInsufficientError(
                "a collective link with backend 'nccl' needs a GPU in every process; "
                "use backend='gloo' on CPUs"
            )
        try:
            # Not by `init_process_group`: that creates the process's only default
            # group, which training may need.
            store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
                self.address, self.port, size, rank == _SENDER, timeout=limit
            )
            if self.backend == "nccl":
                options = torch.distributed.ProcessGroupNCCL.Options()
                options._timeout = limit
                return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
            return _gloo(store, rank, size, limit, self.address)
        except (RuntimeError, torch.distributed.DistError) as error:
            raise DeadlineExceededError(
                f"rank {rank} of {size} could not join the link at {self.address}:"
                f"{self.port} within {deadline_s:g} s: {_first_line(error)}; all ends "
                "must be made at the same time"
            ) from error


def _gloo(
    store: Any, rank: int, size: int, limit: timedelta, address: str
) -> torch.distributed.ProcessGroupGloo:
    if not address.startswith("127."):
        return torch.distributed.ProcessGroupGloo(store, rank, size, limit)
    # By default gloo listens on the address of the host's name, open to the network.
    kind: Any = torch.distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout = limit
    options._devices = [kind.create_device(hostname=address)]
    group: torch.distributed.ProcessGroupGloo = kind(store, rank, size, options)
    return group


class CollectiveSender:
    """Broadcasts from its rank of a process group.

    Args:
        group: A process group or a backend of one; all its other ranks receive.
        device: Where blocks are packed; must suit the group.
        root: The sender's rank in the group.
    """

    def __init__(
        self, group: Any, device: torch.device | str = "cpu", root: int = _SENDER
    ) -> None:
        self._channel = _Channel(group, torch.device(device), root)
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory on the device of the group, used again for the next block."""
        # `send` returns when the broadcast has ended, so the memory is free again.
        if self._memory.numel() < num_bytes:
            self._memory = self._memory.new_empty(num_bytes)
        return self._memory[:num_bytes]

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Broadcast sizes, header and block."""
        until_s = time.monotonic() + deadline_s
        channel = self._channel
        # A copy, because torch warns about read-only memory.
        text = torch.frombuffer(bytearray(header.to_json().encode()), dtype=torch.uint8)
        block = self._memory[:0] if block is None else block
        # Receivers must allocate memory of the right size before each broadcast.
        sizes = torch.tensor([text.numel(), block.numel()])
        for part in (sizes, text, block):
            channel.broadcast(part.to(channel.device), until_s, "its receivers")

    def close(self) -> None:
        """Leave the group."""
        self._channel.close()


class CollectiveReceiver:
    """Receives what another rank of a process group broadcasts; see the sender."""

    def __init__(
        self, group: Any, device: torch.device | str = "cpu", root: int = _SENDER
    ) -> None:
        self._channel = _Channel(group, torch.device(device), root)

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Get the next message; its block is new memory on the device of the group."""
        until_s = time.monotonic() + deadline_s
        sizes = self._take(2, torch.int64, until_s).tolist()
        text = self._take(sizes[0], torch.uint8, until_s)
        block = self._take(sizes[1], torch.uint8, until_s)
        return Header.from_json(text.cpu().numpy().tobytes()), block

    def close(self) -> None:
        """Leave the group."""
        self._channel.close()

    def _take(self, size: int, dtype: torch.dtype, until_s: float) -> torch.Tensor:
        part = torch.empty(size, dtype=dtype, device=self._channel.device)
        self._channel.broadcast(part, until_s, "the sender")
        return part


@dataclass
class _Channel:
    group: Any
    device: torch.device
    root: int

    def broadcast(self, part: torch.Tensor, until_s: float, peers: str) -> None:
        """Broadcast in place; the time-out of the group does not matter."""
        if self.group is None:
            raise TransferError("this end of a collective link is closed")
        # Both ends know the size by now, so both skip the broadcast.
        if part.numel() == 0:
            return
        left_s = max(until_s - time.monotonic(), 0.001)
        limit = timedelta(seconds=left_s)
        try:
            self.group.broadcast(part, self.root, limit).wait(limit)
        except RuntimeError as error:
            # gloo has one kind of error for both.
            if time.monotonic() >= until_s or "timed out" in str(error).lower():
                raise DeadlineExceededError(
                    f"a broadcast of a collective link waited {left_s:.3g} s for "
                    f"{peers}; the group cannot be used any more"
                ) from error
            raise TransferError(
                f"a process of a collective link is gone while waiting for {peers}: "
                f"{_first_line(error)}"
            ) from error

    def close(self) -> None:
        self.group = None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
