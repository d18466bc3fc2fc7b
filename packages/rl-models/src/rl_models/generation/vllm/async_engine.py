"""`AsyncLLM` inside a worker; in a tensor-parallel replica, the worker of rank 0."""

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
# Interval at which rank 0 looks whether all ranks have the weights. Short, because they
# finish within milliseconds of each other.
_LOOK_S = 0.005


class EngineLostError(GenerationError):
    """The engine's own process is gone; only a new one can go on."""


class AsyncEngine:
    """`AsyncLLM` in an event loop of its own; callers are threads.

    Args:
        arguments: Arguments of vLLM's `AsyncEngineArgs`.
        place: The rank of this process in its replica, which is the first.
        update_deadline_s: How long the other ranks may take to receive the weights.
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
        # A daemon: the loop runs for ever, and must not keep a process alive that ends
        # without `shutdown`.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-loop", daemon=True
        )
        self._thread.start()
        self._numbers = itertools.count()
        # Two updates at once would pause and resume in the middle of each other.
        self._updates = threading.Lock()
        self._num_updates = 0
        self._adapter = adapter_request(arguments)
        self._llm: Any = self._run(self._build(arguments))

    async def _build(self, arguments: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        # vLLM spawns the engine's process inside a Ray worker, so it inherits nothing
        # of this one but the environment.
        os.environ.update(parent_variables())
        if self._place is not None:
            os.environ.update(_place_variables(self._place))
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        # vLLM has a name of its own for the weights that it has read; ours are numbers,
        # and 0 is the checkpoint.
        await engine.update_weight_version("0")
        # Steps run in another process. Every one that ends shows here by its outputs.
        processor = engine.output_processor
        processor.process_outputs = _counted(processor.process_outputs, self.progress)
        return engine

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a row, input and output together."""
        return int(self._llm.model_config.max_model_len)

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """Return the `RequestOutput` of each request, in order; thread-safe."""
        with self.progress.sampling(num_tokens(requests)):
            return self._run(self._sample(requests))

    async def _sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        # All at once: the engine batches whatever is waiting.
        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except EngineDeadError as error:
            raise EngineLostError(f"The process of vLLM's engine ended: {error}") from (
                error
            )
        finally:
            # After a row has failed, nobody would read the others.
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
        """Count an update before its weights arrive; all ranks count the same ones."""
        self._num_updates += 1

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights between two tokens; rows in flight go on with the new.

        Their cache is recomputed from their tokens, so that nothing of the old weights
        is left in it. All ranks of a replica read the stream to its end, and thereby
        verify it, before any of them changes the model.
        """
        with self._updates, ExitStack() as stack:
            try:
                # Read to its end first: a stream that turns out to be damaged must not
                # have changed half of the model.
                file = stack.enter_context(WeightFile(tensors))
            except Exception as error:
                self._run(self._drop(f"Rank 0 of the replica has no weights: {error}"))
                raise
            # Outside the pause: rows go on while slower ranks still receive.
            self._run(self._meet())
            with self.progress.paused():
                self._run(self._load(file, version))

    async def _meet(self) -> None:
        """Wait until all ranks have the weights of this update.

        Raises:
            WeightSyncError: A rank did not get them; then no rank loads them.
        """
        if self._place is None:
            return
        end_s = time.monotonic() + self._update_deadline_s
        while True:
            found = await self._call("rl_staged", self._num_updates)
            problems = [problem for problem in found if problem]
            # A rank answers None until it has everything.
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
        """Tell the other ranks not to wait for this update."""
        if self._place is not None:
            await self._call("rl_drop_staged", self._num_updates, problem)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._llm.collective_rpc(method, args=args)
        return answers

    async def _load(self, file: WeightFile, version: int) -> None:
        # `keep` freezes rows in flight; they go on with the new weights, and vLLM
        # records for each token the version that sampled it.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        loaded = False
        try:
            found = await self._call("rl_load_file", *file.arguments)
            if any(found):
                raise WeightSyncError(" ".join(filter(None, found)))
            # Otherwise a known prompt would begin with keys and values of the old
            # weights.
            if not await self._llm.reset_prefix_cache():
                raise WeightSyncError("vLLM did not reset its prefix cache")
            await self._llm.update_weight_version(str(version))
            loaded = True
        finally:
            if not loaded:
                # The weights may be neither old nor new: end the rows in flight, so
                # that their callers get an error instead of tokens.
                await self._llm.pause_generation(mode="abort", clear_cache=True)
            await self._llm.resume_generation()

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Return the names of tensors that differ from these entries of a manifest."""
        with self.progress.paused():
            return joined(self._run(self._call("rl_changed_weights", entries)))

    def processes(self) -> list[int]:
        """Return the process ids of the engine's own processes."""
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes]

    def sleep(self) -> None:
        """Do nothing: rows may be in the engine at any time."""

    def wake(self, parts: list[str]) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """End the engine and its processes."""
        engine, self._llm = self._llm, None
        # In the loop, because the engine's tasks live there; the loop stops after it,
        # as calls from outside run in order.
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
