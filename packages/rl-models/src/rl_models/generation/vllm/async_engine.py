"""`AsyncLLM` inside a worker; of a tensor-parallel replica it is in that of rank 0."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.adapter import adapter_request
from rl_models.generation.vllm.engine import Tensors, joined, num_tokens
from rl_models.generation.vllm.process_watch import parent_variables
from rl_models.generation.vllm.requests import RowRequest
from rl_models.generation.vllm.shared_weights_file import WeightFile
from rl_models.generation.vllm.stall_watch import EngineProgress

__all__ = ["AsyncEngine", "EngineLostError"]

Result = TypeVar("Result")

_STOP_S = 10.0
# Other ranks finish within milliseconds of this one, and rows wait for it.
_LOOK_S = 0.005


class EngineLostError(GenerationError):
    """The engine's own process is gone; only a new one can go on."""


class AsyncEngine:
    """`AsyncLLM` in an event loop of its own; callers are threads.

    Args:
        arguments: Of vLLM's `AsyncEngineArgs`.
        place: Which of the processes of a replica this is: the first.
        update_deadline_s: How long the others may take to have the weights as well.
    """

    follows = False

    def __init__(
        self,
        arguments: dict[str, Any],
        place: ReplicaRank | None = None,
        update_deadline_s: float = 600.0,
    ) -> None:
        self.progress = EngineProgress()
        self._place = place
        self._update_deadline_s = update_deadline_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-loop", daemon=True
        )
        self._thread.start()
        self._numbers = itertools.count()
        # Two updates at a time would pause and resume each other's.
        self._updates = threading.Lock()
        self._num_updates = 0
        self._adapter = adapter_request(arguments)
        self._llm: Any = self._run(self._build(arguments))

    async def _build(self, arguments: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        # The engine's process is no copy of this one: it reads variables.
        os.environ.update(parent_variables())
        if self._place is not None:
            os.environ.update(_place_variables(self._place))
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        # What vLLM calls the weights that it has read is its own affair; tokens shall
        # carry a number of ours.
        await engine.update_weight_version("0")
        processor = engine.output_processor
        processor.process_outputs = _counted(processor.process_outputs, self.progress)
        return engine

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def context_length(self) -> int:
        """Tokens of a row at most, input and output together."""
        return int(self._llm.model_config.max_model_len)

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """`RequestOutput` of each request, in order; other threads may do the same."""
        with self.progress.sampling(num_tokens(requests)):
            return self._run(self._sample(requests))

    async def _sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        # All at once: the engine makes its batches of whatever waits.
        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except EngineDeadError as error:
            raise EngineLostError(f"The process of vLLM's engine ended: {error}") from (
                error
            )
        finally:
            # Of one call a row has failed: the others would go on for nobody.
            for task in tasks:
                task.cancel()

    async def _one(self, request: RowRequest) -> Any:
        last = None
        async for output in self._llm.generate(
            {"prompt_token_ids": request.token_ids},
            request.params,
            request_id=f"row-{next(self._numbers)}",
            lora_request=self._adapter,
        ):
            last = output
        if last is None:
            raise GenerationError("vLLM ended a row without a word about it")
        return last

    def begin_update(self) -> None:
        """Weights are about to come; all ranks count the same updates."""
        self._num_updates += 1

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights between two tokens; rows in flight go on with the new.

        They are recomputed from their tokens, so nothing of the old weights is left
        in the cache. The stream is taken to its end, and so is verified, before
        anything is touched; by all ranks of a replica.
        """
        with self._updates, ExitStack() as stack:
            try:
                # To its end first: a stream that is damaged at its end must not have
                # changed half of the model.
                file = stack.enter_context(WeightFile(tensors))
            except Exception as error:
                self._run(self._drop(f"Rank 0 of the replica has no weights: {error}"))
                raise
            self._run(self._meet())
            with self.progress.paused():
                self._run(self._load(file, version))

    async def _meet(self) -> None:
        """Wait until all ranks have the weights of this update.

        Raises:
            WeightSyncError: One of them has not. None loads them then.
        """
        if self._place is None:
            return
        end_s = time.monotonic() + self._update_deadline_s
        while True:
            found = await self._call("rl_staged", self._num_updates)
            problems = [problem for problem in found if problem]
            if None in found and time.monotonic() > end_s:
                problems.append(
                    f"Rank {found.index(None)} of the replica did not have all weights "
                    f"{self._update_deadline_s:g} s after rank 0 "
                    "(weight_sync.deadline_s)."
                )
            if problems:
                await self._drop(" ".join(problems))
                raise WeightSyncError(" ".join(problems))
            if None not in found:
                return
            await asyncio.sleep(_LOOK_S)

    async def _drop(self, problem: str) -> None:
        """Have no other rank wait for this update any more."""
        if self._place is not None:
            await self._call("rl_drop_staged", self._num_updates, problem)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._llm.collective_rpc(method, args=args)
        return answers

    async def _load(self, file: WeightFile, version: int) -> None:
        # Keep: rows in flight go on under the new weights, and say of each token which
        # sampled it.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        loaded = False
        try:
            found = await self._call("rl_load_file", *file.arguments)
            if any(found):
                raise WeightSyncError(" ".join(filter(None, found)))
            # Else a prompt that was seen before would begin with keys and values of the
            # old weights.
            if not await self._llm.reset_prefix_cache():
                raise WeightSyncError("vLLM did not reset its prefix cache")
            await self._llm.update_weight_version(str(version))
            loaded = True
        finally:
            if not loaded:
                # Nobody may get tokens of weights that are neither old nor new.
                await self._llm.pause_generation(mode="abort", clear_cache=True)
            await self._llm.resume_generation()

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Tensors held otherwise than these entries of a manifest say, by name."""
        with self.progress.paused():
            return joined(self._run(self._call("rl_changed_weights", entries)))

    def processes(self) -> list[int]:
        """Numbers of the processes that the engine has of its own."""
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes]

    def sleep(self) -> None:
        """Nothing: rows may be in the engine at any time."""

    def wake(self, parts: list[str]) -> None:
        """Nothing."""

    def shutdown(self) -> None:
        """End the engine and its processes."""
        engine, self._llm = self._llm, None
        # In the loop, as the engine's tasks live there.
        self._loop.call_soon_threadsafe(engine.shutdown, _STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * _STOP_S)


def _place_variables(place: ReplicaRank) -> dict[str, str]:
    from rl_models.generation.vllm.rank_executor import (  # noqa: PLC0415
        LeadingExecutor,
    )

    return LeadingExecutor.variables(place)


def _counted(
    process: Callable[..., Any], progress: EngineProgress
) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        outputs = process(*arguments, **options)
        progress.step()
        return outputs

    return counted
