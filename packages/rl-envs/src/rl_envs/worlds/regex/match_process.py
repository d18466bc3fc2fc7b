"""The process in which `RegexEnvironment` tries regular expressions.

A request has `pattern`, `texts`, `whole` and `from_row`. The reply has `found`, one
bool per text, or the reason why the expression cannot be compiled, as `unreadable` or,
if the response is the expression, as `broken`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["answer"]

_MEMORY_BYTES = 1 << 30


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply to a request."""
    try:
        pattern = re.compile(request["pattern"])
    except (re.error, OverflowError) as error:
        said = f"it is not a regular expression: {error}"
        return {"unreadable" if request["from_row"] else "broken": said}
    find = pattern.fullmatch if request["whole"] else pattern.search
    return {"found": [find(text) is not None for text in request["texts"]]}


def _main() -> None:
    # The package of this file, even if the caller's sys.path is not inherited.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from rl_envs.limited_server import run_server  # noqa: PLC0415

    example = {"pattern": "a", "texts": ["a"], "whole": True, "from_row": True}
    run_server(answer, example, memory_bytes=_MEMORY_BYTES)


if __name__ == "__main__":
    _main()
