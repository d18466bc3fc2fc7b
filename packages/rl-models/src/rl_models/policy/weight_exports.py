"""The part of a training policy in a weight sync: export its weights."""

from __future__ import annotations

from typing import Any

from rl_distributed.transfer import TensorLink
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
        self._bucket_counts: dict[tuple[str, int, WeightKind], int] = {}

    def link_address(self) -> tuple[str, int]:
        """Return the address of rank 0, and a port that is free there."""
        # Asked of the worker, because only its machine knows which ports are free.
        group = self._ranks.group
        reference = group.run_single_worker_single_data("free_port", 0)
        (port,) = _pending(group, "free_port", [reference]).wait(_PORT_DEADLINE_S)
        return group.seats[0].slot.address, int(port)

    def open_link(self, link: TensorLink, deadline_s: float) -> Pending:
        """Have every rank join a link for `start`."""
        references = self._ranks.group.run_all_workers_single_data(
            "open_weight_link", link=link, deadline_s=deadline_s
        )
        return _pending(self._ranks.group, "open_weight_link", references)

    def start(self, request: WeightRequest, link: TensorLink | None = None) -> Pending:
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
        count = self._num_weight_buckets(request)
        # All calls at once: the ranks run them in order, while replicas load earlier
        # buckets.
        buckets = [
            self._ranks.group.run_all_workers_single_data(
                "export_weights", request=request, index=i, is_last=i == count - 1
            )
            for i in range(count)
        ]
        messages = tuple(bucket[0] for bucket in buckets)
        # Waiting for the last bucket is enough, because it fails if an earlier one did.
        return _pending(self._ranks.group, "export_weights", buckets[-1], messages)

    def _num_weight_buckets(self, request: WeightRequest) -> int:
        key = (request.precision, request.bucket_bytes, request.kind)
        # Kept, because the tensors of a model stay the same over a run.
        if key not in self._bucket_counts:
            references = self._ranks.group.run_all_workers_single_data(
                "num_weight_buckets", request=request
            )
            calls = _pending(self._ranks.group, "num_weight_buckets", references)
            self._bucket_counts[key] = int(calls.wait(_PLAN_DEADLINE_S)[0])
        return self._bucket_counts[key]


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
