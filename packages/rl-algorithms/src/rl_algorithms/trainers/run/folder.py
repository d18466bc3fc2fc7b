"""Where a run writes: a folder of its own, or that of the run it resumes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rl_algorithms.trainers.run.record import RUN_RECORDS
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.config_updates import UPDATES
from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.errors import ConfigError
from rl_distributed.runs.folder import (
    CHECKPOINTS,
    RunClaim,
    begin_run,
    check_run_folder,
    new_run_folder,
    own_run_folder,
    refuse_contradiction,
)
from rl_distributed.runs.requests import REQUESTS

__all__ = ["CHECKPOINTS", "Resume", "RunPlace", "find_resume"]

Resume = bool | str | Path
"""False: a new run. True: the newest checkpoint of `output_dir`, an error where there
is none. "auto": the same, but a new run where there is none. A path: that checkpoint,
or the newest one of that run folder."""

_STEP = re.compile(r"step_\d+")
_ROOT = Path("runs")
_WRITES = (
    CHECKPOINTS,
    "metrics.jsonl",
    "result.json",
    *RUN_RECORDS,
    "logs",
    REQUESTS,
    UPDATES,
)


@dataclass(frozen=True)
class RunPlace:
    """The folder of a run and the checkpoint it goes on from."""

    claim: RunClaim
    """What owns the folder until the run ends."""
    checkpoint: Path | None = None
    """The checkpoint to resume from; None for a new run."""

    @staticmethod
    def check(config: TrainerConfig, *, resume: Resume, overwrite: bool) -> None:
        """Find what `find` would refuse, before anything is loaded.

        Raises:
            ConfigError: See `find`.
        """
        given = config.output_dir
        refuse_contradiction(
            overwrite=overwrite, resumes=resume is not False, output_dir=given
        )
        if given is not None and resume is False:
            check_run_folder(
                Path(given).expanduser().absolute(),
                overwrite=overwrite,
                writes=_WRITES,
                config=config.to_dict(),
            )

    @classmethod
    def of(cls, claim: RunClaim, config: TrainerConfig, *, resume: Resume) -> RunPlace:
        """Take a folder that its maker owns, and the checkpoint to go on from."""
        checkpoint = find_resume(claim.path, resume, config.checkpointing)
        return cls(claim, checkpoint)

    @classmethod
    def find(
        cls, config: TrainerConfig, name: str, *, resume: Resume, overwrite: bool
    ) -> RunPlace:
        """Make the folder of a new run, or find that of the run to go on with; own it.

        Args:
            config: Names the folder; where it names none it is `runs/<name>-NNN`.
            name: Of the run.
            resume: Which run to go on with.
            overwrite: Whether a new run may remove another one from `output_dir`.

        Raises:
            ConfigError: There is nothing to resume from, the folder holds progress of
                another run, another process uses it, or it cannot be written.
        """
        cls.check(config, resume=resume, overwrite=overwrite)
        output_dir = config.output_dir
        checkpoint = find_resume(output_dir, resume, config.checkpointing, name=name)
        if checkpoint is not None:
            return cls(own_run_folder(_folder_of(checkpoint, config, name)), checkpoint)
        if output_dir is not None:
            path = Path(output_dir).expanduser().absolute()
        else:
            try:
                path = new_run_folder(_ROOT.absolute(), name)
            except OSError as error:
                raise ConfigError(
                    f"output_dir: no folder can be made in {_ROOT.absolute()}: "
                    f"{error}; name one that you may write to"
                ) from error
        claim = begin_run(
            path, overwrite=overwrite, writes=_WRITES, config=config.to_dict()
        )
        return cls(claim)


def find_resume(
    output_dir: str | Path | None,
    resume: Resume,
    checkpointing: CheckpointingConfig,
    *,
    name: str = "run",
) -> Path | None:
    """Find the checkpoint to go on from, or None when a new run shall begin.

    Args:
        output_dir: Folder of the run; None: the newest `runs/<name>-NNN`.
        resume: Which run to go on with.
        checkpointing: Which checkpoints count.
        name: Of the run.

    Raises:
        ConfigError: There is nothing to resume from.
    """
    if resume is False:
        return None
    if resume is True or resume == "auto":
        for folder in _candidates(output_dir, name):
            checkpoint = _newest(folder, checkpointing)
            if checkpoint is not None:
                return checkpoint
        if resume == "auto":
            return None
        where = output_dir if output_dir is not None else _ROOT / f"{name}-NNN"
        raise ConfigError(
            f"resume: no checkpoint in {Path(where).absolute() / CHECKPOINTS}; leave "
            "resume out to begin a new run, or give the path of a run folder"
        )
    path = Path(resume).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"resume: {path} is not a folder; give a run folder or one of its "
            f"{CHECKPOINTS}/step_N folders"
        )
    if _STEP.fullmatch(path.name):
        return path
    checkpoint = _newest(path, checkpointing)
    if checkpoint is None:
        raise ConfigError(
            f"resume: no checkpoint in {path / CHECKPOINTS}; the run was ended before "
            "its first one"
        )
    return checkpoint


def _folder_of(checkpoint: Path, config: TrainerConfig, name: str) -> Path:
    """Return the folder of the run that has written a checkpoint."""
    above = checkpoint.parent
    elsewhere = config.checkpointing.checkpoint_dir
    if elsewhere is not None and above == Path(elsewhere).absolute():
        folders = _candidates(config.output_dir, name)
        if folders:
            return folders[0]
    return above.parent if above.name == CHECKPOINTS else above


def _newest(folder: Path, checkpointing: CheckpointingConfig) -> Path | None:
    manager = CheckpointManager(checkpointing, folder / CHECKPOINTS)
    return manager.get_latest_checkpoint_path()


def _candidates(output_dir: str | Path | None, name: str) -> list[Path]:
    """Return the folders of the runs to go on with, the newest first."""
    if output_dir is not None:
        return [Path(output_dir).expanduser().absolute()]
    numbered = []
    for path in _ROOT.absolute().glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdigit():
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered, reverse=True)]
