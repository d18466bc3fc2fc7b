"""The process of one generator: a plain class that hosts a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_distributed.errors import BatchError, DistributedError
from rl_distributed.logs.logging import get_logger
from rl_distributed.registrations import Registration
from rl_distributed.transfer import LinkSet, TensorLink
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.four_methods import build_generation_backend
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.row_checks import rows_digest
from rl_models.interfaces import (
    GenerationMemory,
    HeldWeights,
    PaddedRows,
    lacking,
)
from rl_models.registry import adopt_generation_backends
from rl_models.types import (
    GENERATION_INPUT,
    GENERATION_OUTPUT,
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)
from rl_models.weight_request import LoadReport, WeightRequest
from rl_models.weights.receiving import WeightReceiver, failure_text

__all__ = ["GenerationWorker"]

_logger = get_logger(__name__)


class GenerationWorker:
    """Hosts the generation backend that the config names; runs without Ray as well.

    Args:
        config: `GenerationConfig.to_dict()`.
        context: Keyword arguments of the backend's `setup`.
        replica: Number of this replica; None: what `setup` is called with.
        registrations: Backends that the driver has registered in code.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        context: Mapping[str, Any],
        replica: int | None = None,
        registrations: Sequence[Registration] = (),
    ) -> None:
        adopt_generation_backends(registrations)
        self._config = config
        self._context = dict(context)
        self._replica = replica
        self._backend: Any = None
        self._receiver = WeightReceiver("")
        self._refusal = ""
        self._place: ReplicaRank | None = None

    def setup(
        self,
        replica: int = 0,
        config: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> int:
        """Load the model; return the id that pads its rows.

        Args:
            replica: Number of this replica.
            config: Replaces the one given at construction, together with `context`: the
                worker starts over with another model in the same process.
            context: Keyword arguments of the backend's `setup`.
        """
        if config is not None:
            self.shutdown()
            self._config, self._context = config, dict(context or {})
        if self._replica is None:
            self._replica = replica
        threads = self._config.get("num_threads")
        if threads is not None:
            torch.set_num_threads(threads)
        self._backend = build_generation_backend(str(self._config["backend"]))
        self._backend.setup(self._config, replica=self._replica, **self._context)
        self._place = self._context.get("place")
        rank = "" if self._place is None else f", rank {self._place.rank}"
        self._receiver = WeightReceiver(f"generation replica {self._replica}{rank}")
        self._refusal = ""
        if lacking(self._backend, PaddedRows):
            return 0
        return int(self._backend.pad_token_id)

    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        first_row: int = 0,
    ) -> GenerationOutput | int | None:
        """Continue this replica's rows, which begin at `first_row` of the batch.

        Of several workers that hold its model, only the first returns the rows; the
        others return their digest, or None if they follow the first.
        """
        # Checked here too: the driver refuses as well, but others may call.
        if self._refusal:
            raise GenerationError(
                f"generation replica {self._replica} does not serve, because its last "
                f"weight update failed: {self._refusal} Sync the weights again."
            )
        GENERATION_INPUT.check(data)
        try:
            output: GenerationOutput = self._backend.generate(
                data, greedy=greedy, sampling=sampling
            )
        except BatchError as error:
            if first_row:
                error.add_note(f"(counted from row {first_row} of the whole batch)")
            raise
        is_first = self._place is None or self._place.leads
        if is_first:
            GENERATION_OUTPUT.check(output)
        return output if is_first else rows_digest(output)

    def open_weight_link(
        self, link: TensorLink | LinkSet, index: int, deadline_s: float
    ) -> None:
        """Join the link that `load_weights` uses from now on."""
        self._receiver.open(link, index, deadline_s)

    def load_weights(
        self, source: TensorLink | LinkSet | Sequence[Any], request: WeightRequest
    ) -> LoadReport:
        """Load verified weights; a refusal is reported, not raised.

        After one, `generate` raises until a version is loaded without an error.
        """
        replica = int(self._replica or 0)
        try:
            self._check_kind(request)
            weights = self._receiver.weights(source, request)
            served = int(self._backend.load_weights(iter(weights), request.version))
            manifest = weights.manifest()
            self._receiver.accept(manifest, request.kind)
        except Exception as error:
            # Any error: the weights may be neither the old nor the new ones.
            self._refusal = failure_text(error)
            self._receiver.close()  # so that a waiting sender learns of it at once
            if not isinstance(error, DistributedError):
                _logger.exception("loading %s failed", request.label)
            return LoadReport(replica, None, problem=self._refusal)
        self._refusal = ""
        return LoadReport(replica, served, manifest.digest)

    def _check_kind(self, request: WeightRequest) -> None:
        """Refuse weights that the backend was not set up for."""
        # Merged weights, loaded as a base, would get the adapter a second time.
        takes_adapter = self._context.get("adapter") is not None
        if takes_adapter != (request.kind != "merged"):
            wanted = "adapters by themselves" if takes_adapter else "all weights"
            raise WeightSyncError(
                f"generation replica {self._replica} was started to take {wanted}: got "
                f"weights of kind {request.kind!r}. Start the generator with "
                "adapter=policy.config.sent_adapter."
            )

    def changed_weights(self) -> list[str] | None:
        """Return the names of tensors that differ from what was sent.

        Returns:
            Their names; None if the backend cannot read weights back.
        """
        manifest = self._receiver.manifest
        if manifest is None or lacking(self._backend, HeldWeights):
            return None
        names: list[str] | None = self._backend.changed_weights(manifest)
        return names

    def release_memory(self) -> None:
        """Let the backend free what only generation needs, if it can."""
        if not lacking(self._backend, GenerationMemory):
            self._backend.release_memory()

    def shutdown(self) -> None:
        """Free the engine."""
        if self._backend is not None:
            self._receiver.close()
            self._backend.shutdown()
            self._backend = None
