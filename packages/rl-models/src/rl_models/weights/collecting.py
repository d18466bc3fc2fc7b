"""Collecting the weights of a sync from the ranks that share them.

```
boxes of all ranks --once--> buckets of tensors --> a sender for each bucket
for each bucket:  ranks that hold a part --part--> its sender --> packed and sent
```
A tensor is put together on the rank that sends it and on no other, from the parts of
the ranks next to it. A part that the sender holds itself, or another rank holds too,
does not travel. All ranks go through the buckets in the same order, and post what later
senders wait for before they pack a bucket of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from rl_distributed.transfer.messages import tensor_buckets
from rl_models.checkpoint.sharded import Box
from rl_models.errors import WeightSyncError
from rl_models.weight_request import WeightKind, WeightRequest
from rl_models.weights.rounding import rounded

__all__ = ["Bucket", "RankPlace", "ShardedExport", "ShardedWeights", "WeightCollector"]

Bucket: TypeAlias = "list[tuple[str, Tensor]]"
"""Tensors that travel together."""

_NUM_TAGS = 1 << 20


def _only(parts: Sequence[Tensor]) -> Tensor:
    (part,) = parts
    return part


class RankPlace(Protocol):
    """A rank among all, such as `training.process_group.Ranks`."""

    @property
    def rank(self) -> int:
        """Its number."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it exchanges tensors."""
        ...


