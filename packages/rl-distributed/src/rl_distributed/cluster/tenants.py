"""Worker groups that share the bundles of a cluster, up to a limit."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rl_distributed.errors import ResourceInsufficientError

__all__ = ["Tenants"]


class Tenants:
    """Records which worker groups have a worker on each bundle.

    Args:
        cluster: name of the cluster, for messages.
        most: how many groups may share a bundle.
    """

    def __init__(self, cluster: str, most: int) -> None:
        self._cluster, self._most = cluster, most
        self._groups: dict[tuple[int, int], list[str]] = {}
        # Reentrant, because the garbage collector may remove a group, and with it the
        # group's claims, in a thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def num_free(self) -> int:
        """Number of further groups that every bundle has room for."""
        with self._lock:
            fullest = max(map(len, self._groups.values()), default=0)
        return self._most - fullest

    def add(self, group: str, bundles: Iterable[tuple[int, int]]) -> None:
        """Record that a group has a worker on each (placement group, bundle).

        Raises:
            ResourceInsufficientError: a bundle is full.
        """
        wanted = list(bundles)
        with self._lock:
            # Check all before recording any, so that a refused group leaves no claims.
            for bundle in wanted:
                present = self._groups.get(bundle, [])
                if len(present) >= self._most:
                    raise ResourceInsufficientError(
                        f"group {group!r} finds no room on bundle {bundle} of cluster "
                        f"{self._cluster!r}: max_colocated_worker_groups is "
                        f"{self._most} and {present} are there; "
                        "shut one down or raise the number"
                    )
            for bundle in wanted:
                self._groups.setdefault(bundle, []).append(group)

    def remove(self, group: str, bundles: Iterable[tuple[int, int]]) -> None:
        """Remove what `add` recorded; unknown entries are ignored."""
        with self._lock:
            for bundle in bundles:
                present = self._groups.get(bundle, [])
                # `clear` drops all claims, and groups return theirs later.
                if group in present:
                    present.remove(group)

    def clear(self) -> None:
        """Remove all groups."""
        with self._lock:
            self._groups.clear()
