"""Updates of a run's configuration: their records, their file, and sending one.

```
RUN/updates.jsonl   one line per update, in the order in which they took effect
RUN/requests/       requests of other processes; almost always empty
```
A checkpoint has the updates that were in force when it was written. Further updates in
the file took effect after that checkpoint; a resumed run applies them again at the same
points.
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
"""Point at which an update took effect: before the validation and the checkpoint that
follow a step, or after them and before the next step."""
_MOMENTS = ("step_end", "step_begin")


@dataclass(frozen=True)
class ConfigUpdate:
    """One update of the configuration, whose keys all change at the same time."""

    number: int
    """Number of the update within the run, from 1."""
    step: int
    """Number of completed steps when it took effect."""
    moment: Moment
    """Point after that step."""
    by: str
    """The person or program that requested it."""
    time: str
    """Time at which it took effect."""
    changes: dict[str, Any]
    """New values by dotted key."""
    before: dict[str, Any] = field(default_factory=dict)
    """Previous values by dotted key."""

    @classmethod
    def now(
        cls,
        number: int,
        place: tuple[int, Moment],
        by: str,
        changes: Mapping[str, Any],
        before: Mapping[str, Any],
    ) -> Self:
        """Create an update that takes effect now, at a step and a moment."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(number, *place, by, time, dict(changes), dict(before))

    def is_due(self, step: int, moment: Moment) -> bool:
        """Return whether it takes effect at this point or an earlier one."""
        mine = (self.step, _MOMENTS.index(self.moment))
        return mine <= (step, _MOMENTS.index(moment))

    def to_dict(self) -> dict[str, Any]:
        """Return the update as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises:
            TypeError: A key is missing or unknown.
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
        """Return the updates, and remove an incomplete last line.

        Such an update never took effect, because it is written before its first step.

        Raises:
            CheckpointError: Another line is damaged.
        """
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            # Otherwise the next update would be appended to the torn line.
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
        """Write an update durably.

        Raises:
            OSError: It cannot be written; the file is unchanged.
        """
        line = json.dumps(update.to_dict()).encode() + b"\n"
        # Unbuffered, so that the number of written bytes is known, and a partial line
        # can be taken back.
        with open(self.path, "ab", buffering=0, opener=private_opener) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(f"{self.path} could not be written to its end")
                # The update takes effect only after this, so a crash cannot forget it.
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
    """Change the configuration of a run in another process.

    ```python
    rl_algorithms.update_run("runs/grpo-001", {"lr": 5e-6, "max_num_steps": 400})
    ```

    The run checks for updates between its steps, validates an update like its
    configuration, and applies either all of its keys or none.

    Args:
        run_dir: The folder of the run.
        changes: New values by key, as `trainer.update_config` takes them.
        by: Name of the person or program for the records; None for `user@machine`.
        deadline_s: Seconds to wait; must exceed a step of the run.

    Returns:
        The recorded update, with its step.

    Raises:
        ConfigError: The run rejects the update, because a key is unknown or cannot
            change, or a value is wrong; or no process is running it.
        DeadlineExceededError: The run did not answer in time.
    """
    answer = send_request(
        run_dir, "update", {"changes": dict(changes)}, by=by, deadline_s=deadline_s
    )
    return ConfigUpdate.from_dict(answer)
