"""The engine of every worker but the first of a tensor-parallel `AsyncLLM` replica."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rl_models.errors import GenerationError
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.engine import Tensors
from rl_models.generation.vllm.rank_weight_update import RankWeightUpdate
from rl_models.generation.vllm.requests import RowRequest
from rl_models.generation.vllm.shared_weights_file import WeightFile
from rl_models.generation.vllm.stall_watch import EngineProgress

__all__ = ["FollowingEngine"]

_STOP_S = 20.0


class FollowingEngine:
    """A shard of the model in a thread, which takes part in the steps of rank 0.

    Args:
        arguments: Arguments of vLLM's `AsyncEngineArgs`, the same as on rank 0.
        place: The rank of this process.
        update_deadline_s: How long the leader may take to load weights that have
            arrived here.
    """

    follows = True

    def __init__(
        self, arguments: dict[str, Any], place: ReplicaRank, update_deadline_s: float
    ) -> None:
        self.progress = EngineProgress()
        self._weights = RankWeightUpdate(update_deadline_s)
        self._executor: Any = None
        built: Future[int] = Future()
        # A thread, because following the leader never returns, and this worker still
        # has to receive weights. A daemon, because the leader may never end it.
        self._thread = threading.Thread(
            target=self._run, args=(arguments, place, built), name="rank", daemon=True
        )
        self._thread.start()
        self._context_length = built.result()

    def _run(
        self, arguments: dict[str, Any], place: ReplicaRank, built: Future[int]
    ) -> None:
        try:
            executor = self._build(arguments, place)
        except BaseException as error:
            # Raised in the constructor, which waits for it.
            built.set_exception(error)
            return
        self._executor = executor
        built.set_result(int(executor.vllm_config.model_config.max_model_len))
        executor.follow()
        executor.shutdown()
        _clean_up()

    def _build(self, arguments: dict[str, Any], place: ReplicaRank) -> Any:
        from vllm import AsyncEngineArgs  # noqa: PLC0415
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

        from rl_models.generation.vllm.rank_executor import (  # noqa: PLC0415
            FollowingExecutor,
        )

        config = AsyncEngineArgs(**arguments).create_engine_config(
            UsageContext.ENGINE_CONTEXT
        )
        executor = FollowingExecutor(config, place)
        executor.driver_worker.worker.rl_weights = self._weights
        return executor

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a row, input and output together."""
        return self._context_length

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """Refuse to sample, because the leader does.

        Raises:
            GenerationError: Always.
        """
        raise GenerationError(
            f"a worker that follows samples no rows of its own: got {len(requests)}; "
            "call rank 0 of the replica"
        )

    def begin_update(self) -> None:
        """Announce an update."""
        self._weights.begin()

    def load(self, tensors: Tensors, version: int) -> None:
        """Receive all weights, and wait until the leader has all ranks load them."""
        del version  # the leader names the version of every token
        try:
            with WeightFile(tensors) as file:
                self._weights.offer(file.arguments)
        except Exception as error:
            # The leader asks every rank, and would wait for this one until its
            # deadline.
            self._weights.refuse(str(error))
            raise

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Return None, because the leader asks all ranks."""
        del entries
        return None

    def processes(self) -> list[int]:
        """Return no processes, because the engine is the leader's."""
        return []

    def sleep(self) -> None:
        """Do nothing: rows may be in the engine at any time."""

    def wake(self, parts: list[str]) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Wait for the leader to end the engine; leave it if it does not."""
        # The leader goes first: a rank that left earlier would count as lost there.
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            self._executor.leave()
            self._thread.join(_STOP_S)


def _clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415

    cleanup_dist_env_and_memory()
