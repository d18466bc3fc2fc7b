"""Simulated workers: what actually happens in them, whatever the schedule believes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rl_algorithms.asynchronous.workers import Worker

__all__ = ["Process", "Rows", "Weights"]

Weights = tuple[int, int]
"""Incarnation of the trainer, and version."""


@dataclass(slots=True)
class Rows:
    """The output of a sampling task, as the driver would keep it."""

    prompt: int
    sample: int
    oldest: Weights
    newest: Weights
    is_scored: bool = False


@dataclass(slots=True)
class Process:
    """A process in the role of a worker for some time."""

    worker: Worker
    incarnation: int
    is_silent: bool = False
    """It is dead or hangs: it does nothing any more."""
    weights: Weights | None = None
    """The actual weights of a generator, or of the trainer."""
    loads: list[Weights] = field(default_factory=list)
    """The weights that a generator is loading."""
    loads_until_s: float = 0.0
    """When it will have loaded all of them, one after the other."""
    slowness: float = 1.0
    slow_left: int = 0
    """Pieces of work that are still slow."""
    twice: int = 0
    late: int = 0
    old: int = 0
    raises: int = 0
    lies: bool = False
    """It confirms weights that it has not loaded; its answers show the actual ones."""
    has_failed: bool = False
    """Whether the schedule was told that it has failed."""

    def delay(self, rng: random.Random, low_s: float, mean_s: float) -> float:
        """Return how long a piece of work takes.

        Args:
            rng: Source of randomness.
            low_s: Minimum.
            mean_s: Mean of the excess; occasionally ten times as much.
        """
        factor = 1.0
        if self.slow_left:
            self.slow_left -= 1
            factor = self.slowness
        tail = 10.0 if rng.random() < 0.04 else 1.0
        return factor * (low_s + tail * mean_s * rng.random() * 2.0)

    @property
    def is_faultless(self) -> bool:
        """Whether nothing is wrong with it."""
        return not (self.is_silent or self.lies)

    def use(self, name: str) -> bool:
        """Return whether a fault of this name is left, and consume it."""
        left = getattr(self, name)
        if left:
            setattr(self, name, left - 1)
        return bool(left)
