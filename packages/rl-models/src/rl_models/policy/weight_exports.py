"""The part of a training policy in a weight sync: export its weights."""

from __future__ import annotations

from typing import Any

from rl_distributed.transfer import LinkSet, TensorLink
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.policy.head_checks import check_lm_head
from rl_models.policy.training_ranks import TrainingRanks
from rl_models.policy.weight_versions import WeightVersions
from rl_models.weight_request import Pending, WeightKind, WeightRequest

__all__ = ["WeightExports"]

_PORT_DEADLINE_S = 30.0
_PLAN_DEADLINE_S = 120.0


class WeightExports:
    """Has the training workers export their weights.

    Args:
        ranks: The workers.
        versions: Versions of the weights.
    """

    def __init__(self, ranks: TrainingRanks, versions: WeightVersions) -> None:
        self._ranks = ranks
        self._versions = versions
        self._turns: dict[tuple[str, int, WeightKind], tuple[int, ...]] = {}

    def link_address(self) -> tuple[str, int]:
        """Return the address of rank 0, and a port that is free there."""
        # Asked of the worker, because only its machine knows which ports are free.
        group = self._ranks.group
        reference = group.run_single_worker_single_data("free_port", 0)
        (port,) = _pending(group, "free_port", [reference]).wait(_PORT_DEADLINE_S)
        return group.seats[0].slot.address, int(port)

    def open_link(self, link: TensorLink | LinkSet, deadline_s: float) -> Pending:
        """Have every rank join a link for `start`."""
        references = self._ranks.group.run_all_workers_single_data(
            "open_weight_link", link=link, deadline_s=deadline_s
        )
        return _pending(self._ranks.group, "open_weight_link", references)

    def start(
        self, request: WeightRequest, link: TensorLink | LinkSet | None = None
    ) -> Pending:
        """Have the weights sent over a link that was opened, or as messages.

        Returns:
            The calls; without a link, with a reference to the messages of each bucket.
            The weights stay in the object store: pass the references on, unopened.
        """
        check_lm_head(self._ranks.config, "start_weight_export")
        # Before the calls, because rows may be sampled as soon as a replica has loaded.
        self._versions.hand_out(request.version)
        if link is not None:
            references = self._ranks.group.run_all_workers_single_data(
                "send_weights", link=link, request=request
            )
            return _pending(self._ranks.group, "send_weights", references)
        count = len(request.turns or self.turns(request))
        # All calls at once: the ranks run them in order, while replicas load earlier
        # buckets.
        buckets = [
            self._ranks.group.run_all_workers_single_data(
                "export_weights", request=request, index=i, is_last=i == count - 1
            )
            for i in range(count)
        ]
        messages = _by_sender(buckets, request)
        # Waiting for the last bucket is enough, because it fails if an earlier one did.
        return _pending(self._ranks.group, "export_weights", buckets[-1], messages)

    def turns(self, request: WeightRequest) -> tuple[int, ...]:
        """Return for each bucket the rank that is to send it, so that all share in."""
        key = (request.precision, request.bucket_bytes, request.kind)
        # Kept, because the tensors of a model stay the same over a run.
        if key not in self._turns:
            references = self._ranks.group.run_all_workers_single_data(
                "weight_turns", request=request
            )
            calls = _pending(self._ranks.group, "weight_turns", references)
            self._turns[key] = tuple(calls.wait(_PLAN_DEADLINE_S)[0])
        return self._turns[key]


def _by_sender(buckets: list[list[Any]], request: WeightRequest) -> tuple[Any, ...]:
    """Return the references to messages of rank 0, or of each sender.

    Args:
        buckets: For each bucket the calls of all ranks.
        request: The update.
    """
    if not request.turns:
        return tuple(calls[0] for calls in buckets)
    found: dict[int, list[Any]] = {rank: [] for rank in request.senders}
    for calls, sender in zip(buckets, request.turns, strict=True):
        found[sender].append(calls[sender])
    for rank in request.senders:
        # The last call ends the messages of every sender.
        if rank != request.turns[-1]:
            found[rank].append(buckets[-1][rank])
    return tuple(map(tuple, found.values()))


def _pending(
    group: RayWorkerGroup,
    method: str,
    references: list[Any],
    messages: tuple[Any, ...] = (),
) -> Pending:
    future = MultiWorkerFuture(list(references), method_name=method)
    return Pending(
        lambda left_s: group.get_all_worker_results(future, deadline_s=left_s), messages
    )
