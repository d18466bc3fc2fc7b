"""One request of a server with the backend `huggingface`.

It is created in the server's thread and sampled in the engine's; tokens return through
the event loop, so that only the server's thread touches the answer.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_models.generation.noise import derive_seeds
from rl_models.generation.rows import check_rows
from rl_models.serving.openai_answer import Choice, OpenAIAnswer
from rl_models.serving.openai_request import OpenAIRequest

__all__ = ["Job"]

IntArray = npt.NDArray[np.int64]


class _CancelledJobError(Exception):
    """The answer is no longer wanted."""


class Job:
    """Samples the answers to one request; made in the loop that serves it.

    Args:
        request: The request.
        backend: Samples it.
        model_name: Name of the model in requests.
    """

    def __init__(self, request: OpenAIRequest, backend: Any, model_name: str) -> None:
        self._request, self._backend = request, backend
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = threading.Event()
        self._rows: asyncio.Queue[list[int]] = asyncio.Queue()
        choices = [
            Choice(backend.tokenizer, request.stop)
            for _ in range(len(request.prompts) * request.n)
        ]
        self.version: int = backend.weight_version
        """Version of the weights; an update may change it until `run` begins."""
        self.answer = OpenAIAnswer(request, model_name, choices)

    def check(self) -> None:
        """Refuse prompts that leave no room for an answer.

        Raises:
            ContextLengthError: One is too long.
        """
        ids, lengths = self._padded()
        limit = self._request.sampling.max_new_tokens or 1
        check_rows(ids, lengths, limit, self._backend.context_length)

    def cancel(self) -> None:
        """Have it end at its next step."""
        self._is_cancelled.set()

    # --- in the engine's thread ---------------------------------------------------

    def run(self) -> None:
        """Sample all answers."""
        if self._is_cancelled.is_set():
            return
        # In the engine's thread, where no update can come in between.
        self.version = self.answer.version = self._backend.weight_version
        ids, lengths = self._padded()
        rows: dict[str, Any] = {
            "input_ids": ids,
            "input_lengths": torch.from_numpy(lengths),
        }
        if self._request.seed is not None:
            rows["seeds"] = derive_seeds(abs(self._request.seed), 0, len(lengths))
        if self._request.stop:
            rows["stop_strings"] = [self._request.stop] * len(lengths)
        try:
            result = self._backend.generate(
                rows,
                greedy=self._request.greedy,
                sampling=self._request.sampling,
                on_step=self._on_step,
            )
        except _CancelledJobError:
            return
        truncated = result["truncated"].tolist()
        self._loop.call_soon_threadsafe(self._finish, truncated)

    def _on_step(
        self, rows: IntArray, tokens: IntArray, logprobs: npt.NDArray[np.float32]
    ) -> None:
        if self._is_cancelled.is_set():
            raise _CancelledJobError
        values = (rows.tolist(), tokens.tolist(), logprobs.tolist())
        self._loop.call_soon_threadsafe(self._take, *values)

    def _padded(self) -> tuple[torch.Tensor, IntArray]:
        prompts = [p for p in self._request.prompts for _ in range(self._request.n)]
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        return ids, lengths

    # --- in the server's thread ---------------------------------------------------

    def _take(self, rows: list[int], tokens: list[int], logprobs: list[float]) -> None:
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            self.answer.choices[row].add(token, logprob)
        self._rows.put_nowait(rows)

    def _finish(self, truncated: list[bool]) -> None:
        for choice, cut in zip(self.answer.choices, truncated, strict=True):
            choice.finish_reason = "length" if cut else "stop"
        self._rows.put_nowait(list(range(len(truncated))))

    async def events(self, running: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Yield the events of a stream as they come, the last mark left out.

        Args:
            running: Is done once `run` has ended.

        Raises:
            Exception: What ended `run`.
        """
        is_first = True
        while True:
            waiting = asyncio.ensure_future(self._rows.get())
            either: set[asyncio.Future[Any]] = {waiting, running}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                # Raises the error of `run`, if any. Otherwise the last rows are queued
                # already, because they were scheduled before `run` ended.
                await running
                waiting = asyncio.ensure_future(self._rows.get())
            rows = await waiting
            if is_first:
                for event in self.answer.opening_events():
                    yield _written(event)
                is_first = False
            is_over = self.answer.choices[0].finish_reason is not None
            if is_over:
                # The choices include the tokens that still wait in the queue, and each
                # choice must end once.
                rows = list(range(len(self.answer.choices)))
            # Made before any is sent: the choices grow while an event is being sent.
            for event in list(self._new(rows)):
                yield _written(event)
            if is_over:
                break
        usage = self.answer.usage_event()
        if usage is not None:
            yield _written(usage)

    def _new(self, rows: list[int]) -> Iterator[dict[str, Any]]:
        for row in rows:
            event = self.answer.event(row)
            if event is not None:
                yield event


def _written(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()
