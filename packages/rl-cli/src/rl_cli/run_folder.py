"""The folder of a run: what lies where, so that a run can be resumed and read.

```
runs/quickstart-001/
  run.json              what the run is; with it the run is made again
  config.yaml           the same for people, resolved
  model/                the model with random weights, when the run builds one
  stages/<name>/        run folder of each stage's trainer: checkpoints, metrics.jsonl
  stages/<name>.json    result of a stage that has ended
  logs/run.jsonl        log lines of this process; worker files lie beside it
  result.json curve.png samples.json     the report
```
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_cli.run_config import Run, run_from_dict, to_yaml
from rl_distributed import ConfigError

__all__ = ["RunFolder"]


class RunFolder:
    """Paths and small files of one run.

    Args:
        path: The folder; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @classmethod
    def create(cls, run: Run) -> RunFolder:
        """Make the folder of a new run and write what the run is.

        Raises:
            ConfigError: The folder given in `output_dir` holds a run already.
        """
        if run.output_dir is None:
            path = _next_free(Path("runs"), run.name)
        else:
            path = Path(run.output_dir)
            if (path / "run.json").exists():
                raise ConfigError(
                    f"output_dir {str(path)!r} holds a run already: resume it with "
                    f"--resume {path}, or name another folder."
                )
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        (folder.path / "stages").mkdir(exist_ok=True)
        (folder.path / "config.yaml").write_text(to_yaml(run.source["config"]))
        folder.write("run.json", run.source)
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

    def run(self) -> Run:
        """Return the run that this folder belongs to."""
        return run_from_dict(self.read("run.json"))

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

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder."""
        data: dict[str, Any] = json.loads((self.path / name).read_text())
        return data

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, whole or not at all."""
        path = self.path / name
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, path)


def _next_free(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(f"{name}-") for p in root.glob(f"{name}-*")]
    number = max((int(text) for text in taken if text.isdigit()), default=0) + 1
    while True:
        path = root / f"{name}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:  # another run took it in this very moment
            number += 1
            continue
        return path
