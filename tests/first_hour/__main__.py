"""A new user's first hour, in an 80-column terminal on the installed wheels.

`nox -s first_hour` builds the wheels and installs them; `python -m tests.first_hour
--python .venv/bin/python` uses what is installed there. Each step reports its duration
relative to `import torch, ray` in the same environment; the bounds are wide, as they
should find only what is many times too slow, even on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.first_hour.walk import MARK, Walk

STEPS = (
    "doctor", "make_files", "typo", "train", "resume", "second_run", "evaluate",
    "generate", "start", "compare", "sft", "dpo", "serve",
)  # fmt: skip


def installed(scratch: Path) -> Path:
    """Build the wheels and install the command; return its Python."""
    from tools.wheels import build, install, wheel_of  # noqa: PLC0415

    build()
    return install(scratch / "venv", str(wheel_of("rl-cli")), "openai")


def main() -> None:
    """Run all steps, and print the duration of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="Python with rl-cli installed.")
    parser.add_argument("--step", action="append", choices=STEPS, help="Only these.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hour") as name:
        scratch = Path(name)
        # A link to another Python must remain one: it names the environment.
        python = options.python.absolute() if options.python else installed(scratch)
        home, temp = scratch / "home", scratch / "t"
        home.mkdir()
        temp.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RL_", "PY"))}
        env.pop("VIRTUAL_ENV", None)
        env |= {
            "HOME": str(home), "TMPDIR": str(temp), "TERM": "xterm-256color",
            "PATH": os.pathsep.join([str(python.parent), env["PATH"]]),
            MARK: f"{os.getpid()}-{time.time_ns()}",
        }  # fmt: skip
        for variable in ("COLUMNS", "NO_COLOR", "CI"):
            env.pop(variable, None)
        folder = scratch / "work"
        folder.mkdir()
        walk = Walk(python, folder, temp, env)
        for step in STEPS:
            if not options.step or step in (*options.step, "make_files"):
                began_s = time.monotonic()
                getattr(walk, step)()
                walk.check_nothing_is_left(step)
                sys.stdout.write(f"{step}: done, {time.monotonic() - began_s:.1f} s\n")
                sys.stdout.flush()
        sys.stdout.write(f"{walk.kept_by_ray()}\n")


if __name__ == "__main__":
    main()
