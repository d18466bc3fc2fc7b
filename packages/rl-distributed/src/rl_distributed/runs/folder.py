"""The folder of a run: used by one run, and by a new one only with permission.

```
runs/mine/
  .run.lock      held by the process that carries the run out
  .run.started   what lay in the folder before the run, which is never removed; and
                 where its checkpoints are, if they are elsewhere (checkpoint_dir)
  checkpoints/   step_N; a run of several stages has them in stages/<name>/
  result.json    result of a run that has ended
  .run.ended     why a process left the run before its end (`runs.ending`)
  requests/      requests of other processes of the user (`runs.requests`)
```
A folder holds progress when a run has kept a checkpoint there or has ended. A new run
is refused there, unless it may overwrite what the other one has left; a folder without
progress blocks nothing. Imports nothing heavy, so that a command can ask before it
loads anything.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_distributed.errors import ConfigError, LockHeldError, UserError
from rl_distributed.file_lock import FolderLock
from rl_distributed.private_files import create_private_folder, write_private_text
from rl_distributed.runs.ending import ENDED, forget_ending, note_ending

__all__ = [
    "CHECKPOINTS",
    "RunClaim",
    "begin_run",
    "check_run_folder",
    "has_progress",
    "kept_progress",
    "new_run_folder",
    "own_run_folder",
    "refuse_contradiction",
]

CHECKPOINTS = "checkpoints"
_ENDED = ("result.json", "stages/*.json")
_KEPT = (f"{CHECKPOINTS}/step_*", f"stages/*/{CHECKPOINTS}/step_*")
_STEP = re.compile(r"step_\d+")
_STEP_OR_REMAINS = re.compile(r"(tmp_|old_|removed_)?step_\d+")
_LOCK, _STARTED = ".run.lock", ".run.started"
_OWN = {_LOCK, _STARTED, ENDED}
_RUN = ".run.folder"  # in a folder of checkpoints elsewhere: whose they are
_WRITING = {"logger", "checkpointing"}  # sections that name what a run writes


class RunClaim:
    """Exclusive use of a run's folder by one process, for as long as this is held.

    As a context manager it releases the folder at the end. If the run failed by a
    mistake of its user before it made any progress, and the message names no file in
    the folder, the run's files are removed: there is nothing to look at.

    Args:
        path: The folder.
        lock: The lock on it, held.
        is_new: The run has begun here; else it goes on.
    """

    def __init__(self, path: Path, lock: FolderLock, *, is_new: bool) -> None:
        self.path = path
        self._lock = lock
        self._is_new = is_new

    def release(self) -> None:
        """Give the folder back."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if (
                self._is_new
                and self._lock.is_held
                and _leaves_nothing(error, self.path)
            ):
                _clear(self.path)
                for name in _OWN:
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
            elif error is not None and self._lock.is_held:
                note_ending(self.path, error)
        except OSError:
            pass  # something of another one lies there, or it cannot be written
        finally:
            self.release()


def has_progress(path: Path) -> bool:
    """Whether a run has kept a checkpoint in a folder, or has ended there."""
    return bool(kept_progress(path))


def kept_progress(path: Path) -> frozenset[str]:
    """Return the progress of a run in a folder: checkpoints and results of its parts.

    A run that progresses between two calls has something new there.
    """
    ended = [found for pattern in _ENDED for found in path.glob(pattern)]
    return frozenset(map(str, [*ended, *_checkpoints(path)]))


def check_run_folder(
    path: Path,
    *,
    overwrite: bool = False,
    writes: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
) -> None:
    """Check that a new run may begin in a folder.

    Args:
        path: The folder; it need not be there.
        overwrite: Whether what another run has left there may be removed.
        writes: Names of what the run will write that people use too.
        config: Configuration of the run; nothing that it reads may be removed.

    Raises:
        ConfigError: It holds progress, and may not be overwritten; or it is no run's,
            and something of somebody would be removed or written over; or the run
            reads what another one has left there; or its checkpoints would lie among
            those of a run of another folder.
    """
    if not path.is_dir():
        _check_elsewhere(path, config or {})
        return
    if has_progress(path) and not overwrite:
        raise ConfigError(
            f"output_dir {str(path)!r} holds a run already ({_progress(path)}): go on "
            f"with it (--resume {path}, in Python resume=True), start again and delete "
            "it (--overwrite, in Python overwrite=True), or name another folder"
        )
    _check_elsewhere(path, config or {})
    present_before = _present_before(path)
    if not _is_of_run(path):
        present_before = {entry.name for entry in path.iterdir()} - _OWN
        if overwrite and present_before:
            raise ConfigError(
                f"output_dir {str(path)!r} is no folder of a run (it holds "
                f"{_listed(present_before)}): nothing in it is deleted; leave "
                "overwrite out, or name another folder"
            )
    else:
        _check_reads(path.resolve(), present_before | _OWN, config or {})
    lost = present_before & set(writes)
    if lost:
        raise ConfigError(
            f"output_dir {str(path)!r} holds {_listed(lost)}, which no run has written "
            "and a run would write over: name another folder"
        )


