"""`WeightVersions`: which weights each generator has confirmed.

```
publish ─> LoadWeights ─> (the generator loads) ─> WeightsLoaded = confirm ─> Sample
```
A version exists from the end of its step on, as a copy that the trainer does not
change. A generator samples only with the newest version, and only once it has said that
it has loaded it; a generator that was started again has confirmed nothing.
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
    """The newest version, and what each generator has of it.

    Args:
        updates: When a generator may take new weights.
    """

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates
        self._served: dict[Worker, _Served] = {}
        self.newest: int | None = None
        """None while the trainer has no weights to give."""
        self.trainer = -1
        """Incarnation of the trainer whose versions these are."""

    def publish(self, trainer: int, version: int) -> None:
        """Make a version the newest one.

        A trainer that was started again goes back in versions; what generators have of
        the one before it is worth nothing then.

        Args:
            trainer: Incarnation of the trainer.
            version: The version.

        Raises:
            ScheduleError: The same trainer had this version or a later one before.
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
        """Have no weights, and take none of those that generators have for good."""
        self._served.clear()
        self.newest = None

    def forget(self, generator: Worker) -> None:
        """Forget what a generator had: its process is gone."""
        self._served.pop(generator, None)

    def due(self, generator: Worker, num_answers: int) -> int | None:
        """Return the version that a generator is to load now; None: it need not.

        Args:
            generator: A generator that is ready.
            num_answers: Answers that it is sampling.
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
        """Note that a generator is loading a version."""
        self._of(generator).loading = version

    def confirm(self, generator: Worker, trainer: int, version: int) -> bool:
        """Note that a generator has loaded a version; return whether it was waited for.

        Args:
            generator: The generator.
            trainer: Incarnation of the trainer whose weights it has loaded.
            version: The version.
        """
        served = self._of(generator)
        if trainer != self.trainer or served.loading != version:
            return False
        served.confirmed, served.loading = version, None
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
        """Return whether an answer can have these versions.

        Args:
            generator: The generator that sampled it.
            oldest: Version of its oldest token.
            newest: Version of its newest token.
            sent: Version that the generator had when the answer was asked for.
        """
        served = self._of(generator)
        # Weights arrive before the message that confirms them.
        last = served.confirmed if served.loading is None else served.loading
        if last is None or not sent <= oldest <= newest <= last:
            return False
        return self._updates == "between_tokens" or oldest == newest

    def _of(self, generator: Worker) -> _Served:
        return self._served.setdefault(generator, _Served())
