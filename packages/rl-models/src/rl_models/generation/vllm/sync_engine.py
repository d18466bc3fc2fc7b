"""`vllm.LLM` inside a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rl_models.errors import WeightSyncError
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.adapter import adapter_request
from rl_models.generation.vllm.engine import Tensors, joined, num_tokens
from rl_models.generation.vllm.requests import RowRequest
from rl_models.generation.vllm.stall_watch import EngineProgress

__all__ = ["SyncEngine"]


class SyncEngine:
    """`vllm.LLM`, which samples one batch after the other."""

    follows = False

    def __init__(
        self, arguments: dict[str, Any], place: ReplicaRank | None = None
    ) -> None:
        from vllm import LLM  # noqa: PLC0415

        if place is not None:
            _take_place(place)  # before the engine is built, which reads it
        self.progress = EngineProgress()
        self._adapter = adapter_request(arguments)
        self._llm: Any = LLM(**arguments)
        engine = self._llm.llm_engine
        # In place of vLLM's own name for the weights that it has read.
        engine.set_weight_version("0")
        engine.step = _counted(engine.step, self.progress)

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a row, input and output together."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """Return the `RequestOutput` of each request, in order."""
        with self.progress.sampling(num_tokens(requests)):
            outputs: list[Any] = self._llm.generate(
                [{"prompt_token_ids": request.token_ids} for request in requests],
                [request.params for request in requests],
                use_tqdm=False,
                lora_request=self._adapter,
            )
        return outputs

    def begin_update(self) -> None:
        """Do nothing: every rank loads by itself."""

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights and drop whatever was computed with the old ones."""
        # The engine is in this process, so the stream itself can be an argument.
        self._llm.collective_rpc("rl_load_weights", args=(tensors,))
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM did not reset its prefix cache")
        self._llm.llm_engine.set_weight_version(str(version))

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Return the names of tensors that differ from these entries of a manifest."""
        return joined(self._llm.collective_rpc("rl_changed_weights", args=(entries,)))

    def processes(self) -> list[int]:
        """Return no processes: the engine has none of its own."""
        return []

    def sleep(self) -> None:
        """Free the memory of the GPU."""
        # Level 1 keeps the weights in the CPU's memory; level 2 would drop them, and
        # rows may be sampled again before the next update.
        self._llm.sleep(level=1)

    def wake(self, parts: list[str]) -> None:
        """Allocate it again for `weights`, `kv_cache` or both."""
        self._llm.wake_up(parts)

    def shutdown(self) -> None:
        """End the engine and its processes."""
        engine = self._llm.llm_engine
        self._llm = None
        # `LLM` has no method for it.
        engine.engine_core.shutdown()


def _take_place(place: ReplicaRank) -> None:
    from rl_models.generation.vllm.rank_executor import RankExecutor  # noqa: PLC0415

    RankExecutor.place = place


def _counted(step: Callable[[], Any], progress: EngineProgress) -> Callable[[], Any]:
    def counted() -> Any:
        outputs = step()
        progress.step()
        return outputs

    return counted