def begin_run(
    path: Path,
    *,
    overwrite: bool = False,
    writes: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
) -> RunClaim:
    """Make the folder of a new run, or take one without progress, and own it.

    Files of an earlier run are removed; files from before any run stay.

    Args:
        path: The folder.
        overwrite: Whether progress of another run may be removed.
        writes: See `check_run_folder`.
        config: See `check_run_folder`.

    Raises:
        ConfigError: See `check_run_folder`; or another process uses the folder, or it
            cannot be written.
    """
    check_run_folder(path, overwrite=overwrite, writes=writes, config=config)
    try:
        create_private_folder(path)
    except FileExistsError:
        raise ConfigError(f"output_dir: {path} is a file; name a folder") from None
    except OSError as error:
        raise _not_writable(path, error) from error
    claim = own_run_folder(path, is_new=True)
    try:
        # Another run may have begun, and ended, since it was checked.
        check_run_folder(path, overwrite=overwrite, writes=writes, config=config)
        if _is_of_run(path):
            _clear(path)
            present = _present_before(path)
        else:
            present = {entry.name for entry in path.iterdir()} - _OWN
        _note_start(path, present, _checkpoint_dirs(config or {}))
    except OSError as error:
        claim.release()
        raise _not_writable(path, error) from error
    except ConfigError:
        claim.release()
        raise
    return claim


def new_run_folder(root: Path, name: str) -> Path:
    """Make a new folder `<root>/<name>-NNN`, the number after the highest one.

    Raises:
        OSError: It cannot be made.
    """
    taken = [path.name.removeprefix(f"{name}-") for path in root.glob(f"{name}-*")]
    number = max((int(text) for text in taken if text.isdigit()), default=0) + 1
    while True:
        path = root / f"{name}-{number:03d}"
        try:
            create_private_folder(path, is_new=True)
        except FileExistsError:  # another run took it in this very moment
            number += 1
            continue
        return path


def own_run_folder(path: Path, *, is_new: bool = False) -> RunClaim:
    """Claim the folder of a run, so that no other process works there.

    Args:
        path: The folder.
        is_new: The run begins; else it goes on.

    Raises:
        ConfigError: Another process carries the run out; the message names it. Or the
            folder cannot be written.
    """
    lock = FolderLock(
        path,
        "another process carries this run out",
        name="run",
        remedy="wait for its end, or end it (Ctrl-C or SIGTERM saves it) and resume "
        "then, or name another folder",
    )
    try:
        lock.acquire()
    except LockHeldError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise _not_writable(path, error) from error
    # Only once the lock is held: until then the note belongs to another process.
    forget_ending(path)
    return RunClaim(path, lock, is_new=is_new)


def refuse_contradiction(
    *, overwrite: bool, resumes: bool, output_dir: object | None
) -> None:
    """Check that a run that may overwrite another one can.

    Raises:
        ConfigError: It goes on with one, or gets a new folder.
    """
    if overwrite and resumes:
        raise ConfigError(
            "resume goes on with a run, and overwrite deletes it: give one of them"
        )
    if overwrite and output_dir is None:
        raise ConfigError(
            "overwrite needs the folder that may be overwritten: add "
            "output_dir=FOLDER; without it each run gets a new folder"
        )


