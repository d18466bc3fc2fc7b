"""`Engine`: the interface of the backend to a running vLLM, in whichever process."""

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
    """Progress of its steps."""

    @property
    def follows(self) -> bool:
        """Whether it only takes part in the steps of another engine."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a row, input and output together."""
        ...

    def sample(self, requests: Sequence[RowRequest]) -> list[Any]:
        """Return the `RequestOutput` of each request, in order."""
        ...

    def begin_update(self) -> None:
        """Announce an update, whether or not `load` will get its weights."""
        ...

    def load(self, tensors: Tensors, version: int) -> None:
        """Replace all weights and drop whatever was computed with the old ones."""
        ...

    def changed(self, entries: Sequence[list[Any]]) -> list[str] | None:
        """Return the names of tensors that differ from these entries of a manifest.

        None if they cannot be compared.
        """
        ...

    def processes(self) -> list[int]:
        """Return the process ids of the engine's own processes."""
        ...

    def sleep(self) -> None:
        """Free the memory of the GPU."""
        ...

    def wake(self, parts: list[str]) -> None:
        """Allocate it again for `weights`, `kv_cache` or both."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes."""
        ...


def num_tokens(requests: Sequence[RowRequest]) -> int:
    """Return the number of tokens of all prompts."""
    return sum(len(request.token_ids) for request in requests)


def joined(answers: Sequence[list[str] | None]) -> list[str] | None:
    """Return the names that any process found; None if one of them cannot compare."""
    # A dictionary as an ordered set: ranks mostly find the same tensors.
    names: dict[str, None] = {}
    for answer in answers:
        if answer is None:
            return None
        names.update(dict.fromkeys(answer))
    return list(names)
