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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
