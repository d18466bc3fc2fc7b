"""Streams of the engine `huggingface` that are read later than they are sampled."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from rl_models.build.model import TokenizerBuildConfig, build_tokenizer
from rl_models.serving.huggingface_job import Job
from rl_models.serving.openai_request import COMPLETIONS, OpenAIRequest

TEXTS = ("123456", "98")


def pieces_of(*, num_read_before_the_end: int, stop: str | None) -> list[list[dict]]:
    """Return the events of each answer, which ends after some were read."""
    tokenizer = build_tokenizer(TokenizerBuildConfig())
    fields: dict[str, Any] = {"prompt": "1", "n": 2, "stream": True, "stop": stop}
    request = OpenAIRequest.read(COMPLETIONS, fields, tokenizer, 64)
    ids = [tokenizer.encode(text) for text in TEXTS]

    async def read() -> list[dict]:
        backend = SimpleNamespace(tokenizer=tokenizer, weight_version=0)
        job = Job(request, backend, "model")
        for step in range(max(map(len, ids))):
            rows = [row for row in range(2) if step < len(ids[row])]
            job._take(rows, [ids[row][step] for row in rows], [-1.0] * len(rows))
        running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = job.events(running)
        lines = [await anext(stream) for _ in range(num_read_before_the_end)]
        job._finish([False, False])
        running.set_result(None)
        lines += [line async for line in stream]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    events = asyncio.run(asyncio.wait_for(read(), 60))
    choices = [choice for event in events for choice in event["choices"]]
    return [[part for part in choices if part["index"] == i] for i in range(2)]


@pytest.mark.parametrize("num_read_before_the_end", [0, 1, 2])
@pytest.mark.parametrize("stop", [None, "45"])
def test_a_stream_that_is_read_late_is_whole_and_ends_once(
    num_read_before_the_end: int, stop: str | None
) -> None:
    found = pieces_of(num_read_before_the_end=num_read_before_the_end, stop=stop)
    for parts, text in zip(found, TEXTS, strict=True):
        assert "".join(part["text"] for part in parts) == text.split(stop or "x")[0]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons[-1] == "stop"
        assert reasons.count("stop") == 1
