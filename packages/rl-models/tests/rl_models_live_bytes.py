"""Bytes of simultaneously live tensors; also in the environments of workers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors, beyond those that existed before."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._sizes: dict[int, int] = {}
        self._live = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)
