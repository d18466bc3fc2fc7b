"""Streams of named tensors from one process to others.

`send_tensors` and `receive_tensors` work over any `TensorLink`. Which one fits:

| link | between | copies of the bytes |
|---|---|---|
| `ObjectStoreLink` | processes of one Ray cluster | pack, put, once per other node |
| `SharedMemoryLink` | processes of one machine | pack |
| `CollectiveLink` | any machines; GPUs with NCCL | pack, broadcast |
| `CudaIpcLink` | processes on the same GPU | pack, copy; both on the GPU |
| `FileLink` | anything that sees the folder, also later | pack, write |
"""

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
