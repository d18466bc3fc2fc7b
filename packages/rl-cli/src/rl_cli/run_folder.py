"""The folder of a run: what lies where, so that a run can be resumed and read.

```
runs/quickstart-001/    readable by its owner only
  run.json              what the run is, without secrets; with it the run is made again
  config.yaml           the same for people, resolved
  model/                the model with random weights, when the run builds one
  stages/<name>/        run folder of each stage's trainer: checkpoints, metrics.jsonl
  stages/<name>.json    result of a stage that has ended
  logs/run.jsonl        log lines of this process; worker files lie beside it
  result.json curve.png samples.json     the report
  .run.lock             held by the process that carries the run out
```
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

from rl_cli.hidden_keys import hide_secrets
from rl_distributed.errors import ConfigError, LockHeldError
from rl_distributed.file_lock import FolderLock
from rl_distributed.private_files import make_private_folder, private_opener

__all__ = ["RunFolder", "check_output_dir", "to_yaml"]


class RunFolder:
    """Paths and small files of one run.

    Args:
        path: The folder; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: FolderLock | None = None

    @classmethod
    def create(
        cls, name: str, output_dir: str | None, source: Mapping[str, Any]
    ) -> RunFolder:
        """Make the folder of a new run, own it, and write what the run is.

        Args:
            name: Of the recipe or algorithm.
            output_dir: The folder; None: a new one below `runs`.
            source: What `run_from_dict` makes the run of again.

        Raises:
            ConfigError: The folder holds a run already, or cannot be written.
        """
        path = None if output_dir is None else check_output_dir(output_dir)
        try:
            if path is None:
                path = _next_free(Path("runs"), name)
            make_private_folder(path)
            folder = cls(path)
            folder.own()
            if output_dir is not None:
                # Another one may have been faster since it was checked.
                check_output_dir(output_dir)
            make_private_folder(folder.path / "stages")
            config, hidden = hide_secrets(source["config"])
            folder.write_text("config.yaml", to_yaml(config))
            folder.write("run.json", {**source, "config": config, "hidden": hidden})
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
        found = sorted(Path("runs").glob(f"{Path(name).stem}-*/run.json"))
        if not found:
            raise ConfigError(
                f"There is no run of {name!r} under runs/ to resume; start one without "
                f"--resume, or give its folder: --resume FOLDER."
            )
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
        return cls(newest.parent)

    def own(self) -> None:
        """Own the folder until this process ends, or leaves it as a context manager.

        Raises:
            ConfigError: Another process carries the run out; the message names it. Or
                the folder cannot be written.
        """
        lock = FolderLock(
            self.path,
            "another process carries this run out",
            name="run",
            remedy="wait for its end, or end it (Ctrl-C saves it) and resume then",
        )
        try:
            lock.acquire()
        except LockHeldError as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self._lock = lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._lock.release()

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
        """Run folder of one stage's trainer."""
        return self.path / "stages" / name

    def stage_result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a stage, or None when it has not ended."""
        path = self.path / "stages" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def has_progress(self) -> bool:
        """Whether a stage has ended, or has a checkpoint that a resume goes on from."""
        patterns = ("stages/*.json", "stages/*/checkpoints/step_*")
        return any(any(self.path.glob(pattern)) for pattern in patterns)

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


def check_output_dir(output_dir: str) -> Path:
    """Check that a folder can become that of a new run, by writing there.

    Raises:
        ConfigError: It holds a run already, or cannot be written.
    """
    path = Path(output_dir)
    if (path / "run.json").exists():
        raise ConfigError(
            f"output_dir {output_dir!r} holds a run already: resume it with "
            f"--resume {path}, or name another folder."
        )
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
    return path


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be written: {error.strerror or error}; name one "
        "that you may write to, as in output_dir=FOLDER"
    )


def _next_free(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(f"{name}-") for p in root.glob(f"{name}-*")]
    number = max((int(text) for text in taken if text.isdigit()), default=0) + 1
    while True:
        path = root / f"{name}-{number:03d}"
        try:
            make_private_folder(path, is_new=True)
        except FileExistsError:  # another run took it in this very moment
            number += 1
            continue
        return path


def to_yaml(data: Mapping[str, Any]) -> str:
    """Write a mapping as YAML, keys in their order."""
    text: str = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
    return text
