"""The process of a replica with a vLLM engine; its module chooses its environment."""

from __future__ import annotations

import os

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.logging import get_logger
from rl_models.generation.vllm.engines import EngineLostError
from rl_models.policy.generation_worker import GenerationWorker
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams

__all__ = ["VllmGenerationWorker"]

_logger = get_logger(__name__)

_EXIT_CODE = 70


class VllmGenerationWorker(GenerationWorker):
    """A `GenerationWorker` that ends with its engine, so that both are replaced."""

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
        except EngineLostError:
            _logger.exception("the process of the engine is gone, and so ends this one")
            os._exit(_EXIT_CODE)
