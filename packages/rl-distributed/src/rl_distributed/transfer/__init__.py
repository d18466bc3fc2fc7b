"""Streams of named tensors from one process to others.

`send_tensors` and `receive_tensors` work over any `TensorLink`. Which one fits:

| link | between | copies of the bytes |
|---|---|---|
| `ObjectStoreLink` | processes of one Ray cluster | pack, put, once per other node |
| `SharedMemoryLink` | processes of one machine | pack |
| `CollectiveLink` | any machines; GPUs with NCCL | pack, broadcast |
| `CudaIpcLink` | processes on the same GPU | pack, copy; both on the GPU |
| `FileLink` | anything that sees the folder, also later | pack, write |

A name is imported when it is first used: only some links need Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_distributed.transfer.collective import (
        CollectiveLink,
        CollectiveReceiver,
        CollectiveSender,
    )
    from rl_distributed.transfer.cuda_ipc import CudaIpcLink
    from rl_distributed.transfer.file import FileLink
    from rl_distributed.transfer.manifest import Manifest, TensorEntry, digest_of
    from rl_distributed.transfer.object_store import ObjectStoreLink
    from rl_distributed.transfer.protocol import (
        Header,
        ReceivingEnd,
        SendingEnd,
        TensorLink,
    )
    from rl_distributed.transfer.shared_memory import SharedMemoryLink
    from rl_distributed.transfer.stream import (
        TensorStream,
        receive_tensors,
        send_tensors,
    )

__all__ = [
    "CollectiveLink",
    "CollectiveReceiver",
    "CollectiveSender",
    "CudaIpcLink",
    "FileLink",
    "Header",
    "Manifest",
    "ObjectStoreLink",
    "ReceivingEnd",
    "SendingEnd",
    "SharedMemoryLink",
    "TensorEntry",
    "TensorLink",
    "TensorStream",
    "digest_of",
    "receive_tensors",
    "send_tensors",
]

_MODULES = {
    "collective": ("CollectiveLink", "CollectiveReceiver", "CollectiveSender"),
    "cuda_ipc": ("CudaIpcLink",),
    "file": ("FileLink",),
    "manifest": ("Manifest", "TensorEntry", "digest_of"),
    "object_store": ("ObjectStoreLink",),
    "protocol": ("Header", "ReceivingEnd", "SendingEnd", "TensorLink"),
    "shared_memory": ("SharedMemoryLink",),
    "stream": ("TensorStream", "receive_tensors", "send_tensors"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
