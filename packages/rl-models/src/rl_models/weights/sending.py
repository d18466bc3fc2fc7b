"""The trainer's side of a sync: one rank's weights as messages.

```
backend.export_weights() -> cast, pack, digest -> messages(request, i): bucket i, when
                                                  it is called for
                                               -> send(request): a link of its own
```
Every rank is called, because gathering a sharded tensor takes all of them; rank 0 alone
packs and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rl_distributed.batch.tensor_buffers import encode
from rl_distributed.transfer import SendingEnd, TensorLink, send_tensors
from rl_distributed.transfer.messages import tensor_buckets, tensor_messages
from rl_models.errors import WeightSyncError
from rl_models.weight_request import WeightRequest

__all__ = ["Message", "WeightSender"]

Message = tuple[str, Any]
"""Header as text, and the encoded block or None."""


class WeightSender:
    """Hands out the weights of one rank.

    Args:
        export: Gives an iterator over the whole tensors by name, for what is asked of
            them.
        is_first: Whether this is rank 0.
    """

    def __init__(
        self,
        export: Callable[[WeightRequest], Iterator[tuple[str, torch.Tensor]]],
        is_first: bool,
    ) -> None:
        self._export = export
        self._is_first = is_first
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._tensors: Iterator[Any] = iter(())
        self._ongoing: Iterator[Any] = iter(())
        self._next = (-1, 0)
        self._link: TensorLink | None = None
        self._end: SendingEnd | None = None

    @staticmethod
    def num_buckets(specs: Mapping[str, torch.Tensor], request: WeightRequest) -> int:
        """How many calls of `messages` bring all tensors (given on `meta`)."""
        pairs = specs.items()
        found = tensor_buckets(pairs, request.bucket_bytes, request.dtype)
        return max(1, sum(1 for _ in found))

    def messages(
        self, request: WeightRequest, index: int, is_last: bool
    ) -> list[Message] | None:
        """Return the message of bucket `index`; None on ranks that only take part.

        The memory of a block is used again: a result is done with when the next call
        begins, as that of a remote call is.

        Args:
            request: What to send.
            index: Counts on from 0, where the export of this version begins.
            is_last: Also give the messages that follow, up to the end.
        """
        if index == 0:
            self._begin(request)
        elif self._next != (request.version, index):
            raise WeightSyncError(
                f"bucket {index} of the {request.label} was asked for, but one before "
                "it failed. Sync the weights again."
            )
        self._next = (-1, 0)
        try:
            # No bucket may follow one that failed: the position is only set again
            # below.
            taken = [next(self._ongoing, None)]
            if is_last:
                taken += self._rest()
        except BaseException:
            _drain(self._tensors)
            raise
        if not is_last:
            self._next = (request.version, index + 1)
        if not self._is_first:
            return None
        return [
            (header.to_json(), None if block is None else encode(block))
            for header, block in (message for message in taken if message is not None)
        ]

    def _begin(self, request: WeightRequest) -> None:
        self._tensors = self._export(request)
        if self._is_first:
            self._ongoing = tensor_messages(
                self._tensors,
                self._buffer,
                label=request.label,
                bucket_bytes=request.bucket_bytes,
                dtype=request.dtype,
            )
        else:
            self._ongoing = tensor_buckets(
                self._tensors, request.bucket_bytes, request.dtype
            )

    def _rest(self) -> list[Any]:
        """Return what follows the last block: the end of the transfer."""
        rest = list(self._ongoing)
        if self._is_first and any(block is not None for _, block in rest):
            raise WeightSyncError(
                "the training backend exports more tensors than its weight_specs name; "
                "both must name the same"
            )
        return rest

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        # Grows and never shrinks: buckets have about one size, and new memory costs
        # page faults at each sync.
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def open(self, link: TensorLink, deadline_s: float) -> None:
        """Join a link; rank 0 only. The link before it is left."""
        self.close()
        if self._is_first:
            self._end = link.sender(deadline_s=deadline_s)
        self._link = link

    def send(self, link: TensorLink, request: WeightRequest) -> str | None:
        """Send everything over a link that was opened; gives the manifest's digest."""
        if self._link != link:
            raise WeightSyncError("the link of the weights was not opened here")
        tensors = self._export(request)
        try:
            # This rank only gathers; `finally` takes the tensors to their end.
            if self._end is None:
                return None
            manifest = send_tensors(
                self._end,
                tensors,
                label=request.label,
                bucket_bytes=request.bucket_bytes,
                dtype=request.dtype,
                deadline_s=request.deadline_s,
            )
        except BaseException:
            self.close()  # so that receivers which wait learn of it at once
            raise
        finally:
            _drain(tensors)
        return manifest.digest

    def close(self) -> None:
        """Leave the link."""
        end, self._end, self._link = self._end, None, None
        if end is not None:
            end.close()


def _drain(tensors: Iterator[Any]) -> None:
    """Go on to the end, because the other ranks do: gathering takes all of them."""
    for _ in tensors:
        pass
