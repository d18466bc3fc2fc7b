"""`PublishedVersions`: copies of the weights after each step, until they are loaded."""

from __future__ import annotations

from rl_models.weights.sync import PublishedWeights, WeightSynchronizer

__all__ = ["PublishedVersions"]


class PublishedVersions:
    """Keeps what a generator may be asked to load; the schedule counts by steps.

    `publish` is for the thread of the trainer, `load` for that of the generator. At
    most those between what is served and the newest are kept.

    Args:
        sync: Publishes and loads.
        version: The version that the generator serves.
    """

    def __init__(self, sync: WeightSynchronizer, version: int) -> None:
        self._sync = sync
        self._number = sync.generation.weight_version
        self._kept: dict[int, PublishedWeights | None] = {version: None}
        self._brought: PublishedWeights | None = None
        self.newest = version
        """The newest version that there is."""

    def publish(self, number: int) -> None:
        """Keep a copy of the trainer's weights as the next version.

        Args:
            number: What the weights are called: optimizer steps so far. A step that has
                trained nothing has the weights of the one before.
        """
        published = self._kept[self.newest]
        if number != self._number:
            published = self._sync.publish(number)
            self._number = number
        self._kept[self.newest + 1] = published
        self.newest += 1

    def load(self, version: int) -> int:
        """Bring a version to the generator; return what it calls it."""
        published = self._kept[version]
        if published is not None and published is not self._brought:
            self._sync.load(published)
            self._brought = published
        for old in [known for known in list(self._kept) if known < version]:
            del self._kept[old]
        return self._sync.generation.weight_version
