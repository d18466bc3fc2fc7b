"""`Engine`: what the backend asks of a running vLLM, however that runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from rl_models.generation.vllm.requests import RowRequest
from rl_models.generation.vllm.stall_watch import EngineProgress

__all__ = ["Engine", "Tensors", "joined", "num_tokens"]

Tensors = Iterable[tuple[str, torch.Tensor]]


class Engine(Protocol):
    """A running engine."""

    progress: EngineProgress
    """Its steps."""

    @property
    def follows(self) -> bool:
        """Whether it takes part in the steps of another, and samples no rows itself."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of a row at most, input and output together."""
        ...

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """`RequestOutput` of each request, in order."""
        ...

    def begin_update(self) -> None:
        """Weights are about to come; whether or not `load` gets them."""
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

    def wake(self, parts: list[str]) -> None:
        """Take it again for `weights`, `kv_cache` or both."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes."""
        ...


def num_tokens(requests: Sequence[RowRequest]) -> int:
    """Tokens of the prompts of all rows."""
    return sum(len(request.token_ids) for request in requests)


def joined(answers: Sequence[list[str] | None]) -> list[str] | None:
    """Return what any of the processes found; None if one of them cannot tell."""
    names: dict[str, None] = {}
    for answer in answers:
        if answer is None:
            return None
        names.update(dict.fromkeys(answer))
    return list(names)
