"""Requests to a run in another process: pause, resume, checkpoint, stop.

Nothing heavy is imported, so that a command that only sends a request is quick.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_distributed.runs.requests import send_request

__all__ = ["ControlAction", "ControlAnswer", "control_run"]

ControlAction = Literal["pause", "resume", "checkpoint", "stop"]
"""Requests besides a change of the configuration."""


@dataclass(frozen=True)
class ControlAnswer:
    """Answer of a run to a request that it has carried out."""

    step: int
    """Number of completed steps at that time."""
    checkpoint: Path | None = None
    """Newest checkpoint of the run, after `checkpoint` and `stop`; None without one."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ControlAnswer:
        """Read what the run answers."""
        kept = data.get("checkpoint")
        return cls(int(data["step"]), None if kept is None else Path(kept))


def control_run(
    run_dir: str | os.PathLike[str],
    action: ControlAction,
    *,
    by: str | None = None,
    deadline_s: float = 600.0,
) -> ControlAnswer:
    """Pause, resume, save or stop a run in another process.

    ```python
    rl_algorithms.control_run("runs/grpo-001", "checkpoint").checkpoint
    ```

    The run serves requests between its steps and while it is paused. A paused run keeps
    its workers. A stopped run ends as if it had reached a limit, and can be resumed.

    Args:
        run_dir: The folder of the run.
        action: `pause`, `resume`, `checkpoint` or `stop`.
        by: Name of the person or program for the records; None for `user@machine`.
        deadline_s: Seconds to wait; must exceed a step of the run with its validation
            and checkpoint.

    Returns:
        The answer, once the request is carried out.

    Raises:
        ConfigError: The run rejects the request, such as a pause while it is paused; no
            process is running it; or it belongs to another user.
        DeadlineExceededError: The run did not answer in time.
    """
    answer = send_request(run_dir, action, {}, by=by, deadline_s=deadline_s)
    return ControlAnswer.from_dict(answer)
