"""The folder of a run: a new one, or that of the run to resume."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rl_algorithms.trainers.run.record import RUN_RECORDS
from rl_algorithms.trainers.run.weight_log import WEIGHT_VERSIONS
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
from rl_distributed.timing.timeline_file import TIMELINE

__all__ = ["CHECKPOINTS", "Resume", "RunPlace", "find_resume"]

Resume = bool | str | Path
"""False for a new run. True for the newest checkpoint of `output_dir`, which must
exist; "auto" for the same, or a new run if there is none. A path for that checkpoint,
or for the newest one of that run folder."""

_STEP = re.compile(r"step_\d+")
_ROOT = Path("runs")
_WRITES = (
    CHECKPOINTS,
    "metrics.jsonl",
    "result.json",
    *RUN_RECORDS,
    "logs",
    "recording",
    REQUESTS,
    UPDATES,
    TIMELINE,
    WEIGHT_VERSIONS,
)


@dataclass(frozen=True)
class RunPlace:
    """The folder of a run and the checkpoint that it resumes."""

    claim: RunClaim
    """Claim on the folder until the run ends."""
    checkpoint: Path | None = None
    """The checkpoint to resume from; None for a new run."""

    @staticmethod
    def check(config: TrainerConfig, *, resume: Resume, overwrite: bool) -> None:
        """Raise the errors of `find`, before anything is loaded.

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
        """Return a folder that is already claimed, with the checkpoint to resume."""
        checkpoint = find_resume(claim.path, resume, config.checkpointing)
        return cls(claim, checkpoint)

    @classmethod
    def find(
        cls, config: TrainerConfig, name: str, *, resume: Resume, overwrite: bool
    ) -> RunPlace:
        """Create the folder of a new run, or find that of a run to resume; claim it.

        Args:
            config: Configuration that may name the folder; otherwise it is
                `runs/<name>-NNN`.
            name: Name of the run.
            resume: Run to resume.
            overwrite: Whether a new run may remove another one from `output_dir`.

        Raises:
            ConfigError: There is nothing to resume, the folder holds the progress of
                another run, another process uses it, or it is not writable.
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
                    f"output_dir: no folder can be created in {_ROOT.absolute()}: "
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
    """Return the checkpoint to resume, or None for a new run.

    Args:
        output_dir: Folder of the run; None for the newest `runs/<name>-NNN`.
        resume: Run to resume.
        checkpointing: Settings of the checkpoints.
        name: Name of the run.

    Raises:
        ConfigError: There is nothing to resume.
    """
    if resume is False:
        return None
    if resume is True or resume == "auto":
        # The newest run may have ended before its first checkpoint.
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
    """Return the folder of the run that wrote a checkpoint."""
    above = checkpoint.parent
    # Checkpoints outside of the run folder do not tell which run wrote them.
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
    """Return the folders of runs that may be resumed, newest first."""
    if output_dir is not None:
        return [Path(output_dir).expanduser().absolute()]
    # Sorted as numbers: as text, run 10 would come before run 9.
    numbered = []
    for path in _ROOT.absolute().glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdigit():
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered, reverse=True)]
