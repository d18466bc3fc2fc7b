"""The process in which `JudgePool` compares mathematical answers.

Runs as a script and imports only sympy and `rl_envs.mathematics`. A request has
`solution` and optionally `response`. The reply has `correct` and `answer`; `readable`
if there is no response; or `unreadable`, the reason why the solution cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["answer"]

_MEMORY_BYTES = 4 << 30


def judge(response: str | None, solution: str) -> dict[str, Any]:
    """Compare a response with a solution, or only read the solution."""
    # Not at the top: run_server reports a failed import of sympy as `cannot_start`.
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


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply to a request."""
    return judge(request.get("response"), request["solution"])


def _main() -> None:
    # The package of this file, even if the caller's sys.path is not inherited.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from rl_envs.limited_server import run_server  # noqa: PLC0415

    example = {"response": "1", "solution": "1.0"}
    run_server(answer, example, memory_bytes=_MEMORY_BYTES)


if __name__ == "__main__":
    _main()
