"""Executors that run one rank of a tensor-parallel vLLM engine inside our processes.

With `LLM`, each rank has a whole engine with its own scheduler. Given the same requests
in the same order, all of them plan the same steps and meet in the collectives of the
model: nothing else passes between them, and each loads its own shard of the weights.
vLLM's own launcher for this takes its rank from RANK and MASTER_PORT, which belong to
the worker group here, and would give the shared memory of all replicas of a node the
same name.

The plan of `AsyncLLM` depends on when requests and updates arrive. So rank 0 alone
plans; whatever its engine calls is called on the other ranks as well, in the same
order, and they return a digest of their tokens.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, ClassVar

import cloudpickle
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.executor.uniproc_executor import (
    ExecutorWithExternalLauncher,
    UniProcExecutor,
)
from vllm.v1.serial_utils import run_method

from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.process_watch import end_process
from rl_models.generation.vllm.rank_link import FollowersEnd, LeadersEnd

__all__ = ["FollowingExecutor", "LeadingExecutor", "RankExecutor"]

_PLACE = "RL_REPLICA_PLACE"
# Methods whose result is that of rank 0; the other ranks must have computed the same.
_STEPS = ("execute_model", "sample_tokens")
_LAST = "shutdown"


def _distributed_args(place: ReplicaRank) -> tuple[str, int, int]:
    # On a CPU vLLM names the group's shared memory after the end of this address, and
    # falls back to gloo if the names differ, as they do here. With gloo a rank notices
    # the end of another at once, for which it would wait forever in shared memory, and
    # no files are left behind. On two busy cores gloo was no slower (64 rows: 1.1 s for
    # 64 tokens, against 1.6).
    where = f"tcp://{place.address}:{place.port}?rank_of_replica={place.rank}"
    # Each process sees only its own GPU, which is number 0 there.
    return where, place.rank, 0


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """The executor of the one engine of this process."""

    place: ClassVar[ReplicaRank]
    """Set before the engine is built: vLLM imports the class by its path, and anything
    in its config would become part of the name of the compiled model."""

    def _distributed_args(self) -> tuple[str, int, int]:
        return _distributed_args(self.place)


class LeadingExecutor(UniProcExecutor):  # type: ignore[misc]
    """The executor of rank 0, in the process of the engine of `AsyncLLM`."""

    @staticmethod
    def variables(place: ReplicaRank) -> dict[str, str]:
        """Return the variables to set before the engine's own process is started."""
        return {_PLACE: json.dumps(asdict(place))}

    def _init_executor(self) -> None:
        self._place = ReplicaRank(**json.loads(os.environ[_PLACE]))
        super()._init_executor()
        # Only now: the process group that vLLM has made carries the ticket, so no other
        # address has to be agreed on.
        self._others = LeadersEnd(self._place.address, end_process)
        ticket = (self._others.ticket, self.vllm_config.compute_hash())
        get_world_group().broadcast_object(ticket, src=0)
        self._others.accept(self._place.size - 1)

    def _distributed_args(self) -> tuple[str, int, int]:
        return _distributed_args(self._place)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of the worker of every rank and return all results."""
        # Functions may be local ones, which pickle cannot send; vLLM's `run_method`
        # takes them as bytes of cloudpickle.
        sent = method if isinstance(method, str) else cloudpickle.dumps(method)
        # Sent before this rank runs its own part: inside it waits for the others.
        number = self._others.send(sent, args, kwargs or {})
        own = super().collective_rpc(method, timeout, args, kwargs, single_value=True)
        others = self._others.results(number, timeout)
        if method in _STEPS:
            _check_step(own, others)
        result = own if single_value else [own, *others]
        if not non_block:
            return result
        # A future that is done: the answers of the other ranks had to be awaited.
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def shutdown(self) -> None:
        """End the workers of all ranks."""
        self._others.end(_LAST)
        super().shutdown()
        self._others.close()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return False: every step waits for the digests of the other ranks."""
        return False


class FollowingExecutor(UniProcExecutor):  # type: ignore[misc]
    """The worker of another rank, which repeats the calls of rank 0.

    Args:
        vllm_config: The same as on rank 0.
        place: The rank of this process.
    """

    def __init__(self, vllm_config: Any, place: ReplicaRank) -> None:
        self._place = place  # before the base class, whose constructor reads it
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        super()._init_executor()
        # vLLM passes some arguments as a list over ranks, and takes this number to find
        # its own; an executor with one worker counts it as 0.
        self.driver_worker.global_rank = self._place.rank
        ticket, config_hash = get_world_group().broadcast_object(src=0)
        # Other settings would plan other collectives, and the ranks would wait for each
        # other.
        if config_hash != self.vllm_config.compute_hash():
            raise ValueError(
                f"rank {self._place.rank} of the replica must have the settings of "
                "rank 0: they differ; give all nodes the same packages and variables"
            )
        self._leader = FollowersEnd(self._place.rank, ticket, end_process)

    def _distributed_args(self) -> tuple[str, int, int]:
        return _distributed_args(self._place)

    def follow(self) -> None:
        """Repeat the calls of rank 0, until it ends the engine."""
        for number, method, args, kwargs in self._leader.calls():
            if method == _LAST:
                self._leader.close()
                break
            try:
                value = run_method(self.driver_worker, method, args, kwargs)
            except Exception as error:
                # As text: an exception of vLLM's may not survive pickling. The loop
                # goes on, because rank 0 decides what a failure means.
                self._leader.answer(number, False, f"{type(error).__name__}: {error}")
            else:
                told = _digest(value) if method in _STEPS else value
                self._leader.answer(number, True, told)

    def leave(self) -> None:
        """End `follow`; rank 0 may end from now on."""
        self._leader.close()


def _digest(output: Any) -> int | None:
    """Return a digest of the tokens of a step; None if it has not sampled yet."""
    if output is None:
        return None
    return zlib.crc32(repr(output.sampled_token_ids).encode())


def _check_step(own: Any, others: list[int | None]) -> None:
    expected = _digest(own)
    if any(other != expected for other in others):
        raise RuntimeError(
            "the ranks of a tensor-parallel replica came to different tokens: got "
            f"digests {[expected, *others]}"
        )