@dataclass(frozen=True)
class ShardedWeights:
    """The tensors of a sync, and the parts of them that this rank holds."""

    specs: Mapping[str, Tensor]
    """The whole tensors as they are sent, without data; in one order on all ranks."""
    boxes: Mapping[str, Box]
    """Which part of each parameter this rank holds; without those it has none of."""
    part: Callable[[str], Tensor]
    """Returns this rank's part of a parameter."""
    rounded_to: torch.dtype | None = None
    """Data type that floating-point tensors are rounded to before they are cast for the
    generator; None: they are not."""
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that a tensor is made of; a tensor that is not named is one."""
    combine: Callable[[Sequence[Tensor]], Tensor] = _only
    """Makes a tensor of its whole parameters."""

    def sources_of(self, name: str) -> tuple[str, ...]:
        """Return the parameters that a tensor is made of."""
        return self.sources.get(name, (name,))


class ShardedExport(Protocol):
    """Optional part of a `TrainingBackend`: parts of the weights, for a sync.

    Without it, every rank gathers each tensor and rank 0 sends it.
    """

    def sharded_weights(self, precision: str, kind: WeightKind) -> ShardedWeights:
        """Return what this rank holds of the tensors of a sync.

        They are those of `export_weights`, or for another kind than `merged` those of
        `export_adapters`. Parts are read until the next method is called.
        """
        ...


@dataclass(frozen=True)
class _Plan:
    """What the ranks hold, and which tensors travel together."""

    holders: Mapping[str, Mapping[int, Box]]
    """By parameter the ranks that hold some of it, and which part."""
    buckets: tuple[tuple[str, ...], ...]
    turns: tuple[int, ...]
    """A sender for each bucket, so that all ranks send about as many bytes."""


class WeightCollector:
    """Puts the tensors of a sync together on the ranks that send them.

    Args:
        ranks: This rank among all.
        weights: Returns what this rank holds, for a request; called alike on all ranks.
    """

    def __init__(
        self, ranks: RankPlace, weights: Callable[[WeightRequest], ShardedWeights]
    ) -> None:
        self._ranks = ranks
        self._weights = weights
        self._plans: dict[tuple[str, int, str], _Plan] = {}
        self._count = 0

    def turns(self, request: WeightRequest) -> tuple[int, ...]:
        """Return a sender for each bucket; collective on all ranks."""
        return self._plan(request, self._weights(request)).turns

    def buckets(self, request: WeightRequest) -> Iterator[Bucket | None]:
        """Yield each bucket that this rank sends, and None for each of another rank.

        Collective: every rank must go on to the end.

        Args:
            request: The update; without `turns`, rank 0 sends all buckets.

        Raises:
            WeightSyncError: Another rank is gone, or too slow.
        """
        weights = self._weights(request)
        plan = self._plan(request, weights)
        self._count += 1
        # What a sync that broke off has left must not be taken for this one's.
        tag = 1 + self._count % _NUM_TAGS
        run = _Collection(self._ranks, weights, plan, request, tag)
        yield from run.buckets()

    def _plan(self, request: WeightRequest, weights: ShardedWeights) -> _Plan:
        key = (request.precision, request.bucket_bytes, request.kind)
        # Kept, because what the ranks hold stays the same over a run.
        if key not in self._plans:
            self._plans[key] = _planned(self._ranks, weights, request)
        return self._plans[key]


def _planned(
    ranks: RankPlace, weights: ShardedWeights, request: WeightRequest
) -> _Plan:
    boxes: list[Any] = [weights.boxes]
    if ranks.world_size > 1:
        boxes = [None] * ranks.world_size
        dist.all_gather_object(boxes, dict(weights.boxes))
    holders: dict[str, dict[int, Box]] = {}
    for rank, held in enumerate(boxes):
        for name, box in held.items():
            if box.numel:
                holders.setdefault(name, {})[rank] = box
    able: dict[str, frozenset[int]] = {}
    for name in weights.specs:
        for source in weights.sources_of(name):
            _check_whole(source, holders.get(source, {}))
        with_each = (set(holders[source]) for source in weights.sources_of(name))
        # A sender has some of what it sends, at least of the first parameter.
        able[name] = frozenset.intersection(*map(frozenset, with_each)) or frozenset(
            holders[weights.sources_of(name)[0]]
        )
    buckets = tuple(
        tuple(name for name, _ in bucket)
        for names in _with_common_holder(able)
        for bucket in tensor_buckets(
            [(name, weights.specs[name]) for name in names],
            request.bucket_bytes,
            request.dtype,
        )
    )
    return _Plan(holders, buckets, _turns(weights, buckets, able, ranks.world_size))


def _check_whole(name: str, held: Mapping[int, Box]) -> None:
    """Refuse parameters whose parts do not make up the whole, each number once."""
    parts = set(held.values())
    shapes = {box.global_shape for box in parts}
    total = sum(box.numel for box in parts)
    if len(shapes) != 1 or total != torch.Size(next(iter(shapes))).numel():
        raise WeightSyncError(
            f"the ranks hold {total} numbers of {name}, whose shape is "
            f"{' or '.join(map(str, sorted(shapes))) or 'unknown'}: their parts must "
            "make it up, each number once. Report this layout."
        )


def _with_common_holder(able: Mapping[str, frozenset[int]]) -> Iterator[list[str]]:
    """Yield runs of tensors that one rank has a part of each of."""
    run: list[str] = []
    common: frozenset[int] = frozenset()
    for name, ranks in able.items():
        if run and not common & ranks:
            yield run
            run = []
        common = common & ranks if run else ranks
        run.append(name)
    if run:
        yield run


def _turns(
    weights: ShardedWeights,
    buckets: Sequence[Sequence[str]],
    able: Mapping[str, frozenset[int]],
    world_size: int,
) -> tuple[int, ...]:
    """Give each bucket to the rank with the fewest bytes, of those that can send it."""
    sizes = [0] * world_size
    turns = []
    for names in buckets:
        ranks = frozenset.intersection(*(able[name] for name in names))
        sender = min(ranks, key=lambda rank: (sizes[rank], rank))
        sizes[sender] += sum(weights.specs[name].nbytes for name in names)
        turns.append(sender)
    return tuple(turns)


class _Collection:
    """One pass over the buckets of a plan."""

    def __init__(
        self,
        ranks: RankPlace,
        weights: ShardedWeights,
        plan: _Plan,
        request: WeightRequest,
        tag: int,
    ) -> None:
        self._ranks = ranks
        self._weights = weights
        self._plan = plan
        self._request = request
        self._tag = tag
        self._until_s = time.monotonic() + request.deadline_s
        self._turns = request.turns or (0,) * len(plan.buckets)
        # NCCL runs the exchanges of two ranks in the order in which each posts them, so
        # that one posted ahead would wait for one of the other direction.
        on_cpu = ranks.device.type == "cpu"
        self._num_ahead = len(set(self._turns)) - 1 if on_cpu else 0
        self._sends: deque[tuple[int, list[Any], list[Tensor]]] = deque()

    def buckets(self) -> Iterator[Bucket | None]:
        """See `WeightCollector.buckets`."""
        posted, count = 0, len(self._turns)
        for number, sender in enumerate(self._turns):
            ahead = min(number + self._num_ahead + 1, count)
            for later in range(posted, ahead):
                self._post(later)
            posted = ahead
            # Not those of this bucket: its sender may still be packing another one.
            self._finish_sends(number - self._num_ahead)
            yield self._collected(number) if sender == self._ranks.rank else None
        self._finish_sends(count)

    def _post(self, number: int) -> None:
        """Start to send this rank's parts of a bucket to its sender."""
        sender = self._turns[number]
        if sender == self._ranks.rank:
            return
        # Cast and copied only where needed: rows of a parameter are sent from it.
        parts = [
            self._own_part(source)
            .to(self._ranks.device, self._dtype_of(name))
            .contiguous()
            for name in self._plan.buckets[number]
            for source in self._weights.sources_of(name)
            for rank, _ in self._pieces(source, sender)
            if rank == self._ranks.rank
        ]
        works = self._start([(dist.isend, part, sender) for part in parts])
        if works:
            self._sends.append((number, works, parts))

    def _finish_sends(self, before: int) -> None:
        """Wait for the parts of the buckets before a number to be received."""
        while self._sends and self._sends[0][0] < before:
            number, works, _ = self._sends.popleft()
            self._wait(works, number)

    @torch.no_grad()
    def _collected(self, number: int) -> Bucket:
        """Return the tensors of a bucket, whole."""
        receipts: list[_Receipt] = []
        wholes = [
            (name, [self._whole(source, name, receipts) for source in sources])
            for name in self._plan.buckets[number]
            for sources in [self._weights.sources_of(name)]
        ]
        self._wait(
            self._start([(dist.irecv, r.memory, r.rank) for r in receipts]), number
        )
        for receipt in receipts:
            if receipt.memory is not receipt.place:
                receipt.place.copy_(receipt.memory)
        return [(name, self._made(parts)) for name, parts in wholes]

    def _whole(self, source: str, name: str, receipts: list[_Receipt]) -> Tensor:
        """Return a parameter, whose missing parts are added to `receipts`."""
        pieces = self._pieces(source, self._ranks.rank)
        if [rank for rank, _ in pieces] == [self._ranks.rank]:
            return self._own_part(source)
        shape = pieces[0][1].global_shape
        dtype, device = self._dtype_of(name), self._ranks.device
        whole = torch.empty(shape, dtype=dtype, device=device)
        for rank, box in pieces:
            place = whole[box.slices]
            if rank == self._ranks.rank:
                place.copy_(self._own_part(source))
                continue
            # Columns are no run of bytes in the whole tensor.
            memory = (
                place
                if place.is_contiguous()
                else torch.empty_like(place, memory_format=torch.contiguous_format)
            )
            receipts.append(_Receipt(rank, memory, place))
        return whole

    def _made(self, parts: list[Tensor]) -> Tensor:
        return rounded(self._weights.combine(parts), self._weights.rounded_to)

    def _own_part(self, source: str) -> Tensor:
        return self._weights.part(source).detach()

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the data type in which parts of a tensor travel between ranks."""
        spec = self._weights.specs[name]
        # Casting commutes with putting parts together, not with combining parameters.
        is_combined = len(self._weights.sources_of(name)) > 1
        if is_combined or not spec.is_floating_point():
            return spec.dtype
        return self._weights.rounded_to or self._request.dtype

    def _pieces(self, source: str, sender: int) -> list[tuple[int, Box]]:
        """Return what a sender puts a parameter together from, and whose parts."""
        by_box: dict[Box, list[int]] = {}
        for rank, box in self._plan.holders[source].items():
            by_box.setdefault(box, []).append(rank)
        # The next rank of those with the same part is most likely on the same node.
        return [
            (min(ranks, key=lambda rank: (abs(rank - sender), rank)), box)
            for box, ranks in by_box.items()
        ]

    def _start(self, exchanges: list[tuple[Any, Tensor, int]]) -> list[Any]:
        if not exchanges:
            return []
        works: list[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(op, memory, rank, tag=self._tag)
                for op, memory, rank in exchanges
            ]
        )
        return works

    def _wait(self, works: list[Any], number: int) -> None:
        try:
            for work in works:
                left_s = max(self._until_s - time.monotonic(), 0.001)
                work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            first = self._plan.buckets[number][0]
            reason = str(error).strip().splitlines()[0]
            raise WeightSyncError(
                f"rank {self._ranks.rank} did not exchange its part of {first} and of "
                f"the tensors after it with rank {self._turns[number]}, which sends "
                f"them: a rank is gone or too slow ({reason})"
            ) from error


@dataclass(frozen=True)
class _Receipt:
    rank: int
    memory: Tensor
    place: Tensor
    """Where it belongs in the whole tensor."""
