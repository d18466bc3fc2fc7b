"""The process of a replica with a vLLM engine; its module chooses its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.logging import get_logger
from rl_distributed.transfer import TensorLink
from rl_models.generation.vllm.process_watch import ProcessWatch
from rl_models.policy.generation_worker import GenerationWorker
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams
from rl_models.weights.request import LoadReport, WeightRequest

__all__ = ["VllmGenerationWorker"]

_logger = get_logger(__name__)

_EXIT_CODE = 70


class VllmGenerationWorker(GenerationWorker):
    """A `GenerationWorker` that ends with its engine, so that both are replaced.

    An engine with processes of its own (`AsyncLLM`) is lost when one of these is;
    whoever waits for this worker learns of its end at once.
    """

    _watch: ProcessWatch | None = None

    def setup(
        self,
        replica: int = 0,
        config: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> int:
        """See `GenerationWorker.setup`."""
        pad_token_id = super().setup(replica, config, context)
        processes = self._backend.engine.processes()
        if processes:
            self._watch = ProcessWatch(processes, _end_with_engine)
        return pad_token_id

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        first_row: int = 0,
    ) -> BatchedDataDict[GenerationOutputSpec] | int:
        """See `GenerationWorker.generate`."""
        try:
            return super().generate(data, greedy, sampling, first_row)
        except Exception:
            self._check_engine()
            raise

    def load_weights(
        self, source: TensorLink | Sequence[Any], request: WeightRequest
    ) -> LoadReport:
        """See `GenerationWorker.load_weights`."""
        report = super().load_weights(source, request)
        if report.problem:
            self._check_engine()
        return report

    def _check_engine(self) -> None:
        """Nobody should take for a failed call what is a lost engine."""
        if self._watch is not None:
            self._watch.check()

    def shutdown(self) -> None:
        """See `GenerationWorker.shutdown`."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        super().shutdown()


def _end_with_engine(problem: str) -> None:
    _logger.critical("%s, and so this one ends", problem)
    os._exit(_EXIT_CODE)
