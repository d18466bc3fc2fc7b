"""`ModelCall`: one answer that an agent waits for, as a row of the generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams

__all__ = ["ModelCall", "Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of the generator for a row."""

    tokens: list[int]
    logprobs: list[float] | None
    versions: list[int]
    is_cut: bool


class ModelCall:
    """A pending row, created in the server's loop and answered in a desk thread.

    Args:
        tokens: The prompt.
        seed: Seed of the sampling.
        stop: Stop strings.
        sampling: See `SampledRow`.
        on_version: Called with the version of the weights that sample it.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        seed: int,
        stop: list[str],
        sampling: tuple[bool, SamplingParams | None],
        on_version: Callable[[int], None],
    ) -> None:
        self._tokens, self._seed, self._stop = tokens, seed, stop
        self.sampling = sampling
        """See `SampledRow`."""
        self.opening = None
        """See `SampledRow`."""
        self._on_version = on_version
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Sampled] = self._loop.create_future()
        """The answer."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the answer is no longer wanted."""
        return self.future.cancelled()

    def note_version(self, version: int) -> None:
        """Record the version of the weights that sample it."""
        self._on_version(version)

    def question(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the row that `generate` takes."""
        columns: dict[str, Any] = {
            "input_ids": torch.tensor([self._tokens], dtype=torch.int64),
            "input_lengths": torch.tensor([len(self._tokens)]),
            "seeds": torch.tensor([self._seed]),
        }
        if self._stop:
            columns["stop_strings"] = [self._stop]
        return BatchedDataDict(columns)

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Set the row that `generate` returned."""
        end = int(output["unpadded_sequence_lengths"][0])
        new = slice(end - int(output["generation_lengths"][0]), end)
        version = output["weight_version"][0]
        versions = output.get("token_versions")
        logprobs = output.get("logprobs")
        tokens = output["output_ids"][0, new].tolist()
        sampled = Sampled(
            tokens,
            None if logprobs is None else logprobs[0, new].float().tolist(),
            [int(version)] * len(tokens)
            if versions is None
            else versions[0, new].tolist(),
            bool(output["truncated"][0]),
        )
        self._settle(lambda: self.future.set_result(sampled))

    def fail(self, error: Exception) -> None:
        """Set the reason why it could not be sampled."""
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        def settle_once() -> None:
            # Checked in the loop, because the session may have ended meanwhile.
            if not self.future.done():
                settle()

        # Futures of asyncio may be set in their own loop only.
        self._loop.call_soon_threadsafe(settle_once)
