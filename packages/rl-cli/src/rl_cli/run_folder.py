"""The folder of a run, with everything that is needed to resume and read it.

```
runs/quickstart-001/    readable by its owner only
  run.json              settings from which the run is recreated, without secrets
  config.yaml           the same for people, resolved
  model/                the model with random weights, when the run builds one
  checkpoints/ metrics.jsonl validation_samples.jsonl rollouts/     by the trainer
  updates.jsonl timeline.jsonl weight_versions.jsonl requests/      likewise
  stages/<name>/        in a recipe: files of each stage's trainer, and its result.json
  stages/<name>.json    result of a finished stage
  logs/run.jsonl        log of this process; those of the workers are beside it
  result.json curve.png samples.json     the report
```
`rl_distributed.runs.folder` handles ownership of the folder, and decides whether a run
may start there.

Imports nothing heavy, so that problems with a folder are reported immediately.
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
from rl_distributed.private_files import create_private_folder, private_opener
from rl_distributed.runs.folder import (
    RunClaim,
    begin_run,
    check_run_folder,
    has_progress,
    new_run_folder,
    own_run_folder,
)

__all__ = ["RESTARTS", "RunFolder", "check_output_dir", "check_writable", "to_yaml"]

RESTARTS = "logs/restarts.jsonl"
"""Path, in the folder of a run, of the restarts by `rl train --supervise`."""
# Names written by a run. In a folder with other files, they may be the user's.
_WRITES = (
    "config.yaml",
    "run.json",
    "result.json",
    "model",
    "stages",
    "logs",
    "checkpoints",
    "metrics.jsonl",
    "recording",
    "requests",
    "updates.jsonl",
    "timeline.jsonl",
    "weight_versions.jsonl",
)


class RunFolder:
    """Paths and small files of one run.

    Args:
        path: The existing folder.
    """

    def __init__(self, path: Path) -> None:
        # Absolute: the process may change its folder, and workers run in others.
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
        """Create and claim the folder of a new run, and write its settings.

        Args:
            name: Name of the recipe or algorithm.
            output_dir: The folder; None: a new one in `runs`.
            source: Input from which `run_from_dict` recreates the run.
            overwrite: Delete a run that already exists in `output_dir`.

        Raises:
            ConfigError: The folder already contains a run, or cannot be written.
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
                create_private_folder(folder.path / "stages")
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
        stem = Path(name).stem
        # The record as well: `grpo-gsm8k-001` begins with `grpo-`, too.
        found = [
            path
            for path in Path("runs").glob("*/run.json")
            if path.parent.name.startswith(f"{stem}-") and _recorded_name(path) == stem
        ]
        if not found:
            raise ConfigError(
                f"There is no run of {name!r} under runs/ to resume; start one without "
                f"--resume, or give its folder: --resume FOLDER."
            )
        # Prefer runs with progress: one that failed at its start is not worth resuming.
        newest = max(
            found, key=lambda p: (has_progress(p.parent), p.stat().st_mtime_ns)
        )
        return cls(newest.parent)

    def own(self) -> None:
        """Claim the folder until this process ends or exits the context manager.

        Raises:
            ConfigError: Another process owns the run, as named in the message; or the
                folder cannot be written.
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
        """Return the stored settings of the run.

        Args:
            name: The recipe or algorithm expected by the caller.
            overrides: Values of keys that were not stored, such as secrets.

        Raises:
            ConfigError: The run has another name, a value is missing, or an override
                would change another key.
        """
        source = self.read("run.json")
        if source["kind"] == "trainer":
            raise ConfigError(
                f"{self.path} is a run started from Python: continue it there, with "
                "resume=True of rl.train() or of the trainer's fit()"
            )
        if source["name"] != Path(name).stem:
            raise ConfigError(
                f"{self.path} is a run of {source['name']!r}, not of {name!r}; use the "
                "former."
            )
        hidden = source.get("hidden", [])
        given = [text.partition("=")[0] for text in overrides]
        others = [text for text in overrides if text.partition("=")[0] not in hidden]
        if others:
            raise ConfigError(
                "--resume continues a run with its original configuration: drop the "
                f"overrides ({', '.join(others)}), or start a new run."
            )
        missing = [key for key in hidden if key not in given]
        if missing:
            raise ConfigError(
                f"{self.path / 'run.json'} does not store secrets: give "
                f"{' '.join(f'{key}=VALUE' for key in missing)} again"
            )
        return source

    def resume_command(self, name: str) -> str:
        """Return the command that continues the run, for copying."""
        hidden = self.read("run.json").get("hidden", [])
        parts = ["rl", "train", name, "--resume", str(self.path)]
        return " ".join([*map(shlex.quote, parts), *(f"{key}=VALUE" for key in hidden)])

    @property
    def model(self) -> Path:
        """Folder of the model built by the run."""
        return self.path / "model"

    def stage(self, name: str) -> Path:
        """Return the run folder of a stage's trainer, or the run's without stages."""
        return self.path / "stages" / name if self.has_stages else self.path

    @property
    def has_stages(self) -> bool:
        """True for runs of a recipe, and for older runs of an algorithm."""
        return (self.path / "stages").is_dir()

    @property
    def claim(self) -> RunClaim | None:
        """Claim of the folder, for the trainer of a run without stages."""
        return None if self.has_stages else self._claim

    def stage_result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a stage; None if it has not finished."""
        path = self.path / "stages" / f"{name}.json"
        if path.exists():
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            return self._found_here(name, found)
        if self.has_stages or not (self.path / "result.json").exists():
            return None
        found = self.read("result.json")
        # A stopped run writes a result, too, but is not finished.
        if found["best_checkpoint"] is None or found.get("stopped_by") is not None:
            return None
        result = {
            **{key: found[key] for key in ("metrics", "steps", "run_dir")},
            "stop_reason": found["stop_reason"],
            "checkpoint": found["best_checkpoint"],
            "model": found["checkpoint"],
        }
        return self._found_here(name, result)

    def _found_here(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """Return a result whose checkpoint is in this folder, if it is no longer there.

        Results have whole paths, which a run that was moved or copied has left.
        """
        kept = Path(result.get("checkpoint", ""))
        here = self.stage(name) / "checkpoints" / kept.name
        if kept.exists() or not here.is_dir():
            return result
        model = here / "policy" / "weights"
        return {**result, "checkpoint": str(here), "model": str(model)}

    def end_stage(self, name: str, result: Mapping[str, Any]) -> None:
        """Store the result of a stage; without stages, the trainer has done so."""
        if self.has_stages:
            self.write(f"stages/{name}.json", result)

    def has_progress(self) -> bool:
        """Return True if there is anything to resume from."""
        return has_progress(self.path)

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file in the folder."""
        data: dict[str, Any] = json.loads(
            (self.path / name).read_text(encoding="utf-8")
        )
        return data

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file in the folder atomically."""
        self.write_text(name, json.dumps(data, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file in the folder atomically, readable by its owner only."""
        path = self.path / name
        # Renamed into place: a reader or a crash must never see half a file.
        temporary = path.with_name(path.name + ".tmp")
        # Private from its creation: a chmod afterwards would leave a moment in which
        # others read it.
        with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
        os.replace(temporary, path)


def _recorded_name(path: Path) -> Any:
    """Return the recipe or algorithm of a run; None: its record cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("name") if isinstance(record, dict) else None


def check_output_dir(output_dir: str, *, overwrite: bool = False) -> Path:
    """Check that a folder can be used for a new run, by writing to it.

    Raises:
        ConfigError: It already contains a run that may not be overwritten, it contains
            other files that would be lost, or it cannot be written.
    """
    path = Path(output_dir)
    check_run_folder(path, overwrite=overwrite, writes=_WRITES)
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """Check that a folder can be written or created, without leaving a trace.

    Raises:
        ConfigError: It cannot.
    """
    made: list[Path] = []
    try:
        # From the root down, so that exactly the folders made here are removed again.
        for folder in (*reversed(path.parents), path):
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        # Actually written: permission bits say little about quotas and network disks.
        probe = path / f".probe-{os.getpid()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _not_writable(path, error) from error
    finally:
        # The deepest first, as only empty folders can be removed.
        for folder in reversed(made):
            folder.rmdir()


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be written: {error.strerror or error}; name a "
        "writable one, as in output_dir=FOLDER"
    )


def to_yaml(data: Mapping[str, Any]) -> str:
    """Format a mapping as YAML, keeping the order of keys."""
    text: str = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
    return text
