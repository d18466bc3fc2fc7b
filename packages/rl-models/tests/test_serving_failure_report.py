"""What a replica adds to the response of a failed engine."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest

from rl_models.serving.failure_report import FailureReport
from rl_models.serving.recent_errors import RecentErrors, relevant_lines

JSON = b"application/json"
FAILED = b'{"error": {"message": "Internal server error", "code": 500}}'


def answer_of(
    status: int, parts: list[bytes], lines: list[str], kind: bytes = JSON
) -> tuple[dict[str, Any], bytes]:
    """Return status and body of a response that passes through the middleware."""
    sent: list[dict[str, Any]] = []
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind)]
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            body = {"type": "http.response.body", "body": part, "more_body": more}
            await send(body)

    async def explain(since_s: float, request_id: str) -> list[str]:
        assert since_s <= time.time()
        asked.append(request_id)
        return lines

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "POST", "headers": [(b"x-request-id", b"r7")]}
    asyncio.run(FailureReport(app, explain)(scope, None, send))
    assert asked in ([], ["r7"])
    return sent[0], b"".join(message["body"] for message in sent[1:])


def test_a_failure_has_the_engines_words() -> None:
    start, body = answer_of(500, [FAILED[:9], FAILED[9:]], ["no blocks are left"])
    assert start["status"] == 500
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    answer = json.loads(body)
    assert answer["error"] == json.loads(FAILED)["error"]
    assert answer["rl_cause"] == ["Internal server error", "no blocks are left"]
    start, body = answer_of(500, [b"Internal Server Error"], [], b"text/plain")
    assert json.loads(body) == {"rl_cause": ["Internal Server Error"]}


@pytest.mark.parametrize("status", [200, 400, 501])
def test_other_answers_stay_as_they_are(status: int) -> None:
    start, body = answer_of(status, [b"a", b"b"], ["old"])
    assert (start["status"], body) == (status, b"ab")


def test_an_event_of_a_stream_has_them_too() -> None:
    parts = [b'data: {"n": 0}\n\n', b"data: " + FAILED + b"\n\n", b"data: [DONE]\n\n"]
    _, body = answer_of(200, parts, ["no blocks"], b"text/event-stream")
    events = body.split(b"\n\n")
    assert (events[0], events[2]) == (b'data: {"n": 0}', b"data: [DONE]")
    assert json.loads(events[1].removeprefix(b"data: "))["rl_cause"][1] == "no blocks"


def test_a_grammar_without_a_token_is_an_error_of_the_request() -> None:
    lines = ["Unexpected: grammar rejected tokens [0] for request chatcmpl-r7."]
    start, body = answer_of(500, [FAILED], lines)
    assert start["status"] == 400
    assert json.loads(body)["error"]["code"] == "form_not_in_vocabulary"


def test_lines_that_name_the_request_come_before_others() -> None:
    name = f"{__name__}.engine"
    errors = RecentErrors(name)
    logger = logging.getLogger(name)
    logger.error("before")
    since_s = time.time()
    errors._kept[0] = (since_s - 1.0, "before")
    try:
        raise ValueError("at the bottom")
    except ValueError:
        logger.exception("request %s has failed", "r7")
    logger.error("request r8 has failed")
    logger.warning("nothing")
    lines = errors.since(since_s)
    assert [line.split("\n")[0] for line in lines] == [
        "request r7 has failed",
        "request r8 has failed",
    ]
    assert relevant_lines(lines, "r7") == lines[:1]
    assert "ValueError: at the bottom" in lines[0]
    assert relevant_lines(lines, "r9") == lines
    logger.removeHandler(errors)
