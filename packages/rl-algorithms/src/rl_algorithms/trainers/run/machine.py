"""The command line and the machine that a run was started with."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rl_distributed.redaction import REDACTED, hide_values, is_secret_name, redacted
from rl_distributed.workers.thread_count import usable_cores

__all__ = ["command_line", "machine_facts"]

_GPUS = Path("/proc/driver/nvidia/gpus")


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Return the command that started this process, as a shell reads it.

    Secrets are hidden: values of options and keys with the name of a secret, values
    that look like one, and those that the process environment holds.

    Args:
        arguments: The program and its arguments; by default those of this process.
    """
    program, *rest = sys.argv if arguments is None else arguments
    shown = [Path(program).name or "python", *_without_secrets(rest)]
    return hide_values(shlex.join(shown))


def _without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        key = name.lstrip("-").rpartition(".")[2].replace("-", "_")
        if is_secret and not argument.startswith("-"):
            yield REDACTED
        elif equals and is_secret_name(key):
            yield f"{name}={REDACTED}"
        else:
            yield str(redacted(argument))
        # The value of `--token VALUE` is the next argument.
        is_secret = not equals and name.startswith("-") and is_secret_name(key)


def machine_facts(gpus: Path = _GPUS) -> dict[str, Any]:
    """Return `system`, `cores` that may be used, `memory_bytes` and names of `gpus`.

    They describe the machine of this process; workers may run on others.

    Args:
        gpus: Folder in which the driver describes the GPUs; missing without GPUs.
    """
    return {
        "system": platform.platform(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [_model(path) for path in sorted(gpus.glob("*/information"))],
    }


def _model(path: Path) -> str:
    # From the driver's files: asking a library would open a context on every GPU.
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line[:6] == "Model:")
    return next(found, "unknown")
