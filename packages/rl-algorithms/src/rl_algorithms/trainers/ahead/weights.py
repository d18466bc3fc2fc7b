"""`PublishedVersions`: copies of the weights after each step until they are loaded."""

from __future__ import annotations

from rl_models.weights.sync import PublishedWeights, WeightSynchronizer

__all__ = ["PublishedVersions"]


class PublishedVersions:
    """Holds the weights that a generator may have to load, by the schedule's versions.

    `publish` is called in the trainer's thread, `load` in the generator's. Only
    versions between the served one and the newest are kept.

    Args:
        sync: Publishes and loads the weights.
        version: Version that the generator serves.
    """

    def __init__(self, sync: WeightSynchronizer, version: int) -> None:
        self._sync = sync
        self._number = sync.generation.weight_version
        self._kept: dict[int, PublishedWeights | None] = {version: None}
        self._brought: PublishedWeights | None = None
        self.newest = version
        """Newest published version."""

    def publish(self, number: int) -> None:
        """Publish a copy of the trainer's weights as the next version.

        Args:
            number: Weight version of the trainer: its number of optimizer steps. A step
                without training keeps the number, and the weights, of the one before.
        """
        published = self._kept[self.newest]
        if number != self._number:
            published = self._sync.publish(number)
            self._number = number
        self._kept[self.newest + 1] = published
        self.newest += 1

    def load(self, version: int) -> int:
        """Load a version into the generator; return the generator's number of it."""
        published = self._kept[version]
        # Versions of steps that trained nothing share their copy, which is loaded once.
        if published is not None and published is not self._brought:
            self._sync.load(published)
            self._brought = published
        # Older versions will not be asked for again; a copy has the size of the model.
        # The list is taken at once, because the trainer may publish meanwhile.
        for old in [known for known in list(self._kept) if known < version]:
            del self._kept[old]
        return self._sync.generation.weight_version
