"""The trainer's side of a sync: one rank's share of the weights as messages.

```
export(request): buckets -> cast, pack, digest -> messages(request, i): bucket i, on
                                                  request
                                               -> send(request): a link of its own
```
Every rank is called, because a sharded tensor is put together from the parts of all
ranks. A rank packs and sends the buckets whose turn is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rl_distributed.batch.tensor_buffers import encode
from rl_distributed.transfer import (
    Header,
    LinkSet,
    SendingEnd,
    TensorLink,
    send_messages,
)
from rl_distributed.transfer.messages import BlockPacker, tensor_buckets
from rl_models.errors import WeightSyncError
from rl_models.weight_request import WeightRequest
from rl_models.weights.collecting import Bucket

__all__ = ["Message", "WeightSender", "whole_buckets"]

Message = tuple[str, Any]
"""Header as text, and the encoded block or None."""


def whole_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], request: WeightRequest, rank: int
) -> Iterator[Bucket | None]:
    """Yield buckets of tensors that every rank has whole; None on ranks but the first.

    Args:
        tensors: They may be gathered one by one, by all ranks together.
        request: The update.
        rank: This rank.
    """
    for bucket in tensor_buckets(tensors, request.bucket_bytes, request.dtype):
        yield None if rank else bucket


class WeightSender:
    """Hands out the weights of one rank.

    Args:
        export: Returns for a request an iterator over all buckets: those that this rank
            sends, and None for those of other ranks.
        rank: This rank.
    """

    def __init__(
        self,
        export: Callable[[WeightRequest], Iterator[Bucket | None]],
        rank: int,
    ) -> None:
        self._export = export
        self._rank = rank
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._buckets: Iterator[Bucket | None] = iter(())
        self._packer: BlockPacker | None = None
        # No version is -1: only bucket 0 may be asked for first.
        self._next = (-1, 0)
        self._link: TensorLink | LinkSet | None = None
        self._end: SendingEnd | None = None

    @staticmethod
    def num_buckets(specs: Mapping[str, torch.Tensor], request: WeightRequest) -> int:
        """Return the number of buckets of `whole_buckets`, at least 1.

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
            is_last: Whether to return the end of this rank's messages as well.
        """
        if index == 0:
            self._buckets = self._export(request)
            self._packer = self._new_packer(request, self._buffer)
        elif self._next != (request.version, index):
            raise WeightSyncError(
                f"bucket {index} of the {request.label} was asked for, but one before "
                "it failed. Sync the weights again."
            )
        self._next = (-1, 0)
        try:
            # The position stays unset on failure, so that no bucket can follow one that
            # failed.
            taken = self._taken(is_last)
        except BaseException:
            # Other ranks may wait for parts of this one, and would wait for them until
            # the deadline.
            _drain(self._buckets)
            raise
        if not is_last:
            self._next = (request.version, index + 1)
        if not taken:
            return None
        return [
            (header.to_json(), None if block is None else encode(block))
            for header, block in taken
        ]

    def _taken(self, is_last: bool) -> list[tuple[Header, torch.Tensor | None]]:
        """Take the next bucket; return its message, and after the last one the end."""
        taken: list[tuple[Header, torch.Tensor | None]] = []
        bucket = next(self._buckets, None)
        if self._packer is not None and bucket is not None:
            taken.append(self._packer.block(bucket))
        if not is_last:
            return taken
        # The driver counts calls by the tensors that the backend has named.
        if any(True for _ in self._buckets):
            raise WeightSyncError(
                "the training backend exports more tensors than its weight_specs name; "
                "both must name the same"
            )
        if self._packer is not None:
            taken.append(self._packer.end())
        return taken

    def _new_packer(
        self, request: WeightRequest, buffer: Callable[[int], torch.Tensor]
    ) -> BlockPacker | None:
        """Return what packs this rank's buckets; None if it sends none."""
        if self._rank not in request.senders:
            return None
        return BlockPacker(buffer, label=request.label, dtype=request.dtype)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        # Grows and never shrinks: buckets are of similar size, and fresh memory costs
        # page faults at every sync.
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def open(self, link: TensorLink | LinkSet, deadline_s: float) -> None:
        """Join a link, after leaving the previous one.

        Args:
            link: From rank 0, or a set with one from each rank that sends.
            deadline_s: Deadline of joining.
        """
        self.close()
        if isinstance(link, LinkSet):
            if self._rank in link.senders:
                self._end = link.sender(self._rank, deadline_s=deadline_s)
        elif self._rank == 0:
            self._end = link.sender(deadline_s=deadline_s)
        self._link = link

    def send(self, link: TensorLink | LinkSet, request: WeightRequest) -> str | None:
        """Send this rank's share over an open link; return the manifest's digest."""
        if self._link != link:
            raise WeightSyncError("the link of the weights was not opened here")
        buckets = self._export(request)
        try:
            # Without an end, this rank only takes part; `finally` exhausts the buckets.
            if self._end is None:
                return None
            packer = self._new_packer(request, self._end.buffer)
            manifest = send_messages(
                self._end,
                _messages(buckets, packer),
                label=request.label,
                deadline_s=request.deadline_s,
            )
        except BaseException:
            self.close()  # so that waiting receivers learn of it at once
            raise
        finally:
            _drain(buckets)
        return manifest.digest

    def close(self) -> None:
        """Leave the link."""
        end, self._end, self._link = self._end, None, None
        if end is not None:
            end.close()


def _messages(
    buckets: Iterator[Bucket | None], packer: BlockPacker | None
) -> Iterator[tuple[Header, torch.Tensor | None]]:
    if packer is None:
        raise WeightSyncError("this rank has joined a link, but sends nothing over it")
    for bucket in buckets:
        if bucket is not None:
            yield packer.block(bucket)
    yield packer.end()


def _drain(buckets: Iterator[Any]) -> None:
    """Exhaust the buckets, as the other ranks do, which need parts of this one."""
    for _ in buckets:
        pass
