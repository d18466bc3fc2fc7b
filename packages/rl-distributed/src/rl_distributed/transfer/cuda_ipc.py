"""A link between processes that use the same GPU: blocks never leave it.

The sender packs a block on the GPU and passes a handle of its memory through a link in
shared memory; receivers map the memory, copy the block on the device, and say so. The
sender uses one block again and again, and waits for all receivers before it does.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rl_distributed.errors import ResourceInsufficientError
from rl_distributed.extras import require_torch
from rl_distributed.transfer.protocol import Header
from rl_distributed.transfer.shared_memory import (
    SharedMemoryLink,
    SharedMemoryReceiver,
    SharedMemorySender,
)

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["CudaIpcLink", "CudaIpcReceiver", "CudaIpcSender"]

_GPU = "cuda"
# The handle goes as JSON, so the arguments of torch's own function are taken apart.
# Places among the arguments of `rebuild_cuda_tensor`: the device, `requires_grad`.
_DEVICE, _GRADIENT = 6, 10
# Arguments of `rebuild_cuda_tensor` besides the shape, the types and the device.
_HANDLE = (
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


@dataclass(frozen=True)
class CudaIpcLink:
    """A link whose ends are processes of one machine on the same GPU."""

    control: SharedMemoryLink
    """Carries headers and handles, never tensors."""

    @classmethod
    def create(cls, num_receivers: int = 1) -> Self:
        """Make the link; the process that does needs no GPU."""
        # The sender has only one block, so only one message can be in flight.
        return cls(SharedMemoryLink.create(num_receivers, max_blocks=1))

    @property
    def num_receivers(self) -> int:
        """Number of receivers."""
        return self.control.num_receivers

    def sender(self, *, deadline_s: float = 60.0) -> CudaIpcSender:
        """Return the sending end, on the process's current GPU."""
        _check_cuda()
        return CudaIpcSender(self.control.sender(deadline_s=deadline_s))

    def receiver(self, index: int = 0, *, deadline_s: float = 60.0) -> CudaIpcReceiver:
        """Return the end of receiver `index`."""
        _check_cuda()
        return CudaIpcReceiver(self.control.receiver(index, deadline_s=deadline_s))

    def close(self) -> None:
        """Remove what carries the headers."""
        self.control.close()

    def __enter__(self) -> Self:
        """Return the link itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the link."""
        self.close()


class CudaIpcSender:
    """Shares a block of GPU memory, one message at a time."""

    def __init__(self, control: SharedMemorySender) -> None:
        self._control = control
        self._memory = torch.empty(0, dtype=torch.uint8, device=_GPU)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory of the GPU; receivers have copied the block that was in it before."""
        if self._memory.numel() < num_bytes:
            self._memory = self._memory.new_empty(num_bytes)
        return self._memory[:num_bytes]

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Send the header and a handle of the block; return when all have copied it."""
        handle = None if block is None or not block.numel() else _handle_of(block)
        # The header travels in the text of another one, beside the handle.
        text = json.dumps([header.to_json(), handle])
        envelope = Header(header.kind, header.number, text=text)
        self._control.send(envelope, None, deadline_s=deadline_s)
        self._control.wait_until_taken(deadline_s=deadline_s)

    def close(self) -> None:
        """Say that nothing more will come, and free the memory."""
        self._control.close()
        self._memory = torch.empty(0, dtype=torch.uint8)


class CudaIpcReceiver:
    """Copies each block on the GPU."""

    def __init__(self, control: SharedMemoryReceiver) -> None:
        self._control = control

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message; its block is new memory on the sender's GPU."""
        envelope, _ = self._control.take(deadline_s=deadline_s)
        text, handle = json.loads(envelope.text)
        block = torch.empty(0, dtype=torch.uint8)
        if handle is not None:
            shared = _tensor_of(handle)
            block = shared.clone()
            # The sender may overwrite its block as soon as it hears of this.
            torch.cuda.synchronize(block.device)
            del shared
        self._control.acknowledge()
        return Header.from_json(text), block

    def close(self) -> None:
        """Say that nothing more will be taken."""
        self._control.close()


def _check_cuda() -> None:
    require_torch("CudaIpcLink")
    if not torch.cuda.is_available():
        raise ResourceInsufficientError(
            "CudaIpcLink needs a GPU in the processes of its sender and receivers, and "
            "torch finds none here; use SharedMemoryLink between processes on CPUs"
        )


def reduce_tensor(block: torch.Tensor) -> Any:
    """Return a function and its arguments that make the tensor in another process."""
    reduce: Any = torch.multiprocessing.reductions.reduce_tensor
    return reduce(block)


def rebuild_cuda_tensor(*arguments: Any) -> Any:
    """Return the tensor that `reduce_tensor` described."""
    rebuild: Any = torch.multiprocessing.reductions.rebuild_cuda_tensor
    return rebuild(*arguments)


def _handle_of(block: torch.Tensor) -> dict[str, Any]:
    """Return a handle of the memory of a block, as plain values for JSON."""
    torch.cuda.synchronize(block.device)
    reduced: Any = reduce_tensor(block)
    arguments: tuple[Any, ...] = reduced[1]
    rest = (*arguments[_DEVICE + 1 : _GRADIENT], *arguments[_GRADIENT + 1 :])
    device = torch.cuda.get_device_properties(int(arguments[_DEVICE]))
    return {
        **dict(zip(_HANDLE, map(_plain, rest), strict=True)),
        # GPU indices depend on each process's CUDA_VISIBLE_DEVICES; the UUID does not.
        "gpu": str(device.uuid),
        "size": block.numel(),
    }


def _own_number_of(gpu: str) -> int:
    """Return the number that this process has for a GPU, given the id of the GPU."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == gpu:
            return number
    raise ResourceInsufficientError(
        f"the sender's GPU {gpu} is not visible in this process; CudaIpcLink needs "
        "sender and receivers on the same GPU (see CUDA_VISIBLE_DEVICES)"
    )


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _tensor_of(handle: dict[str, Any]) -> torch.Tensor:
    values: dict[str, Any] = {
        name: base64.b64decode(value)
        if name.endswith("_handle") and value is not None
        else value
        for name, value in handle.items()
    }
    tensor: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([values["size"]]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        _own_number_of(values["gpu"]),
        *(values[name] for name in _HANDLE[:3]),
        False,
        *(values[name] for name in _HANDLE[3:]),
    )
    return tensor
