"""The stamp between an engine and its server, both simulated by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from rl_models.serving.version_stamp import VersionStamp

PATH = "/v1/completions"


def _output(spans: dict[int, list[tuple[str, int, int]]]) -> Any:
    return SimpleNamespace(
        outputs=[
            SimpleNamespace(
                index=index,
                weight_versions=[
                    SimpleNamespace(version=v, start=start, end=end)
                    for v, start, end in parts
                ]
                or None,
            )
            for index, parts in spans.items()
        ]
    )


class Engine:
    """Yields the outputs of one prompt after the other."""

    def __init__(self, *prompts: list[Any]) -> None:
        self._prompts = list(prompts)
        self.num_closed = 0

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        try:
            for output in self._prompts[int(request_id)]:
                yield output
        finally:
            self.num_closed += 1


def _ask(
    engine: Engine, messages: list[dict[str, Any]], samples: int = 1, **scope: Any
) -> list[dict[str, Any]]:
    """Return what is sent when the server reads all outputs and then sends messages."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number in range(len(engine._prompts)):
            sampling = SimpleNamespace(n=samples)
            async for _ in engine.generate("p", sampling, request_id=str(number)):
                pass
        for message in messages:
            await send(message)

    sent: list[dict[str, Any]] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        stamp = VersionStamp(app, engine)
        stamp.version = 9
        await stamp({"type": "http", "path": PATH, **scope}, None, send)

    asyncio.run(run())
    return sent


def _json_messages(body: Any) -> list[dict[str, Any]]:
    data = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    return [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": data[:7], "more_body": True},
        {"type": "http.response.body", "body": data[7:]},
    ]


def test_each_choice_gets_the_versions_of_its_tokens() -> None:
    engine = Engine(
        [
            _output({0: [], 1: [("3", 0, 4)]}),
            _output({0: [("3", 0, 2), ("4", 2, 6)]}),
        ],
        [_output({0: [("4", 0, 1)], 1: [("4", 0, 2)]})],
    )
    choices = [
        {"index": n, "text": "\u00e9", "finish_reason": "stop"} for n in range(4)
    ]
    start, body = _ask(engine, _json_messages({"choices": choices}), samples=2)
    found = [
        choice["weight_versions"] for choice in json.loads(body["body"])["choices"]
    ]
    assert found == [
        [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 6}],
        [{"version": 3, "start": 0, "end": 4}],
        [{"version": 4, "start": 0, "end": 1}],
        [{"version": 4, "start": 0, "end": 2}],
    ]
    headers = dict(start["headers"])
    assert headers[b"x-rl-weight-version"] == b"3"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert engine.num_closed == 2


def test_an_error_passes_as_it_is_with_the_present_version() -> None:
    messages = _json_messages({"error": {"message": "wrong"}})
    start, body = _ask(Engine(), messages)
    assert json.loads(body["body"]) == {"error": {"message": "wrong"}}
    assert dict(start["headers"])[b"x-rl-weight-version"] == b"9"


def test_the_last_event_of_a_choice_gets_them() -> None:
    engine = Engine([_output({0: [("8", 0, 5)]})])
    first = b'data: {"choices":[{"index":0,"finish_reason":null}]}\n\n'
    last = b'data: {"choices":[{"index":0,"finish_reason":"length"}]}\n\n'
    done = b"data: [DONE]\n\n"
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    start: dict[str, Any] = {"type": "http.response.start", "headers": headers}
    events = [
        {"type": "http.response.body", "body": event, "more_body": True}
        for event in (first, last, done)
    ]
    sent = _ask(engine, [start, *events])
    assert dict(sent[0]["headers"])[b"x-rl-weight-version"] == b"9"
    assert (sent[1]["body"], sent[3]["body"]) == (first, done)
    (choice,) = json.loads(sent[2]["body"][6:])["choices"]
    assert choice["weight_versions"] == [{"version": 8, "start": 0, "end": 5}]


def test_other_paths_are_left_alone() -> None:
    messages = _json_messages({"choices": []})
    assert _ask(Engine(), messages, path="/metrics") == messages
