"""The process in which `JsonSchemaEnvironment` checks JSON.

Runs as a script and imports only jsonschema and `rl_envs.json_checks`; requests and
replies are those of `check_json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["answer"]

_MEMORY_BYTES = 1 << 30


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply to a request."""
    from rl_envs.json_checks import check_json  # noqa: PLC0415

    return check_json(request)


def _main() -> None:
    # The package of this file, even if the caller's sys.path is not inherited.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from rl_envs.limited_server import run_server  # noqa: PLC0415

    example = {"schema": '{"type": "object"}', "text": "{}"}
    run_server(answer, example, memory_bytes=_MEMORY_BYTES)


if __name__ == "__main__":
    _main()
