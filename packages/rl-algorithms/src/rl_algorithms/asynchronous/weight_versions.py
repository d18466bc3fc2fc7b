"""`WeightVersions`: the weight version that each generator has confirmed.

```
publish ─> LoadWeights ─> (the generator loads) ─> WeightsLoaded = confirm ─> Sample
```
A version exists from the end of its step on, as a copy that the trainer does not
change. A generator samples only with the newest version, and only after confirming that
it has loaded it; a restarted generator has confirmed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_algorithms.asynchronous.settings import WeightUpdates
from rl_algorithms.asynchronous.workers import Worker
from rl_algorithms.errors import ScheduleError

__all__ = ["WeightVersions"]


@dataclass(slots=True)
class _Served:
    confirmed: int | None = None
    loading: int | None = None


class WeightVersions:
    """The newest version, and the versions that generators load and have confirmed.

    Args:
        updates: Point at which a generator may take new weights.
    """

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates
        self._served: dict[Worker, _Served] = {}
        self._former: dict[Worker, int | None] = {}
        """Last withdrawn version of each generator that has no other yet."""
        self.newest: int | None = None
        """Newest published version; None while the trainer has no weights to offer."""
        self.trainer = -1
        """Incarnation of the trainer that published these versions."""

    def publish(self, trainer: int, version: int) -> None:
        """Make a version the newest one.

        A restarted trainer goes back in versions; the weights that generators hold from
        its predecessor are then worthless, even under the same number.

        Args:
            trainer: Incarnation of the trainer.
            version: The version.

        Raises:
            ScheduleError: The trainer already published this version or a later one.
        """
        if trainer != self.trainer:
            self.withdraw()
        elif self.newest is not None and version <= self.newest:
            raise ScheduleError(
                f"weight versions of one trainer must rise: got {version} after "
                f"{self.newest}"
            )
        self.trainer, self.newest = trainer, version

    def withdraw(self) -> None:
        """Withdraw all versions, and distrust the weights that generators hold.

        Answers in flight may go on with them, and are explained by them.
        """
        for generator in list(self._served):
            self._former[generator] = self.last_of(generator)
        self._served.clear()
        self.newest = None

    def forget(self, generator: Worker) -> None:
        """Forget a generator's version, because its process is gone."""
        self._served.pop(generator, None)
        self._former.pop(generator, None)

    def last_of(self, generator: Worker) -> int | None:
        """Return the newest version that a generator may sample with; None if none."""
        served = self._of(generator)
        # Weights arrive before the message that confirms them, so an answer may be
        # sampled with a version that still counts as loading.
        last = served.confirmed if served.loading is None else served.loading
        return self._former.get(generator) if last is None else last

    def due(self, generator: Worker, num_answers: int) -> int | None:
        """Return the version that a generator has to load now, or None.

        Args:
            generator: A generator that is ready.
            num_answers: Number of answers that it is sampling.
        """
        served = self._of(generator)
        if self.newest is None or served.loading is not None:
            return None
        if served.confirmed == self.newest:
            return None
        if self._updates == "between_answers" and num_answers:
            return None
        return self.newest

    def send(self, generator: Worker, version: int) -> None:
        """Record that a generator is loading a version."""
        self._of(generator).loading = version

    def confirm(self, generator: Worker, trainer: int, version: int) -> bool:
        """Record that a generator has loaded a version; return whether it was expected.

        Args:
            generator: The generator.
            trainer: Incarnation of the trainer whose weights it has loaded.
            version: The version.
        """
        served = self._of(generator)
        # A late confirmation of withdrawn weights says nothing about the current ones.
        if trainer != self.trainer or served.loading != version:
            return False
        served.confirmed, served.loading = version, None
        self._former.pop(generator, None)
        return True

    def may_sample(self, generator: Worker) -> bool:
        """Return whether a generator may begin an answer."""
        served = self._of(generator)
        return (
            served.loading is None
            and served.confirmed is not None
            and served.confirmed == self.newest
        )

    def explains(self, generator: Worker, oldest: int, newest: int, sent: int) -> bool:
        """Return whether an answer can carry these versions.

        Args:
            generator: The generator that sampled it.
            oldest: Version of its oldest token.
            newest: Version of its newest token.
            sent: Version that the generator held when the answer was requested.
        """
        last = self.last_of(generator)
        if last is None or not sent <= oldest <= newest <= last:
            return False
        return self._updates == "between_tokens" or oldest == newest

    def _of(self, generator: Worker) -> _Served:
        # Not `setdefault`, which would make a new one at each call.
        served = self._served.get(generator)
        if served is None:
            served = self._served[generator] = _Served()
        return served
