"""Run a command in a terminal that types its input, and Ctrl-C when interrupted.

`printf '\\n' | python -m tools.page_commands.terminal rl init my-run`
"""

from __future__ import annotations

import os
import pty
import signal
import sys

CTRL_C = b"\x03"


def main() -> int:
    """Run the command given by the arguments, and return its exit code."""
    screens: list[int] = []

    def read(screen: int) -> bytes:
        if not screens:
            screens.append(screen)
            signal.signal(signal.SIGINT, lambda *_: os.write(screen, CTRL_C))
        return os.read(screen, 65_536)

    return os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], read))


if __name__ == "__main__":
    raise SystemExit(main())
