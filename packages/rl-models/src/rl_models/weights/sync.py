"""Bringing a trainer's weights to its generators, verified.

```
driver:  sync_weights() -- export_weights --> trainer ranks     (gather, pack, digest)
         reference  <------------------------ rank 0
         reference + version ---------------> every replica     (fetch, check, load)
         all confirm? <---------------------- version, manifest digest
```
The weights go from the trainer's process through Ray's object store to the replicas;
the driver handles the reference alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from rl_distributed.errors import ConfigError
from rl_distributed.timing import Timer
from rl_models.interfaces import GenerationInterface

__all__ = ["WeightSource", "WeightSynchronizer"]


class WeightSource(Protocol):
    """A policy that can hand out its weights, such as `TrainingPolicy`."""

    def export_weights(self) -> Any:
        """A reference to a `WeightBundle` with all weights."""
        ...


class WeightSynchronizer:
    """Keeps a generator's weights those of a trainer, by version.

    Args:
        policy: Where weights come from.
        generation: Where they go.
    """

    def __init__(self, policy: WeightSource, generation: GenerationInterface) -> None:
        self.policy = policy
        self.generation = generation
        self._is_stale = True

    @property
    def is_stale(self) -> bool:
        """Whether the trainer may have other weights than the generator.

        True at the start, after `mark_stale`, and after a sync that failed.
        """
        return self._is_stale

    def mark_stale(self) -> None:
        """Say that the trainer's weights have changed."""
        self._is_stale = True

    def sync_weights(
        self, timer: Timer | None = None, *, version: int | None = None
    ) -> int:
        """Send the trainer's present weights to every replica.

        Args:
            timer: Receives the span `weight_sync`.
            version: What these weights are called; None counts on by one. A resumed
                run passes the number of optimizer steps behind it.

        Returns:
            The version that every replica has confirmed.

        Raises:
            ConfigError: The version is not newer than the one that is served.
            WeightSyncError: A replica refused; its old weights are not served either,
                until a sync succeeds.
        """
        served = self.generation.weight_version
        new = served + 1 if version is None else version
        if new <= served and version is not None and served > 0:
            raise ConfigError(
                f"sync_weights needs a version above the one that is served: got {new} "
                f"with version {served}; versions tell which weights sampled a row."
            )
        self._is_stale = True
        with _span(timer, "weight_sync"):
            reference = self.policy.export_weights()
            self.generation.update_weights([reference], new)
        self._is_stale = False
        return new


def _span(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    return nullcontext() if timer is None else timer.time(label)
