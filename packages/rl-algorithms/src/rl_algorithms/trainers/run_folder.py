"""Where a run writes: a folder of its own, or that of the run it resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.errors import ConfigError, LockHeldError
from rl_distributed.file_lock import FolderLock
from rl_distributed.private_files import make_private_folder

__all__ = [
    "Resume",
    "RunFolder",
    "claim_run_folder",
    "find_resume",
    "own_run_folder",
]

Resume = bool | str | Path
"""False: a new run. True: the newest checkpoint of `output_dir`, an error where there
is none. "auto": the same, but a new run where there is none. A path: that checkpoint,
or the newest one of that run folder."""

_STEP = re.compile(r"step_\d+")
_CLAIM = ".run"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the checkpoint it goes on from."""

    path: Path
    """The folder."""
    checkpoint: Path | None = None
    """The checkpoint to resume from; None for a new run."""


def claim_run_folder(output_dir: str | Path) -> Path:
    """Make a folder, for its owner alone, that no other run has and return it.

    It is `output_dir` itself when that is new or empty, else `output_dir-2`, `-3`, ...
    Two runs that start at once get two folders: making the marker file is atomic.

    Raises:
        ConfigError: The folder cannot be made.
    """
    base = Path(output_dir).expanduser().absolute()
    for candidate in _family(base):
        try:
            make_private_folder(candidate)
            if any(candidate.iterdir()):
                continue
            (candidate / _CLAIM).touch(exist_ok=False)
        except FileExistsError:
            if candidate.is_dir():
                continue
            raise ConfigError(
                f"output_dir: {candidate} is a file; name a folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"output_dir: {candidate} cannot be made: {error}; name a folder that "
                "you may write to"
            ) from error
        return candidate
    raise AssertionError("the family of folders is endless")


def find_resume(
    output_dir: str | Path, resume: Resume, checkpointing: CheckpointingConfig
) -> RunFolder | None:
    """Find the run to go on with, or None when a new one shall begin.

    Raises:
        ConfigError: There is nothing to resume from.
    """
    if resume is False:
        return None
    if resume is True or resume == "auto":
        base = Path(output_dir).expanduser().absolute()
        for folder in reversed(list(_existing(base))):
            checkpoint = _newest(folder, checkpointing)
            if checkpoint is not None:
                return RunFolder(folder, checkpoint)
        if resume == "auto":
            return None
        raise ConfigError(
            f"resume: no checkpoint in {base / CHECKPOINTS}; leave resume out to begin "
            "a new run, or give the path of a run folder"
        )
    path = Path(resume).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"resume: {path} is not a folder; give a run folder or one of its "
            f"{CHECKPOINTS}/step_N folders"
        )
    if _STEP.fullmatch(path.name):
        owner = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
        return RunFolder(owner, path)
    checkpoint = _newest(path, checkpointing)
    if checkpoint is None:
        raise ConfigError(
            f"resume: no checkpoint in {path / CHECKPOINTS}; the run was ended before "
            "its first one"
        )
    return RunFolder(path, checkpoint)


def own_run_folder(path: Path) -> FolderLock:
    """Own the folder of a run, so that nobody else trains there.

    Returns:
        The lock; it is held until it is released or this process ends.

    Raises:
        ConfigError: Another process trains there, or the folder cannot be written.
    """
    lock = FolderLock(
        path,
        "resume: another process carries this run out",
        name="run",
        remedy="wait for its end, or end it (SIGTERM saves it) and resume then",
    )
    try:
        lock.acquire()
    except LockHeldError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(
            f"output_dir: {path} cannot be written: {error}; name a folder that you "
            "may write to"
        ) from error
    return lock


def _newest(folder: Path, checkpointing: CheckpointingConfig) -> Path | None:
    manager = CheckpointManager(checkpointing, folder / CHECKPOINTS)
    return manager.get_latest_checkpoint_path()


def _family(base: Path) -> Iterator[Path]:
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def _existing(base: Path) -> Iterator[Path]:
    for folder in _family(base):
        if not folder.is_dir():
            return
        yield folder
