"""What a generation policy does in a weight sync: its replicas load and confirm.

A replica that is lost meanwhile is left to `Replicas`, which brings it back; the others
serve the new version if they have confirmed it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import (
    DeadlineExceededError,
    DistributedError,
    WorkerDiedError,
    WorkerHungError,
)
from rl_distributed.transfer import TensorLink
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.errors import WeightSyncError
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.workers import ReplicaWorkers
from rl_models.types import GenerationOutputSpec, SamplingParams
from rl_models.weight_request import LoadReport, Pending, WeightRequest

__all__ = ["WeightUpdates", "but_losses", "raise_first"]

_PROBE_DEADLINE_S = 120.0
_LOOK_S = 1.0
_LOSSES = (WorkerDiedError, WorkerHungError)


class WeightUpdates:
    """The part of `GenerationPolicy` that `WeightSynchronizer` uses."""

    group: RayWorkerGroup
    workers: ReplicaWorkers
    replicas: Replicas
    _version: int
    _refusal: str
    """Why `generate` refuses; empty: it does not."""

    @property
    def node_ids(self) -> set[str]:
        """Nodes of Ray that the replicas run on."""
        return {seat.slot.node_id for seat in self.group.seats}

    @property
    def uses_gpus(self) -> bool:
        """Whether each replica has a GPU."""
        return bool(self.group.cluster.use_gpus)

    def live_processes(self) -> list[tuple[int, int]]:
        """Each worker of live replicas, and how many processes it has had before."""
        return [(rank, self.group.incarnation(rank)) for rank in self._live_workers()]

    def _live(self) -> list[int]:
        """Replicas that can load weights; where there is none, one is waited for."""
        return self.replicas.live or self.replicas.settle()

    def _live_workers(self) -> list[int]:
        """Workers of these replicas, by rank; each loads weights of its own."""
        return [
            rank for replica in self._live() for rank in self.workers.ranks(replica)
        ]

    def open_weight_link(self, link: TensorLink, deadline_s: float) -> Pending:
        """Has every live replica join a link for `start_weight_update`."""
        method = "open_weight_link"
        live = self._live_workers()
        places = {rank: {"index": index} for index, rank in enumerate(live)}
        calls = self._call(method, places, link=link, deadline_s=deadline_s)

        def finish(left_s: float) -> None:
            joined, failures = self._results(method, calls, left_s)
            raise_first(failures)
            if len(joined) < len(live):
                raise WeightSyncError("A replica was lost before it joined the link.")

        return Pending(finish)

    def start_weight_update(self, source: Any, request: WeightRequest) -> Pending:
        """Has every live replica load weights; see `GenerationInterface`."""
        method = "load_weights"
        calls = self._call(
            method,
            {rank: {} for rank in self._live_workers()},
            source=source,
            request=request,
        )

        def finish(left_s: float) -> None:
            try:
                reports, failures = self._results(method, calls, left_s)
                _check_reports(list(reports.values()), request.version)
                whole = self._whole(reports)
                raise_first(but_losses(failures) if whole else failures)
                if not whole:
                    raise WeightSyncError("All generation replicas were lost.")
            except BaseException as error:
                self._refusal = f"the last weight update failed: {error}"
                raise
            self.replicas.updated(whole)
            self._version = request.version
            self._refusal = ""

        return Pending(finish)

    def _whole(self, results: Mapping[int, Any]) -> list[int]:
        """Replicas all of whose workers have answered."""
        counts = Counter(map(self.workers.replica_of, results))
        return [replica for replica, n in counts.items() if n == self.workers.size]

    def refuse(self, reason: str) -> None:
        """Generate nothing until weights are updated without a failure."""
        self._refusal = reason

    def generate_on_each(
        self, rows: BatchedDataDict[Any], sampling: SamplingParams
    ) -> dict[int, BatchedDataDict[GenerationOutputSpec]]:
        """Get the same rows on every serving replica at the same time, by replica."""
        serving = self.replicas.serving
        ranks = [rank for replica in serving for rank in self.workers.ranks(replica)]
        calls = self._call(
            "generate", {rank: {} for rank in ranks}, data=rows, sampling=sampling
        )
        outputs, failures = self._results("generate", calls, _PROBE_DEADLINE_S)
        raise_first(but_losses(failures))
        firsts = {r: self.workers.ranks(r)[0] for r in self._whole(outputs)}
        return {replica: outputs[rank] for replica, rank in firsts.items()}

    def changed_weights(self, replica: int) -> list[str] | None:
        """Tensors that a replica holds otherwise than they were sent, by name.

        None: its backend cannot tell.
        """
        method = "changed_weights"
        calls = self._call(method, {rank: {} for rank in self.workers.ranks(replica)})
        found, _ = self._results(method, calls, _PROBE_DEADLINE_S)
        # Workers that hold one model put its tensors together, and find the same; or
        # the first asks the others.
        names: list[str] | None = found.get(self.workers.ranks(replica)[0])
        return names

    def _call(
        self, method: str, own: Mapping[int, Mapping[str, Any]], **common: Any
    ) -> dict[int, Any]:
        """Call workers, by rank; who is lost by now is left out with its replica."""
        calls: dict[int, Any] = {}
        for replica in dict.fromkeys(map(self.workers.replica_of, own)):
            ranks = self.workers.ranks(replica)
            try:
                call = self.workers.call(
                    method, replica, own=[own[rank] for rank in ranks], **common
                )
            except _LOSSES as error:
                self.replicas.lose(replica, error)
            else:
                calls.update(call.references)
        return calls

    def _results(
        self, method: str, calls: Mapping[int, Any], left_s: float
    ) -> tuple[dict[int, Any], list[DistributedError]]:
        """Results by worker, and why others have none; all are waited for."""
        until_s = time.monotonic() + left_s
        pending = dict(calls)
        results: dict[int, Any] = {}
        failures: list[DistributedError] = []
        while pending and time.monotonic() < until_s:
            slice_s = min(_LOOK_S, max(until_s - time.monotonic(), 0.0))
            ready, _ = ray.wait(
                list(pending.values()), num_returns=len(pending), timeout=slice_s
            )
            for rank in [rank for rank, call in pending.items() if call in ready]:
                call = pending.pop(rank)
                try:
                    results[rank] = ray.get(call)
                except ray.exceptions.RayError as error:
                    failures.append(self._failure(error, call, method, rank))
        if pending:
            failures.append(
                DeadlineExceededError(
                    f"generation replica {self._named(pending)} did not end "
                    f"{method!r} within {left_s:.3g} s"
                )
            )
        return results, failures

    def _named(self, ranks: Iterable[int]) -> str:
        return ", ".join(map(str, dict.fromkeys(map(self.workers.replica_of, ranks))))

    def _failure(
        self, error: BaseException, call: Any, method: str, rank: int
    ) -> DistributedError:
        what = f"method {method!r} of group {self.group.name!r}"
        found = self.group.supervisor.explain(error, what, [call], method)
        if isinstance(found, _LOSSES):
            self.replicas.lose(self.workers.replica_of(rank), found)
        return found


def but_losses(failures: list[DistributedError]) -> list[DistributedError]:
    """Leave out the losses of replicas, which `Replicas` takes care of."""
    return [error for error in failures if not isinstance(error, _LOSSES)]


def raise_first(failures: list[DistributedError]) -> None:
    """Raise the first failure, if there is any."""
    if failures:
        raise failures[0]


def _check_reports(reports: list[LoadReport], version: int) -> None:
    problems = [report.problem for report in reports if report.problem]
    if problems:
        raise WeightSyncError(" ".join(problems))
    for report in reports:
        if report.version != version or report.digest != reports[0].digest:
            raise WeightSyncError(
                f"generation replica {report.replica} confirmed version "
                f"{report.version} with manifest {report.digest}, but version "
                f"{version} with manifest {reports[0].digest} was sent."
            )
