"""`NodeRoom`: finds nodes for the workers of a group that are to be started.

A worker has a *place* if Ray has its bundle on a node that can be reached. After the
loss of a node Ray moves its bundles to nodes with room, or keeps asking for one, which
Ray's autoscaler sees.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rl_distributed.cluster.watch import raise_if_lost
from rl_distributed.errors import WorkerDiedError
from rl_distributed.workers.incidents import IncidentLog
from rl_distributed.workers.node_watch import reached

if TYPE_CHECKING:
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_distributed.workers.launch import WorkerLauncher
    from rl_distributed.workers.policy import FailurePolicy

__all__ = ["NodeRoom", "bundles_with_node"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


def bundles_with_node(cluster: RayVirtualCluster) -> list[tuple[int, int]]:
    """Return each (placement group, bundle) on a node that can be reached now.

    They are in the order of ranks. A node that was just lost, which Ray does not know
    yet, does not answer.
    """
    found = cluster.find_bundles()
    nodes: Collection[str] = {slot.node_id for slot in found.values() if slot.node_id}
    up = reached(nodes)
    return [bundle for bundle, slot in found.items() if slot.node_id in up]


class NodeRoom:
    """Knows which workers of a group have a place, and waits for one.

    Args:
        group: name of the group, for messages.
        policy: what to do where there is no place.
        launcher: knows the bundles, and moves seats to where they are now.
        log: the failures of the group.
    """

    def __init__(
        self,
        group: str,
        policy: FailurePolicy,
        launcher: WorkerLauncher,
        log: IncidentLog,
    ) -> None:
        self._group = group
        self._policy = policy
        self._launcher = launcher
        self._log = log

    def lacking(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that have no place now, in order."""
        waiting = set(self._launcher.find_seats(ranks))
        seats = self._launcher.seats
        nodes = {rank: seats[rank].slot.node_id for rank in set(ranks) - waiting}
        # Ray takes half a minute to give up a lost node: until then, a start there
        # would wait for it.
        up = reached(set(nodes.values()))
        waiting |= {rank for rank, node_id in nodes.items() if node_id not in up}
        return sorted(waiting)

    @property
    def can_shrink(self) -> bool:
        """Whether the group goes on now without the workers that are gone."""
        policy = self._policy
        num_up = len(self._launcher.seats) - len(self._log.failed)
        return policy.on_node_lost == "shrink" and num_up >= policy.min_workers

    def wait(self, ranks: Sequence[int]) -> None:
        """Wait until each of these ranks has a place, or the group is shut down.

        Raises:
            WorkerDiedError: none came in the time that the policy gives.
        """
        since = time.monotonic()
        was_told = False
        while not self._log.is_closed and (lacking := self.lacking(ranks)):
            raise_if_lost(at_once=True)
            if not was_told:
                was_told = True
                logger.warning(
                    "group %r: no node has room for worker(s) %s now; %s",
                    *(self._group, lacking, self._prospect()),
                )
            if self.can_shrink:
                # Time counts only while too few are left to go on with.
                since = time.monotonic()
            elif time.monotonic() - since >= self._limit_s:
                raise self._no_room(lacking)
            self._log.stop.wait(_LOOK_S)

    @property
    def _limit_s(self) -> float:
        is_short = self._policy.on_node_lost == "fail"
        return 0.0 if is_short else self._policy.resources_deadline_s

    def _prospect(self) -> str:
        if self.can_shrink:
            return "the others go on until one has"
        return f"waiting up to {self._limit_s:g} s"

    def _no_room(self, lacking: Sequence[int]) -> WorkerDiedError:
        policy = self._policy
        failure = self._log.failed.get(lacking[0])
        why = "" if failure is None else f"; {failure.label}: {failure.cause}"
        rule = f"within {policy.resources_deadline_s:g} s (resources_deadline_s)"
        if policy.on_node_lost == "fail":
            rule = "now, and on_node_lost is 'fail'"
        elif policy.on_node_lost == "shrink":
            rule += f" while fewer than {policy.min_workers} were up (min_workers)"
        error = WorkerDiedError(
            f"group {self._group!r} cannot start worker(s) {list(lacking)} again: no "
            f"node had room for them {rule}; add a node, then call again{why}"
        )
        error.failure = failure
        return error
