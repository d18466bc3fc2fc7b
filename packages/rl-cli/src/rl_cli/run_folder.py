"""The folder of a run: what lies where, so that a run can be resumed and read.

```
runs/quickstart-001/    readable by its owner only
  run.json              what the run is, without secrets; with it the run is made again
  config.yaml           the same for people, resolved
  model/                the model with random weights, when the run builds one
  checkpoints/ metrics.jsonl validation_samples.jsonl rollouts/     of the trainer
  updates.jsonl requests/                                 likewise
  stages/<name>/        a recipe's: these of each stage's trainer, and its result.json
  stages/<name>.json    result of a stage that has ended
  logs/run.jsonl        log lines of this process; worker files lie beside it
  result.json curve.png samples.json     the report
```
`rl_distributed.runs.folder` says whose the folder is, and when a run may begin there.

Imports nothing heavy: what is wrong with a folder is said before anything is loaded.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from rl_algorithms.trainers.run.record import write_run_record
from rl_distributed.errors import ConfigError
from rl_distributed.private_files import make_private_folder, private_opener
from rl_distributed.runs.folder import (
    RunClaim,
    begin_run,
    check_run_folder,
    has_progress,
    new_run_folder,
    own_run_folder,
)

__all__ = ["RunFolder", "check_output_dir", "check_writable", "to_yaml"]

# Names that people use as well.
_WRITES = (
    "config.yaml",
    "run.json",
    "result.json",
    "model",
    "stages",
    "logs",
    "checkpoints",
    "metrics.jsonl",
    "requests",
    "updates.jsonl",
)


class RunFolder:
    """Paths and small files of one run.

    Args:
        path: The folder; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._claim: RunClaim | None = None

    @classmethod
    def create(
        cls,
        name: str,
        output_dir: str | None,
        source: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> RunFolder:
        """Make the folder of a new run, own it, and write what the run is.

        Args:
            name: Of the recipe or algorithm.
            output_dir: The folder; None: a new one below `runs`.
            source: What `run_from_dict` makes the run of again.
            overwrite: Delete the run that `output_dir` holds, if it holds one.

        Raises:
            ConfigError: The folder holds a run already, or cannot be written.
        """
        path = None
        if output_dir is not None:
            path = check_output_dir(output_dir, overwrite=overwrite)
        try:
            path = path or new_run_folder(Path("runs"), name)
            claim = begin_run(
                path.resolve(),
                overwrite=overwrite,
                writes=_WRITES,
                config=source["config"],
            )
            folder = cls(path)
            folder._claim = claim
            if source["kind"] == "recipe":
                make_private_folder(folder.path / "stages")
            write_run_record(folder.path, source)
        except OSError as error:
            raise _not_writable(path or Path("runs").absolute(), error) from error
        return folder

    @classmethod
    def find(cls, name: str, given: str | None) -> RunFolder:
        """Find the run to resume: the folder given, or the newest of that name.

        Raises:
            ConfigError: There is none.
        """
        if given:
            path = Path(given)
            if not (path / "run.json").is_file():
                raise ConfigError(
                    f"{given!r} is not the folder of a run (it has no run.json); give "
                    f"the folder that the run printed at its start."
                )
            return cls(path)
        found = list(Path("runs").glob(f"{Path(name).stem}-*/run.json"))
        if not found:
            raise ConfigError(
                f"There is no run of {name!r} under runs/ to resume; start one without "
                f"--resume, or give its folder: --resume FOLDER."
            )
        # One that failed before it got anywhere is no run to go on with.
        newest = max(
            found, key=lambda p: (has_progress(p.parent), p.stat().st_mtime_ns)
        )
        return cls(newest.parent)

    def own(self) -> None:
        """Own the folder until this process ends, or leaves it as a context manager.

        Raises:
            ConfigError: Another process carries the run out; the message names it. Or
                the folder cannot be written.
        """
        self._claim = own_run_folder(self.path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._claim is not None:
            self._claim.__exit__(kind, error, trace)

    def source(self, name: str, overrides: Sequence[str]) -> dict[str, Any]:
        """Return what the run is, as it lies in the folder.

        Args:
            name: The recipe or algorithm that the caller takes it for.
            overrides: What the caller gives for keys whose values were not kept.

        Raises:
            ConfigError: It is another one's run, a value is missing, or other keys are
                to be changed.
        """
        source = self.read("run.json")
        if source["kind"] == "trainer":
            raise ConfigError(
                f"{self.path} is a run that Python has made: go on with it there, by "
                "resume=True of rl.train() or of the trainer's fit()"
            )
        if source["name"] != Path(name).stem:
            raise ConfigError(
                f"{self.path} is a run of {source['name']!r}, not of {name!r}; name "
                "that one."
            )
        hidden = source.get("hidden", [])
        given = [text.partition("=")[0] for text in overrides]
        others = [text for text in overrides if text.partition("=")[0] not in hidden]
        if others:
            raise ConfigError(
                "--resume goes on with a run as it was configured: leave the overrides "
                f"({', '.join(others)}) away, or start a new run."
            )
        missing = [key for key in hidden if key not in given]
        if missing:
            raise ConfigError(
                f"{self.path / 'run.json'} keeps no secrets: give again "
                f"{' '.join(f'{key}=VALUE' for key in missing)}"
            )
        return source

    def resume_command(self, name: str) -> str:
        """Return the command that goes on with the run, to be copied."""
        hidden = self.read("run.json").get("hidden", [])
        parts = ["rl", "train", name, "--resume", str(self.path)]
        return " ".join([*map(shlex.quote, parts), *(f"{key}=VALUE" for key in hidden)])

    @property
    def model(self) -> Path:
        """Folder of the model that the run builds."""
        return self.path / "model"

    def stage(self, name: str) -> Path:
        """Run folder of a stage's trainer: the run's own where it has no stages."""
        return self.path / "stages" / name if self.has_stages else self.path

    @property
    def has_stages(self) -> bool:
        """Whether the run is a recipe's; older runs of an algorithm have one stage."""
        return (self.path / "stages").is_dir()

    @property
    def claim(self) -> RunClaim | None:
        """What owns the folder, for the trainer of a run without stages."""
        return None if self.has_stages else self._claim

    def stage_result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a stage, or None when it has not ended."""
        path = self.path / "stages" / f"{name}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        if self.has_stages or not (self.path / "result.json").exists():
            return None
        found = self.read("result.json")
        if found["best_checkpoint"] is None or found.get("stopped_by") is not None:
            return None
        return {
            **{key: found[key] for key in ("metrics", "steps", "run_dir")},
            "stop_reason": found["stop_reason"],
            "checkpoint": found["best_checkpoint"],
            "model": found["checkpoint"],
        }

    def end_stage(self, name: str, result: Mapping[str, Any]) -> None:
        """Keep the result of a stage; without stages the trainer has done so."""
        if self.has_stages:
            self.write(f"stages/{name}.json", result)

    def has_progress(self) -> bool:
        """Whether there is anything that a resume goes on from."""
        return has_progress(self.path)

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder."""
        data: dict[str, Any] = json.loads((self.path / name).read_text())
        return data

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, whole or not at all."""
        self.write_text(name, json.dumps(data, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the folder, whole or not at all, for its owner alone."""
        path = self.path / name
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "w", opener=private_opener) as file:
            file.write(text)
        os.replace(temporary, path)


def check_output_dir(output_dir: str, *, overwrite: bool = False) -> Path:
    """Check that a folder can become that of a new run, by writing there.

    Raises:
        ConfigError: It holds a run already and may not be overwritten, it is no run's
            and something of somebody would be lost, or it cannot be written.
    """
    path = Path(output_dir)
    check_run_folder(path, overwrite=overwrite, writes=_WRITES)
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """Check that a folder can be written, or made, and leave no trace.

    Raises:
        ConfigError: It cannot.
    """
    made: list[Path] = []
    try:
        for folder in (*reversed(path.parents), path):
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        probe = path / f".probe-{os.getpid()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _not_writable(path, error) from error
    finally:
        for folder in reversed(made):
            folder.rmdir()


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be written: {error.strerror or error}; name one "
        "that you may write to, as in output_dir=FOLDER"
    )


def to_yaml(data: Mapping[str, Any]) -> str:
    """Write a mapping as YAML, keys in their order."""
    text: str = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
    return text
