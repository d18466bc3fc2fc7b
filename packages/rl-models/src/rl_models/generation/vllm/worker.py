"""The worker of a replica with a vLLM engine; its module selects its environment."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rl_distributed.process.activity import has_busy_thread
from rl_distributed.transfer import LinkSet, TensorLink
from rl_models.environments import has_gpu
from rl_models.generation.vllm.process_watch import ProcessWatch, end_process
from rl_models.generation.vllm.stall_watch import StallWatch
from rl_models.generation.worker import GenerationWorker
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)
from rl_models.weight_request import LoadReport, WeightRequest

__all__ = ["VllmGenerationWorker"]

# No step of a CPU may count as a hang before this, however short the steps so far.
_STALL_CPU_S = 6.0
# A GPU's kernels may be compiled for a new shape during a run.
_STALL_GPU_S = 60.0


class VllmGenerationWorker(GenerationWorker):
    """A `GenerationWorker` that ends with its engine, so that both are replaced.

    An engine with processes of its own (`AsyncLLM`) is lost when one of them is, and
    any engine when it stalls. Ending the worker lets its callers know at once.
    """

    _watch: ProcessWatch | None = None
    _stall_watch: StallWatch | None = None

    def setup(
        self,
        replica: int = 0,
        config: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> int:
        """See `GenerationWorker.setup`."""
        pad_token_id = super().setup(replica, config, context)
        engine = self._backend.engine
        processes = engine.processes()
        if processes:
            self._watch = ProcessWatch(processes, end_process)
        watched = processes or [os.getpid()]
        settings = self._backend.config
        on_gpu = has_gpu()
        self._stall_watch = StallWatch(
            engine.progress,
            partial(_end_stalled, processes),
            limit_s=settings.vllm.stall_limit_s,
            warm_up_s=settings.start_deadline_s,
            least_s=_STALL_GPU_S if on_gpu else _STALL_CPU_S,
            # A process that waits for a GPU spins, so its threads look busy in a hang
            # too.
            is_busy=lambda: not on_gpu and any(map(has_busy_thread, watched)),
        )
        self._stall_watch.start()
        return pad_token_id

    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        first_row: int = 0,
    ) -> GenerationOutput | int | None:
        """See `GenerationWorker.generate`; None on ranks that only follow."""
        if self._backend.engine.follows:
            return None
        try:
            return super().generate(data, greedy, sampling, first_row)
        except Exception:
            # A lost engine fails calls before the watch notices. Ending the process
            # here has the rows sampled elsewhere instead of raising at the caller.
            self._check_engine()
            raise

    def load_weights(
        self, source: TensorLink | LinkSet | Sequence[Any], request: WeightRequest
    ) -> LoadReport:
        """See `GenerationWorker.load_weights`."""
        # Even if no weights arrive: the ranks of a replica must count alike.
        self._backend.engine.begin_update()
        report = super().load_weights(source, request)
        if report.problem:
            self._check_engine()
        return report

    def _check_engine(self) -> None:
        """End the process if its engine is lost, so that the call is not to blame."""
        if self._watch is not None:
            self._watch.check()

    def shutdown(self) -> None:
        """See `GenerationWorker.shutdown`."""
        watches = (self._watch, self._stall_watch)
        self._watch = self._stall_watch = None
        # Before the engine ends, which they would report as a loss.
        for watch in watches:
            if watch is not None:
                watch.close()
        super().shutdown()


def _end_stalled(processes: Sequence[int], problem: str) -> None:
    for number in processes:
        # A hung process would not notice that its parent is gone.
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    end_process(problem)
