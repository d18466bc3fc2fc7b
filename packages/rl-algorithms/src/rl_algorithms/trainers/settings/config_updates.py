"""Updates of a run's configuration: what they are, their file, and sending one.

```
RUN/updates.jsonl   one line per update, in the order in which they took effect
RUN/requests/       what other processes ask; empty but for an instant
```
A checkpoint has the updates that were in force when it was written. What a resumed run
finds in the file beyond those took effect after that checkpoint, and does so again in
the same place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from rl_distributed.errors import CheckpointError
from rl_distributed.private_files import private_opener
from rl_distributed.runs.requests import send_request

__all__ = ["UPDATES", "ConfigUpdate", "UpdateFile", "update_run"]

UPDATES = "updates.jsonl"
"""Name of the file, in the folder of the run."""

Moment = Literal["step_end", "step_begin"]
"""Where an update took effect: before the validation and the checkpoint that follow a
step, or after them and before the next step."""
_MOMENTS = ("step_end", "step_begin")


@dataclass(frozen=True)
class ConfigUpdate:
    """One update of the configuration; all of its keys changed at the same time."""

    number: int
    """The update of the run, from 1 on."""
    step: int
    """Steps that were done when it took effect."""
    moment: Moment
    """Where, after that step."""
    by: str
    """The person or the program that asked for it."""
    time: str
    """When it took effect."""
    changes: dict[str, Any]
    """The new values, by dotted key."""
    before: dict[str, Any] = field(default_factory=dict)
    """The values that they took the place of."""

    @classmethod
    def now(
        cls,
        number: int,
        place: tuple[int, Moment],
        by: str,
        changes: Mapping[str, Any],
        before: Mapping[str, Any],
    ) -> Self:
        """Make one that takes effect now, at a step and a moment."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(number, *place, by, time, dict(changes), dict(before))

    def is_due(self, step: int, moment: Moment) -> bool:
        """Return whether it has its effect at this place, or an earlier one."""
        mine = (self.step, _MOMENTS.index(self.moment))
        return mine <= (step, _MOMENTS.index(moment))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises:
            TypeError: Something is missing, or is too much.
        """
        return cls(**data)

    def __str__(self) -> str:
        shown = ", ".join(
            f"{key} {self.before.get(key)!r} -> {value!r}"
            for key, value in self.changes.items()
        )
        return f"{shown} (by {self.by})"


class UpdateFile:
    """The file of a run's updates.

    Args:
        run_dir: The folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / UPDATES

    def read(self) -> list[ConfigUpdate]:
        """Return the updates; a last line that was not written to its end is cut off.

        It had no effect yet: an update is written before its first step.

        Raises:
            CheckpointError: Another line is damaged.
        """
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        return list(self._parsed(whole.splitlines()))

    def _parsed(self, lines: Iterable[bytes]) -> Iterable[ConfigUpdate]:
        for number, line in enumerate(lines, start=1):
            try:
                yield ConfigUpdate.from_dict(json.loads(line))
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self.path}, line {number}: no update of a configuration "
                    f"({error}); restore the file, or start the run again without it"
                ) from error

    def append(self, update: ConfigUpdate) -> None:
        """Write one so that it outlasts a crash.

        Raises:
            OSError: It cannot be written; the file is what it was.
        """
        line = json.dumps(update.to_dict()).encode() + b"\n"
        with open(self.path, "ab", buffering=0, opener=private_opener) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(f"{self.path} could not be written to its end")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


def update_run(
    run_dir: str | os.PathLike[str],
    changes: Mapping[str, Any],
    *,
    by: str | None = None,
    deadline_s: float = 600.0,
) -> ConfigUpdate:
    """Change the configuration of a run that another process carries out.

    ```python
    rl_algorithms.update_run("runs/grpo-001", {"lr": 5e-6, "max_num_steps": 400})
    ```

    The run looks between its steps, validates the update as it did its configuration,
    and applies all of its keys or none.

    Args:
        run_dir: The folder of the run.
        changes: New values by key, as `trainer.update_config` takes them.
        by: The person or program, as it is recorded; None: `user@machine`.
        deadline_s: How long to wait; longer than a step of the run.

    Returns:
        The update as it was recorded, with its step.

    Raises:
        ConfigError: The run refuses: a key is unknown or cannot change, or a value is
            wrong. Or no process carries the run out.
        DeadlineExceededError: The run did not answer in time.
    """
    answer = send_request(
        run_dir, "update", {"changes": dict(changes)}, by=by, deadline_s=deadline_s
    )
    return ConfigUpdate.from_dict(answer)
