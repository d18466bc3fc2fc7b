"""`PublishedVersions`: copies of the weights after each step until they are loaded."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rl_models.errors import WeightSyncError
from rl_models.weights.sync import PublishedWeights, WeightSynchronizer

__all__ = ["LoadedVersion", "PublishedVersions", "WithdrawnWeightsError"]


class WithdrawnWeightsError(WeightSyncError):
    """The trainer that published these weights is lost, and another one goes on."""


class LoadedVersion(NamedTuple):
    """Weights that the generator has loaded."""

    trainer: int
    """Incarnation of the trainer that published them."""
    version: int


class _Kept(NamedTuple):
    number: int
    """Weight version of the trainer: its number of optimizer steps."""
    published: PublishedWeights | None
    """None for the weights that the generator began with."""


class PublishedVersions:
    """Holds the weights that a generator may have to load, by the schedule's versions.

    `number_of` and `load` are called in the generator's thread, everything else in the
    trainer's. Only versions between the served one and the newest are kept.

    Args:
        sync: Publishes and loads the weights.
        version: Version that the generator serves.
    """

    def __init__(self, sync: WeightSynchronizer, version: int) -> None:
        self._sync = sync
        self._number = sync.generation.weight_version
        self._lock = threading.Lock()
        self._kept = {version: _Kept(self._number, None)}
        self._brought: PublishedWeights | None = None
        self._trainer = 0
        self.newest = version
        """Newest published version."""
        self.loaded = LoadedVersion(0, version)
        """Weights that the generator loaded last."""

    def publish(self, number: int) -> None:
        """Publish a copy of the trainer's weights as the next version.

        Args:
            number: Weight version of the trainer: its number of optimizer steps. A step
                without training keeps the number, and the weights, of the one before.
        """
        kept = self._kept[self.newest]
        if number != self._number:
            kept = _Kept(number, self._sync.publish(number))
            self._number = number
        with self._lock:
            self._kept[self.newest + 1] = kept
            self.newest += 1

    def withdraw(self) -> None:
        """Withdraw all versions: the trainer that published them is lost."""
        with self._lock:
            # A new dictionary, by which a load in progress sees that it came too late.
            self._kept = {}

    def start_over(self, trainer: int, version: int, number: int) -> None:
        """Publish the weights of a trainer that was started again.

        Args:
            trainer: Its incarnation.
            version: Version of its weights: the number of its steps.
            number: Its number of optimizer steps.
        """
        published = self._sync.publish(number)
        with self._lock:
            self._kept = {version: _Kept(number, published)}
            self._trainer, self._number, self.newest = trainer, number, version

    def number_of(self, version: int) -> int:
        """Return the generator's number of a version.

        Raises:
            WithdrawnWeightsError: The version was withdrawn.
        """
        with self._lock:
            return self._get(version).number

    def load(self, version: int) -> int:
        """Load a version into the generator; return the generator's number of it.

        Raises:
            WithdrawnWeightsError: The version was withdrawn.
            WeightSyncError: It could not be loaded.
        """
        with self._lock:
            kept, trainer = self._kept, self._trainer
            published = self._get(version).published
        # Versions of steps that trained nothing share their copy, which is loaded once.
        if published is not None and published is not self._brought:
            self._brought = None
            try:
                self._sync.load(published)
            except WeightSyncError as error:
                if kept is not self._kept:
                    raise WithdrawnWeightsError(
                        f"weights {version} were withdrawn as they were loaded"
                    ) from error
                raise
            self._brought = published
        with self._lock:
            # Older versions will not be asked for again; a copy has the size of the
            # model. The list is taken at once, as the loop removes from the dictionary.
            for old in [known for known in kept if known < version]:
                del kept[old]
        self.loaded = LoadedVersion(trainer, version)
        return self._sync.generation.weight_version

    def _get(self, version: int) -> _Kept:
        if version not in self._kept:
            raise WithdrawnWeightsError(f"weights {version} were withdrawn")
        return self._kept[version]
