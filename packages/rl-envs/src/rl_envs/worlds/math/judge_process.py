"""One process that compares mathematical answers; `JudgePool` starts it.

It is run as a script and imports sympy and `rl_envs.mathematics` only, so that it is up
quickly and never imports the program that asks. Per line of its input, a JSON object
with `solution`, `limit_s` and perhaps `response`, it writes one: with `correct` and
`answer`; with `readable` where there is no response; with `unreadable`, the reason, for
a solution without a meaning; with `failed` where the comparison raised. A comparison
may take forever, or all memory: the process is ended by its own alarm, and its memory
is limited, so that it neither outlives its limit nor its parent.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

__all__ = ["answer_request", "serve"]

_MEMORY_BYTES = 4 << 30


def judge(response: str | None, solution: str) -> dict[str, Any]:
    """Compare a response with a solution, or only read that."""
    from rl_envs.mathematics.judging import judge_answer, read_solution  # noqa: PLC0415
    from rl_envs.mathematics.values import Unreadable  # noqa: PLC0415

    try:
        if response is None:
            read_solution(solution)
            return {"readable": True}
        verdict = judge_answer(response, solution)
    except Unreadable as error:
        return {"unreadable": str(error)}
    return {"correct": verdict.correct, "answer": verdict.answer}


def answer_request(
    request: dict[str, Any],
    judge: Callable[[str | None, str], dict[str, Any]] = judge,
) -> dict[str, Any]:
    """Return the reply to one request; whatever the judge raises is a failure.

    Args:
        request: One line of the input.
        judge: Compares, or reads the solution where there is no response.
    """
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    try:
        return judge(request.get("response"), request["solution"])
    except Exception as error:
        # An answer may be made to fail here: that must never be worth a reward.
        return {"failed": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer one line after the other until there are no more."""

    def say(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        judge("1", "1.0")
    except ImportError as error:
        say({"cannot_start": str(error)})
        return
    say({"ready": True})
    for line in requests:
        say(answer_request(json.loads(line)))


def _main() -> None:
    # Ctrl-C is for the program that asks; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable()
    # The package that this file is of, wherever the program that asks found it.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    _main()
