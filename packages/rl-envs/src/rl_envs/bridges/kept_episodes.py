"""Episodes that are a function of what they are made of and the actions so far.

```
actions so far --kept episode?--yes--> take the next action
                              --no---> make it, repeat all of them
```
An episode is kept only for speed: a call that is repeated, or that another process
gets, makes it again and finds the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

__all__ = ["KeptEpisodes", "Repeatable"]


class Repeatable(Protocol):
    """An episode of another project."""

    def repeat(self, action: str) -> None:
        """Take an action that was taken before."""

    def close(self) -> None:
        """Release it."""


SpecT = TypeVar("SpecT", bound=Hashable)
EpisodeT = TypeVar("EpisodeT", bound=Repeatable)


class KeptEpisodes(Generic[SpecT, EpisodeT]):
    """Episodes by their actions so far, at most a number of them.

    Args:
        make: Starts an episode.
        most: Number of episodes that are kept.
    """

    def __init__(self, make: Callable[[SpecT], EpisodeT], most: int) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[tuple[SpecT, tuple[str, ...]], EpisodeT] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, spec: SpecT, actions: Sequence[str]) -> EpisodeT:
        """Return the episode after these actions, which is the caller's from now on."""
        kept = self.take_kept(spec, actions)
        if kept is not None:
            return kept
        # Outside the lock, as making an episode may take long.
        episode = self._make(spec)
        for action in actions:
            episode.repeat(action)
        return episode

    def take_kept(self, spec: SpecT, actions: Sequence[str]) -> EpisodeT | None:
        """Return the episode after these actions, if it is kept."""
        with self._lock:
            # Taken out, not shared: an action changes the episode, and another call may
            # want the same one.
            return self._kept.pop((spec, tuple(actions)), None)

    def keep(self, spec: SpecT, actions: Sequence[str], episode: EpisodeT) -> None:
        """Keep an episode for the next call."""
        key = (spec, tuple(actions))
        with self._lock:
            # Two calls may have made the same episode; the older copy is released.
            surplus = [self._kept.pop(key)] if key in self._kept else []
            self._kept[key] = episode
            while len(self._kept) > self._most:
                surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            each.close()

    def drop(self, spec: SpecT, actions: Sequence[str]) -> None:
        """Release the episode after these actions, if it is kept."""
        kept = self.take_kept(spec, actions)
        if kept is not None:
            kept.close()

    def release_oldest(self) -> bool:
        """Release the episode that was kept first; return whether there was one."""
        with self._lock:
            oldest = self._kept.popitem(last=False)[1] if self._kept else None
        if oldest is not None:
            oldest.close()
        return oldest is not None

    def close(self) -> None:
        """Release all of them; it may be called again."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), OrderedDict()
        for episode in kept:
            episode.close()
