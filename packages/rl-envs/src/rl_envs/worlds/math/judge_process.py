"""One process that compares mathematical answers; `JudgePool` starts it.

It is run as a script that needs the standard library and math-verify only, so that it
is up quickly and never imports the program that asks. Per line of its input, a JSON
object with `response`, `ground_truth` and `limit_s`, it writes one with `correct` and
`answer`. A comparison may take forever, or all memory: the process is ended by its own
alarm, and its memory is limited, so that it neither outlives its limit nor its parent.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from typing import Any, TextIO

__all__ = ["compare", "serve"]

_MEMORY_BYTES = 4 << 30
_SHOWN_CHARACTERS = 200
# The solutions of GSM8K end with it.
_GSM8K_MARK = "####"
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+%?")


def compare(response: str, ground_truth: str) -> tuple[bool, str | None]:
    """Compare the last answer in a response with the solution.

    Args:
        response: Text; an answer in `\\boxed{}` counts before others.
        ground_truth: The solution: LaTeX with or without delimiters, a number, or a
            text whose answer follows `####`.

    Returns:
        Whether they mean the same, and the answer that was found.
    """
    from math_verify import (  # noqa: PLC0415
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    if response.strip() == ground_truth.strip():
        return True, response.strip()[:_SHOWN_CHARACTERS]
    both = [LatexExtractionConfig(), ExprExtractionConfig()]
    found = parse(response, both, parsing_timeout=None)
    answer = str(found[-1])[:_SHOWN_CHARACTERS] if found else None
    truth = _solution(ground_truth)
    gold = parse(truth, both, parsing_timeout=None)
    # The solution comes first: the comparison is not symmetric.
    same = bool(gold and found) and bool(verify(gold, found, timeout_seconds=None))
    return same, answer


def _solution(text: str) -> str:
    """Mark a bare solution as one, as the parser finds no LaTeX without delimiters."""
    text = text.rpartition(_GSM8K_MARK)[2].strip()
    is_marked = "$" in text or r"\boxed" in text or r"\[" in text or r"\(" in text
    if is_marked or _NUMBER.fullmatch(text):
        return text
    return rf"\boxed{{{text}}}"


def _answer_one(request: dict[str, Any]) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    try:
        correct, answer = compare(request["response"], request["ground_truth"])
    except (MemoryError, RecursionError) as error:
        return {"failed": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return {"correct": correct, "answer": answer}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer one line after the other until there are no more."""

    def say(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        compare("1", "1.0")
    except ImportError as error:
        say({"cannot_start": str(error)})
        return
    say({"ready": True})
    for line in requests:
        say(_answer_one(json.loads(line)))


def _main() -> None:
    # Ctrl-C is for the program that asks; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable()
    serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    _main()
