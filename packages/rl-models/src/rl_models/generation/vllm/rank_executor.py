"""How vLLM runs one rank of a tensor-parallel engine inside a process that is ours.

Each rank has a whole engine with a scheduler of its own. Given the same requests in the
same order all of them plan the same steps, and meet in the collectives of the model:
nothing else goes between them, and each loads its own shard of the weights. vLLM's own
launcher for this takes its place from RANK and MASTER_PORT, which belong to the worker
group here; and would give the shared memory of all replicas of a node the same name.
"""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rl_models.generation.replica_rank import ReplicaRank

__all__ = ["RankExecutor"]


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """The executor of the one engine of this process."""

    place: ClassVar[ReplicaRank]
    """Set before the engine is built: vLLM knows the class by its path only, and what
    is in its config becomes part of the name of the compiled model."""

    def _distributed_args(self) -> tuple[str, int, int]:
        place = self.place
        # On a CPU vLLM takes the end of this for the name of the group's shared memory.
        # Where names differ it takes gloo: a rank learns at once of the end of another
        # then, for which it waits for ever in shared memory, and no files are left. On
        # two busy cores gloo was as fast (64 rows: 1.1 s for 64 tokens, against 1.6).
        where = f"tcp://{place.address}:{place.port}?rank_of_replica={place.rank}"
        # Each process sees its own GPU alone, which is number 0 there.
        return where, place.rank, 0