def _check_reads(
    folder: Path, stays: Iterable[str], config: Mapping[str, Any], above: str = ""
) -> None:
    """Refuse a configuration that names something that is about to be removed."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key not in _WRITING:
                _check_reads(folder, stays, value, f"{above}{key}.")
            continue
        for text in value if isinstance(value, list) else (value,):
            # Linux paths have at most 4096 characters, and resolving
            # longer text would fail.
            if not isinstance(text, str | Path) or not text or len(str(text)) > 4096:
                continue
            path = Path(text).expanduser().resolve()
            inside = path.parts[len(folder.parts) :]
            if not path.is_relative_to(folder) or not inside or inside[0] in stays:
                continue
            if path.exists():
                raise ConfigError(
                    f"{above}{key} names {text}, which lies in output_dir "
                    f"({folder}) and would be deleted before the run could read it: "
                    "name another output_dir"
                )


def _is_of_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (_STARTED, "run.json"))


def _present_before(path: Path) -> set[str]:
    """Return the names that lay in the folder before its first run.

    Raises:
        ConfigError: The note of them is damaged, so that nothing may be removed.
    """
    try:
        found = json.loads((path / _STARTED).read_text())["present_before"]
        return {str(name) for name in found}
    except FileNotFoundError:
        return set()
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"output_dir {str(path)!r}: {_STARTED} is damaged, which names what lay "
            "there before the run, so nothing in it is deleted: name another folder, "
            "or move what you need and delete this one"
        ) from None


def _note_start(path: Path, present: Iterable[str], elsewhere: Iterable[Path]) -> None:
    noted = {
        "present_before": sorted(present),
        "checkpoint_dirs": sorted(map(str, elsewhere)),
    }
    for folder in elsewhere:
        create_private_folder(folder)
        write_private_text(folder / _RUN, str(path.resolve()))
    # Whole or not at all: with an empty note, what lay there before would be taken for
    # a run's and removed.
    write_private_text(path / _STARTED, json.dumps(noted))


def _elsewhere(path: Path) -> set[Path]:
    """Return the folders outside of it where its run keeps checkpoints."""
    try:
        found = json.loads((path / _STARTED).read_text())["checkpoint_dirs"]
        return {Path(name) for name in found if _is_of(Path(name), path)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _is_of(checkpoint_dir: Path, path: Path) -> bool:
    # A run of another folder may have taken it since, when there was nothing in it.
    try:
        return (checkpoint_dir / _RUN).read_text("utf-8") == str(path.resolve())
    except (OSError, ValueError):
        return False


def _checkpoint_dirs(config: Mapping[str, Any]) -> set[Path]:
    """Return the folders that the sections `checkpointing` of a run name."""
    found: set[Path] = set()
    for key, value in config.items():
        if not isinstance(value, Mapping):
            continue
        name = value.get("checkpoint_dir")
        if key == "checkpointing" and isinstance(name, str) and name:
            found.add(Path(name).absolute())
        found |= _checkpoint_dirs(value)
    return found


def _check_elsewhere(path: Path, config: Mapping[str, Any]) -> None:
    for folder in sorted(_checkpoint_dirs(config) - _elsewhere(path)):
        if steps := _steps_in(folder.glob("step_*")):
            raise ConfigError(
                f"checkpointing.checkpoint_dir {str(folder)!r} holds checkpoints of "
                f"another run (newest: step {max(steps)}), among which those of a new "
                "run would lie: go on with that run, or name another folder"
            )


def _clear(path: Path) -> None:
    """Remove what runs have written, the mark of the folder last."""
    for folder in _elsewhere(path):
        for entry in folder.glob("*step_*"):
            if _STEP_OR_REMAINS.fullmatch(entry.name) and entry.is_dir():
                shutil.rmtree(entry)
    stays = _present_before(path) | _OWN
    for entry in path.iterdir():
        if entry.name in stays:
            continue
        # Remove only the link itself; its target lies elsewhere.
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _leaves_nothing(error: BaseException | None, path: Path) -> bool:
    if not isinstance(error, UserError) or has_progress(path):
        return False
    said = [str(error), *getattr(error, "__notes__", [])]
    return not any(str(path) in text for text in said)


def _progress(path: Path) -> str:
    if any(True for pattern in _ENDED for _ in path.glob(pattern)):
        return "it has a result"
    return f"newest checkpoint: step {max(_steps(path))}"


def _steps(path: Path) -> list[int]:
    """Return the steps of all checkpoints of the folder's run."""
    return _steps_in(_checkpoints(path))


def _checkpoints(path: Path) -> list[Path]:
    inside = [step for pattern in _KEPT for step in path.glob(pattern)]
    outside = [step for folder in _elsewhere(path) for step in folder.glob("step_*")]
    return [found for found in [*inside, *outside] if _STEP.fullmatch(found.name)]


def _steps_in(folders: Iterable[Path]) -> list[int]:
    return [
        int(found.name.removeprefix("step_"))
        for found in folders
        if _STEP.fullmatch(found.name)
    ]


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"output_dir: the run folder {path} cannot be written: "
        f"{error.strerror or error}; name one that you may write to, as in "
        "output_dir=FOLDER"
    )
