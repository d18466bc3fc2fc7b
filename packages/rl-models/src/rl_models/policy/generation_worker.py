"""The process of one generator: a plain class that hosts a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError
from rl_models.errors import WeightSyncError
from rl_models.registry import get_generation_backend
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams
from rl_models.weights.manifest import WeightBundle

__all__ = ["GenerationWorker", "LoadReport"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica says about weights that it was given."""

    replica: int
    version: int | None
    """The version that it serves now; None if it refused."""
    digest: str
    """Digest of the manifest that it saw."""
    problem: str = ""
    """Why it refused."""


class GenerationWorker:
    """Hosts the generation backend that the config names; runs without Ray as well.

    Args:
        config: `GenerationConfig.to_dict()`.
        context: Keyword arguments of the backend's `setup`.
        replica: Number of this replica; None: what `setup` is called with.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        context: Mapping[str, Any],
        replica: int | None = None,
    ) -> None:
        self._config = config
        self._context = dict(context)
        self._replica = replica
        self._backend: Any = None

    def setup(
        self,
        replica: int = 0,
        config: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> int:
        """Load the model; gives back the id that its rows are filled with.

        Args:
            replica: Number of this replica.
            config: Takes the place of the one given at construction, with `context`:
                the worker begins anew with another model in the same process.
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
        self._backend = get_generation_backend(str(self._config["backend"]))()
        self._backend.setup(self._config, replica=self._replica, **self._context)
        return int(getattr(self._backend, "pad_token_id", 0))

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        first_row: int = 0,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Continue this replica's rows, which begin at `first_row` of the batch."""
        try:
            output: BatchedDataDict[GenerationOutputSpec] = self._backend.generate(
                data, greedy=greedy, sampling=sampling
            )
        except BatchError as error:
            if first_row:
                error.add_note(f"(counted from row {first_row} of the whole batch)")
            raise
        return output

    def load_weights(self, bundle: WeightBundle, version: int) -> LoadReport:
        """Load verified weights; a refusal is reported, not raised."""
        replica = int(self._replica or 0)
        try:
            served = int(self._backend.load_weights(bundle, version))
        except WeightSyncError as error:
            return LoadReport(replica, None, bundle.digest, str(error))
        return LoadReport(replica, served, bundle.digest)

    def release_memory(self) -> None:
        """Let the backend free what only generation needs, if it can."""
        release = getattr(self._backend, "release_memory", None)
        if release is not None:
            release()

    def shutdown(self) -> None:
        """Free the engine."""
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None
