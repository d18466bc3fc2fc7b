"""What a training policy does in a weight sync: it hands its weights out."""

from __future__ import annotations

from typing import Any

from rl_distributed.transfer import TensorLink
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.config import PolicyConfig
from rl_models.policy.head_checks import check_lm_head
from rl_models.weight_request import Pending, WeightRequest

__all__ = ["WeightExports"]

_PORT_DEADLINE_S = 30.0
_PLAN_DEADLINE_S = 120.0


class WeightExports:
    """The part of `TrainingPolicy` that `WeightSynchronizer` uses."""

    config: PolicyConfig
    group: RayWorkerGroup
    _bucket_counts: dict[tuple[str, int], int]
    _weight_version: int
    _exported: dict[int, int]

    @property
    def node_ids(self) -> set[str]:
        """Nodes of Ray that the workers run on."""
        return {seat.slot.node_id for seat in self.group.seats}

    @property
    def uses_gpus(self) -> bool:
        """Whether each worker has a GPU."""
        return bool(self.group.cluster.use_gpus)

    def weight_link_address(self) -> tuple[str, int]:
        """Address of rank 0, and a port that is free there."""
        reference = self.group.run_single_worker_single_data("free_port", 0)
        (port,) = _pending(self.group, "free_port", [reference]).wait(_PORT_DEADLINE_S)
        return self.group.seats[0].slot.address, int(port)

    def open_weight_link(self, link: TensorLink, deadline_s: float) -> Pending:
        """Has every rank join a link for `start_weight_export`."""
        references = self.group.run_all_workers_single_data(
            "open_weight_link", link=link, deadline_s=deadline_s
        )
        return _pending(self.group, "open_weight_link", references)

    def start_weight_export(
        self, request: WeightRequest, link: TensorLink | None = None
    ) -> Pending:
        """Has the weights sent over a link that was opened, or as messages.

        Returns:
            The calls; without a link, with a reference to the messages of each bucket.
            The weights stay in the object store: pass the references on, unopened.
        """
        check_lm_head(self.config, "start_weight_export")
        self._exported[request.version] = self._weight_version
        if link is not None:
            references = self.group.run_all_workers_single_data(
                "send_weights", link=link, request=request
            )
            return _pending(self.group, "send_weights", references)
        count = self._num_weight_buckets(request)
        buckets = [
            self.group.run_all_workers_single_data(
                "export_weights", request=request, index=i, is_last=i == count - 1
            )
            for i in range(count)
        ]
        messages = tuple(bucket[0] for bucket in buckets)
        # A bucket that fails makes the last one fail as well.
        return _pending(self.group, "export_weights", buckets[-1], messages)

    def _num_weight_buckets(self, request: WeightRequest) -> int:
        key = (request.precision, request.bucket_bytes)
        if key not in self._bucket_counts:
            references = self.group.run_all_workers_single_data(
                "num_weight_buckets", request=request
            )
            calls = _pending(self.group, "num_weight_buckets", references)
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
