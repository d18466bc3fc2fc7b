"""The two ways to run vLLM inside a replica: `LLM` and `AsyncLLM`.

| engine        | process of the model  | weights come       | rows in flight |
|---------------|-----------------------|--------------------|----------------|
| `SyncEngine`  | this one, on one GPU  | as tensors         | finish first   |
| `AsyncEngine` | one of its own        | as a file in memory| go on          |
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.requests import RowRequest
from rl_models.generation.vllm.weight_file import WeightFile

__all__ = ["AsyncEngine", "Engine", "EngineLostError", "SyncEngine", "make_engine"]

Tensors = Iterable[tuple[str, torch.Tensor]]
Result = TypeVar("Result")

_STOP_S = 10.0


class EngineLostError(GenerationError):
    """The engine's own process is gone; only a new one can go on."""


class Engine(Protocol):
    """A running engine."""

    @property
    def context_length(self) -> int:
        """Tokens of a row at most, input and output together."""
        ...

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """`RequestOutput` of each request, in order."""
        ...

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights, forget what was computed with the old ones."""
        ...

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Tensors held otherwise than these entries of a manifest say, by name.

        None: it cannot be told.
        """
        ...

    def processes(self) -> list[int]:
        """Numbers of the processes that the engine has of its own."""
        ...

    def sleep(self) -> None:
        """Free the memory of the GPU."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes."""
        ...


def make_engine(
    arguments: dict[str, Any], *, is_async: bool, place: ReplicaRank | None = None
) -> Engine:
    """Build an engine; the process has its variables already."""
    if is_async:
        return AsyncEngine(arguments)
    return SyncEngine(arguments, place)


class SyncEngine:
    """`vllm.LLM`: one batch after the other."""

    def __init__(
        self, arguments: dict[str, Any], place: ReplicaRank | None = None
    ) -> None:
        from vllm import LLM  # noqa: PLC0415

        if place is not None:
            _take_place(place)
        self._llm: Any = LLM(**arguments)
        self._llm.llm_engine.set_weight_version("0")

    @property
    def context_length(self) -> int:
        """Tokens of a row at most, input and output together."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """`RequestOutput` of each request, in order."""
        outputs: list[Any] = self._llm.generate(
            [{"prompt_token_ids": request.token_ids} for request in requests],
            [request.params for request in requests],
            use_tqdm=False,
        )
        return outputs

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights, forget what was computed with the old ones."""
        self._llm.collective_rpc("rl_load_weights", args=(tensors,))
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM did not reset its prefix cache")
        self._llm.llm_engine.set_weight_version(str(version))

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Tensors held otherwise than these entries of a manifest say, by name."""
        return _joined(self._llm.collective_rpc("rl_changed_weights", args=(entries,)))

    def processes(self) -> list[int]:
        """Numbers of the processes that the engine has of its own."""
        return []

    def sleep(self) -> None:
        """Free the memory of the GPU."""
        self._llm.sleep(level=1)

    def wake(self) -> None:
        """Take it again."""
        self._llm.wake_up()

    def shutdown(self) -> None:
        """End the engine and its processes."""
        engine = self._llm.llm_engine
        self._llm = None
        engine.engine_core.shutdown()


class AsyncEngine:
    """`AsyncLLM` in an event loop of its own; callers are threads."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-loop", daemon=True
        )
        self._thread.start()
        self._numbers = itertools.count()
        self._updates = threading.Lock()
        self._llm: Any = self._run(self._build(arguments))

    async def _build(self, arguments: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        await engine.update_weight_version("0")
        return engine

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def context_length(self) -> int:
        """Tokens of a row at most, input and output together."""
        return int(self._llm.model_config.max_model_len)

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """`RequestOutput` of each request, in order; other threads may do the same."""
        return self._run(self._sample(requests))

    async def _sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except EngineDeadError as error:
            raise EngineLostError(f"The process of vLLM's engine ended: {error}") from (
                error
            )
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: RowRequest) -> Any:
        last = None
        async for output in self._llm.generate(
            {"prompt_token_ids": request.token_ids},
            request.params,
            request_id=f"row-{next(self._numbers)}",
        ):
            last = output
        if last is None:
            raise GenerationError("vLLM ended a row without a word about it")
        return last

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights between two tokens; rows in flight go on with the new.

        They are computed anew from their tokens, so nothing of the old weights is left
        in the cache. The stream is taken to its end, and so is verified, before
        anything is touched.
        """
        with self._updates, WeightFile(tensors) as file:
            self._run(self._load(file, version))

    async def _load(self, file: WeightFile, version: int) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        loaded = False
        try:
            _check(await self._llm.collective_rpc("rl_load_file", args=file.arguments))
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
        call = self._llm.collective_rpc("rl_changed_weights", args=(entries,))
        return _joined(self._run(call))

    def processes(self) -> list[int]:
        """Numbers of the processes that the engine has of its own."""
        return _process_ids(self._llm)

    def sleep(self) -> None:
        """Nothing: rows may be in the engine at any time."""

    def wake(self) -> None:
        """Nothing."""

    def shutdown(self) -> None:
        """End the engine and its processes."""
        engine, self._llm = self._llm, None
        self._loop.call_soon_threadsafe(engine.shutdown, _STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * _STOP_S)


def _take_place(place: ReplicaRank) -> None:
    from rl_models.generation.vllm.rank_executor import RankExecutor  # noqa: PLC0415

    RankExecutor.place = place


def _check(problems: Sequence[str]) -> None:
    """Raise what the processes of the engine found wrong."""
    found = [problem for problem in problems if problem]
    if found:
        raise WeightSyncError(found[0])


def _joined(answers: Sequence[list[str] | None]) -> list[str] | None:
    """What any of the processes found; None if one of them cannot tell."""
    names: dict[str, None] = {}
    for answer in answers:
        if answer is None:
            return None
        names.update(dict.fromkeys(answer))
    return list(names)


def _process_ids(engine: Any) -> list[int]:
    manager = engine.engine_core.resources.engine_manager
    return [process.pid for process in manager.processes]
