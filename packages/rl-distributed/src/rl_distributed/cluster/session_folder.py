"""The folder in which the local clusters of this user keep logs and sockets.

Ray makes the folder of a session readable and writable for everybody, each of its
processes again. So it lies in a folder that only its owner can enter:

```
/tmp/ray-1000/        0700, of the user with this number; RAY_TMPDIR or TMPDIR for /tmp
  ray/session_<time>_<process>/{logs,sockets,...}
```
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rl_distributed.errors import ConfigError, SecurityError
from rl_distributed.private_files import create_private_folder

__all__ = ["check_session_folder", "create_session_folder"]

# The kernel's limit for the path of a socket, without the byte at its end.
_LONGEST_SOCKET = 107
# With the largest process id of Linux, 2^22.
_LONGEST_SOCKET_NAME = "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def check_session_folder() -> Path:
    """Check that a local cluster can be started, as far as its folder decides that.

    Imports nothing of Ray, so that a program can ask before it loads anything.

    Returns:
        The folder of this user, which may have to be made.

    Raises:
        ConfigError: its path is too long for sockets, or it cannot be written.
        SecurityError: it belongs to another user.
    """
    variable, base = _base()
    folder = base / f"ray-{os.getuid()}"
    socket = folder / "ray" / _LONGEST_SOCKET_NAME
    excess = len(os.fsencode(socket)) - _LONGEST_SOCKET
    if excess > 0:
        raise ConfigError(
            f"{variable or 'the folder'} {str(base)!r} is {excess} characters too long "
            f"for Ray: a socket in it may have {_LONGEST_SOCKET}; set RAY_TMPDIR to a "
            "shorter folder on a local disk, such as /tmp"
        )
    try:
        # Not `stat`: a link could lead to a folder chosen by another user.
        found = folder.lstat()
    except FileNotFoundError:
        _check_writable(variable, base)
        return folder
    except OSError as error:
        raise ConfigError(_not_usable(variable, base, str(error))) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SecurityError(
            f"{folder} is to hold the sessions of Ray of user {os.getuid()}, and "
            f"belongs to user {found.st_uid} or is no folder; remove it, or set "
            "RAY_TMPDIR to a folder of your own"
        )
    _check_writable(variable, folder)
    return folder


def create_session_folder() -> Path:
    """Make the folder that is given to Ray for its sessions.

    Raises:
        ConfigError: as `check_session_folder`.
        SecurityError: likewise.
    """
    folder = check_session_folder()
    try:
        create_private_folder(folder)
        # An existing folder may have other permissions from an earlier umask.
        folder.chmod(stat.S_IRWXU)
    except OSError as error:
        variable, base = _base()
        raise ConfigError(_not_usable(variable, base, str(error))) from error
    # Somebody else may have made it in between; nobody can replace it from here on.
    check_session_folder()
    return folder / "ray"


def _base() -> tuple[str, Path]:
    """Return the variable that names the folder for temporary files, and the folder."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if os.environ.get(variable):
            return variable, Path(os.environ[variable]).absolute()
    return "", Path("/tmp")


def _check_writable(variable: str, folder: Path) -> None:
    if not folder.exists():
        parent = folder.parent
        while not parent.exists():
            parent = parent.parent
        folder = parent
    if not folder.is_dir():
        raise ConfigError(_not_usable(variable, folder, "it is no folder"))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(_not_usable(variable, folder, "it is not writable"))


def _not_usable(variable: str, folder: Path, why: str) -> str:
    named = f" ({variable})" if variable else ""
    return (
        f"Ray cannot keep its session in {folder}{named}: {why}; set RAY_TMPDIR to a "
        "folder on a local disk that you may write to"
    )
