"""The trainer's side of a sync: one rank's weights as messages.

```
backend.export_weights() -> cast, pack, digest -> messages(request, i): bucket i, on
                                                  request
                                               -> send(request): a link of its own
```
Every rank is called, because gathering a sharded tensor is a collective of all ranks;
rank 0 alone packs and sends.
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
        export: Returns an iterator over the whole tensors by name, for a request.
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
        # No version is -1: only bucket 0 may be asked for first.
        self._next = (-1, 0)
        self._link: TensorLink | None = None
        self._end: SendingEnd | None = None

    @staticmethod
    def num_buckets(specs: Mapping[str, torch.Tensor], request: WeightRequest) -> int:
        """Return the number of calls of `messages` that all tensors take.

        Args:
            specs: The tensors, on `meta`.
            request: The update.
        """
        pairs = specs.items()
        found = tensor_buckets(pairs, request.bucket_bytes, request.dtype)
        # At least one call, for the manifest that ends the transfer.
        return max(1, sum(1 for _ in found))

    def messages(
        self, request: WeightRequest, index: int, is_last: bool
    ) -> list[Message] | None:
        """Return the message of bucket `index`; None on ranks that only take part.

        The memory of a block is reused: a result is valid until the next call, which is
        enough for a remote call.

        Args:
            request: The update to send.
            index: Number of the bucket; 0 begins the export of this version.
            is_last: Whether to return the remaining messages as well, up to the end.
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
            # The position stays unset on failure, so that no bucket can follow one that
            # failed.
            taken = [next(self._ongoing, None)]
            if is_last:
                taken += self._rest()
        except BaseException:
            # The other ranks may be inside the same gather, and would wait for this one
            # until the collective times out.
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
        """Return the messages after the last block: the end of the transfer."""
        rest = list(self._ongoing)
        # The driver counts calls by `weight_specs`. A block that is left over shares
        # the memory of the last one, which is not encoded yet.
        if self._is_first and any(block is not None for _, block in rest):
            raise WeightSyncError(
                "the training backend exports more tensors than its weight_specs name; "
                "both must name the same"
            )
        return rest

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        # Grows and never shrinks: buckets are of similar size, and fresh memory costs
        # page faults at every sync.
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def open(self, link: TensorLink, deadline_s: float) -> None:
        """Join a link, after leaving the previous one; only rank 0 has an end of it."""
        self.close()
        if self._is_first:
            self._end = link.sender(deadline_s=deadline_s)
        self._link = link

    def send(self, link: TensorLink, request: WeightRequest) -> str | None:
        """Send everything over an open link; return the digest of the manifest."""
        if self._link != link:
            raise WeightSyncError("the link of the weights was not opened here")
        tensors = self._export(request)
        try:
            # This rank only gathers; `finally` exhausts the tensors.
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
            self.close()  # so that waiting receivers learn of it at once
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
    """Exhaust the tensors, as the other ranks do: each gather needs all ranks."""
    for _ in tensors:
        pass
