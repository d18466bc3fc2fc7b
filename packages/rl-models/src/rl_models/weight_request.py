"""The request of one weight sync to trainer and replicas, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = [
    "ConfirmedWeights",
    "LoadReport",
    "Pending",
    "WeightKind",
    "WeightRequest",
]

WeightKind = Literal["merged", "apart", "adapter"]
"""`merged`: all weights, an adapter added to them; `apart`: those of the base, and the
adapter; `adapter`: it alone, for replicas that have the base."""


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """One version of the weights that is to be sent and loaded."""

    version: int
    """Number of the weights."""
    precision: str = "float32"
    """Data type that floating-point tensors have on the way: the generator's."""
    bucket_bytes: int = 16 << 20
    """Tensors travel together up to this size."""
    deadline_s: float = 600.0
    """Deadline of the transfer, on each side."""
    kind: WeightKind = "merged"
    """The kind of tensors that are sent."""
    turns: tuple[int, ...] = ()
    """Rank that sends each bucket; empty: rank 0 sends all of them."""

    @property
    def senders(self) -> tuple[int, ...]:
        """Ranks that send something, in order."""
        return tuple(sorted(set(self.turns))) or (0,)

    @property
    def label(self) -> str:
        """Name of the manifest."""
        return f"weights of version {self.version}"

    @property
    def dtype(self) -> torch.dtype:
        """The data type itself."""
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a replica on the weights that it received."""

    replica: int
    version: int | None
    """The version that it serves now; None if it refused."""
    digest: str = ""
    """Digest of the manifest of what it received."""
    problem: str = ""
    """Why it refused."""


@dataclass(frozen=True, slots=True)
class ConfirmedWeights:
    """A version that every process of a generator has confirmed."""

    version: int
    digest: str
    """Digest of the manifest: of names, shapes, dtypes and values of the tensors."""
    num_processes: int
    """Number of processes that found this digest in what they had received."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Calls of workers that have begun."""

    wait: Callable[[float], Any]
    """Waits the given seconds for their end; raises what a worker raised."""
    messages: tuple[Any, ...] = ()
    """References to what they hand out on the way, which are passed on unopened; of
    several senders, a tuple of them for each."""
