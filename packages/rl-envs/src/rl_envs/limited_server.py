"""The process of `LimitedCalls`: it answers requests, one line of JSON each.

A script calls `run_server`. It is run with `-P` and imports little, so that it is up
quickly and never imports the program that asks. Each line of its input is a JSON object
with `limit_s`, in seconds, and what the script's function takes; each reply is the
object that the function returned, or has `failed` where it raised. A request may take
forever, or all memory: the process is ended by its own alarm, and its memory is
limited, so that it outlives neither its limit nor its parent.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeAlias

__all__ = ["Answerer", "answer_request", "run_server", "serve"]

Answerer: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns the reply to a request; both hold what JSON has."""


def answer_request(request: Mapping[str, Any], answer: Answerer) -> Mapping[str, Any]:
    """Return the reply to one request; whatever is raised is a failure.

    Args:
        request: One line of the input.
        answer: Makes the reply.
    """
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    try:
        return answer(request)
    except Exception as error:
        # A response may be made to fail here: that must never be worth a reward.
        return {"failed": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def serve(
    requests: TextIO, replies: TextIO, answer: Answerer, example: Mapping[str, Any]
) -> None:
    """Answer one line after the other until there are no more.

    Args:
        requests: The input.
        replies: The output.
        answer: Makes a reply.
        example: A request that is tried first: it imports what is needed.
    """

    def say(reply: Mapping[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
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
    """Answer the requests of standard input, within limits.

    Args:
        answer: Makes a reply.
        example: As for `serve`.
        memory_bytes: Address space of the process.
    """
    # Ctrl-C is for the program that asks; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    logging.disable()
    serve(sys.stdin, sys.stdout, answer, example)
