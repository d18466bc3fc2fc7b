"""The place of a process in a replica of several processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReplicaRank"]


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """Place of a process among those of one replica; they get the same calls."""

    rank: int
    """0 is the one whose rows are the replica's."""
    size: int
    """Processes of the replica."""
    address: str
    """Address on which rank 0 listens when they connect."""
    port: int
    """A port of its own for each time that the replica is started."""

    @property
    def leads(self) -> bool:
        """Whether its rows are the replica's."""
        return self.rank == 0
