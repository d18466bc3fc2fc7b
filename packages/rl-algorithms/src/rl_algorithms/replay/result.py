"""`ReplayResult`: what a replay has found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ReplayDifference", "ReplayResult"]


@dataclass(frozen=True)
class ReplayDifference:
    """The first thing in which a replay differs from its run."""

    step: int
    """Number of the step, from 1."""
    what: str
    """The column, value, tensor or decision."""
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.what}: {self.recorded} in the run, "
            f"{self.replayed} here"
        )


@dataclass(frozen=True)
class ReplayResult:
    """The steps that were repeated, and whether they came out the same."""

    first_step: int
    last_step: int
    """Last step that came out the same."""
    difference: ReplayDifference | None
    """The first difference; None: there is none."""
    checkpoint: Path | None = None
    """Checkpoint of the run whose tensors were compared; None: it keeps none of the
    repeated steps."""
    num_tensors: int = 0
    """Number of tensors of the checkpoint."""
    saved: Path | None = None
    """Folder of the weights of the replay, if asked for."""
    warnings: tuple[str, ...] = ()
    """What makes a difference likely, such as other versions of packages."""

    @property
    def is_same(self) -> bool:
        """Whether everything came out bit by bit as in the run."""
        return self.difference is None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        paths = {"checkpoint": self.checkpoint, "saved": self.saved}
        shown = {k: None if v is None else str(v) for k, v in paths.items()}
        return {"same": self.is_same, **asdict(self), **shown}
