"""The part of a generation policy in a weight sync: replicas load and confirm.

A replica that is lost meanwhile is left to `Replicas`, which restarts it; the others
serve the new version once they have confirmed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_distributed.transfer import LinkSet, TensorLink
from rl_models.errors import WeightSyncError
from rl_models.replicas.broadcast import Broadcast, but_losses, raise_first
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)
from rl_models.weight_request import (
    ConfirmedWeights,
    LoadReport,
    Pending,
    WeightRequest,
)

__all__ = ["ServedWeights", "WeightUpdates"]

_PROBE_DEADLINE_S = 120.0


@dataclass
class ServedWeights:
    """State of the weights that a generator's replicas serve."""

    version: int = 0
    """0 is the checkpoint's."""
    refusal: str = ""
    """Why nothing is generated; empty if nothing is wrong."""
    confirmed: ConfirmedWeights | None = None
    """The last update; None before the first one."""
    num_setups: int = 0
    """Number of times that all replicas were started, or given another model."""


class WeightUpdates:
    """Updates the weights of replicas, and compares what they hold.

    Args:
        replicas: The replicas.
        served: The state of serving; kept up to date.
    """

    def __init__(self, replicas: Broadcast, served: ServedWeights) -> None:
        self._replicas = replicas
        self._served = served

    def live_processes(self) -> list[tuple[int, int, int]]:
        """Return each worker of live replicas, its incarnation, and the setups so far.

        A worker that loads another model in the same process leaves its link and
        forgets its base, as a new process would.
        """
        incarnation = self._replicas.workers.group.incarnation
        setups = self._served.num_setups
        return [(rank, incarnation(rank), setups) for rank in self._replicas.live_ranks]

    def open_link(self, link: TensorLink | LinkSet, deadline_s: float) -> Pending:
        """Have every live replica join a link for `start`."""
        method = "open_weight_link"
        live = self._replicas.live_ranks
        places = {rank: {"index": index} for index, rank in enumerate(live)}
        calls = self._replicas.call(method, places, link=link, deadline_s=deadline_s)

        def finish(left_s: float) -> None:
            joined, failures = self._replicas.results(method, calls, left_s)
            raise_first(failures)
            if len(joined) < len(live):
                raise WeightSyncError("A replica was lost before it joined the link.")

        return Pending(finish)

    def start(self, source: Any, request: WeightRequest) -> Pending:
        """Have every live replica load weights; see `GenerationInterface`."""
        method = "load_weights"
        calls = self._replicas.call(
            method,
            {rank: {} for rank in self._replicas.live_ranks},
            source=source,
            request=request,
        )

        def finish(left_s: float) -> None:
            try:
                reports, failures = self._replicas.results(method, calls, left_s)
                _check_reports(reports, request.version)
                whole = self._replicas.whole(reports)
                raise_first(but_losses(failures) if whole else failures)
                if not whole:
                    raise WeightSyncError("All generation replicas were lost.")
            except BaseException as error:
                # Some replicas may have loaded the new weights and others not.
                self._served.refusal = f"the last weight update failed: {error}"
                raise
            self._replicas.replicas.updated(whole)
            self._served.version = request.version
            digest = next(iter(reports.values())).digest
            self._served.confirmed = ConfirmedWeights(
                request.version, digest, len(reports)
            )
            self._served.refusal = ""

        return Pending(finish)

    def generate_on_each(
        self, rows: GenerationInput, sampling: SamplingParams
    ) -> dict[int, GenerationOutput]:
        """Sample the same rows on all serving replicas; return them by replica."""
        workers = self._replicas.workers
        serving = self._replicas.replicas.serving
        ranks = [rank for replica in serving for rank in workers.ranks(replica)]
        calls = self._replicas.call(
            "generate", {rank: {} for rank in ranks}, data=rows, sampling=sampling
        )
        outputs, failures = self._replicas.results("generate", calls, _PROBE_DEADLINE_S)
        raise_first(but_losses(failures))
        firsts = {r: workers.ranks(r)[0] for r in self._replicas.whole(outputs)}
        return {replica: outputs[rank] for replica, rank in firsts.items()}

    def changed_weights(self, replica: int) -> list[str] | None:
        """Return the names of tensors that differ from what a replica was sent.

        None if its backend cannot read weights back.
        """
        method = "changed_weights"
        ranks = self._replicas.workers.ranks(replica)
        calls = self._replicas.call(method, {rank: {} for rank in ranks})
        found, _ = self._replicas.results(method, calls, _PROBE_DEADLINE_S)
        # Workers that hold one model gather its tensors and find the same, or the first
        # one asks the others.
        names: list[str] | None = found.get(ranks[0])
        return names


def _check_reports(reports: Mapping[int, LoadReport], version: int) -> None:
    """Refuse an update that some worker did not confirm as it was sent."""
    # Digests are compared too: with equal numbers, two workers of a replica could
    # still have loaded different weights.
    told = list(reports.values())
    problems = [report.problem for report in told if report.problem]
    if problems:
        raise WeightSyncError(" ".join(problems))
    for report in told:
        if report.version != version or report.digest != told[0].digest:
            raise WeightSyncError(
                f"generation replica {report.replica} confirmed version "
                f"{report.version} with manifest {report.digest}, but version "
                f"{version} with manifest {told[0].digest} was sent."
            )
