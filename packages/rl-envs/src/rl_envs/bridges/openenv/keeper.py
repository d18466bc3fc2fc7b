"""The process that runs a server and ends it when its owner is gone.

Standard input is a pipe whose other end the owner holds: it closes when the owner ends,
in whatever way. Standard library only, as it is run as a script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

__all__: list[str] = []

_END_S = 5.0


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _end_with_owner(server: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    _end(server)


def _main() -> int:
    try:
        server = subprocess.Popen(
            sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 127
    threading.Thread(target=_end_with_owner, args=(server,), daemon=True).start()
    code = server.wait()
    # Its children may have been left.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    # Without waiting for the thread, which may be reading.
    sys.stdout.flush()
    os._exit(_main())
