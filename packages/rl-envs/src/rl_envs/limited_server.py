"""The process of `LimitedCalls`, which answers requests of one line of JSON each.

A script calls `run_server`. It runs with `-P` and imports little, so that it starts
quickly and never imports the calling program. Each line of its input is a JSON object
with `limit_s`, in seconds, and the input of the script's function; each reply is the
object returned by the function, or has `failed` if it raised. As a request may take
forever or exhaust memory, an alarm ends the process at its limit, its memory is
limited, and it exits when its input closes.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeAlias

__all__ = ["Answerer", "answer_request", "run_server", "serve"]

Answerer: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function from a request to its reply, both of JSON values."""


def answer_request(request: Mapping[str, Any], answer: Answerer) -> Mapping[str, Any]:
    """Return the reply to one request, turning any exception into a failure.

    Args:
        request: One line of the input.
        answer: Function that computes the reply.
    """
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    try:
        return answer(request)
    except Exception as error:
        # A response may provoke an exception on purpose; it must never earn a reward.
        return {"failed": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def serve(
    requests: TextIO, replies: TextIO, answer: Answerer, example: Mapping[str, Any]
) -> None:
    """Answer the lines of the input one by one until it ends.

    Args:
        requests: The input.
        replies: The output.
        answer: Function that computes a reply.
        example: A request to try first, which triggers all imports.
    """

    def say(reply: Mapping[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        # Importing takes longer than a request may, so it happens before the first one.
        answer(example)
    except ImportError as error:
        say({"cannot_start": str(error)})
        return
    say({"ready": True})
    for line in requests:
        say(answer_request(json.loads(line), answer))


def run_server(
    answer: Answerer, example: Mapping[str, Any], *, memory_bytes: int
) -> None:
    """Answer the requests on standard input, within limits.

    Args:
        answer: Function that computes a reply.
        example: As for `serve`.
        memory_bytes: Address space of the process.
    """
    # Ctrl-C is handled by the caller; this process ends when its input closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The default action kills the process even inside native code, where a Python
    # handler would not run until the call returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Standard output carries replies only, and nobody reads the log of this process.
    logging.disable()
    # What the code below prints must not be read as a reply.
    with os.fdopen(os.dup(1), "w") as replies:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        serve(sys.stdin, replies, answer, example)
