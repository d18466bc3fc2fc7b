"""Asking a run that another process carries out to pause, go on, save or end.

Imports nothing heavy, so that a command which only asks is quick.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_distributed.runs.requests import send_request

__all__ = ["ControlAction", "ControlAnswer", "control_run"]

ControlAction = Literal["pause", "resume", "checkpoint", "stop"]
"""What can be asked of a run, besides a change of its configuration."""


@dataclass(frozen=True)
class ControlAnswer:
    """Answer of a run that has done what it was asked."""

    step: int
    """Steps that were done then."""
    checkpoint: Path | None = None
    """Newest checkpoint of the run, after `checkpoint` and `stop`; None: it has none.
    """


def control_run(
    run_dir: str | os.PathLike[str],
    action: ControlAction,
    *,
    by: str | None = None,
    deadline_s: float = 600.0,
) -> ControlAnswer:
    """Have a run that another process carries out pause, resume, save or stop.

    ```python
    rl_algorithms.control_run("runs/grpo-001", "checkpoint").checkpoint
    ```

    The run looks between its steps, and while it is paused. A paused run keeps its
    workers; a stopped one ends as by its own limits, and can be resumed.

    Args:
        run_dir: The folder of the run.
        action: `pause`, `resume`, `checkpoint` or `stop`.
        by: The person or program, as it is recorded; None: `user@machine`.
        deadline_s: How long to wait; longer than a step of the run, with its validation
            and checkpoint.

    Returns:
        The answer, when it is done.

    Raises:
        ConfigError: The run refuses, such as a pause of one that is paused. Or no
            process carries the run out, or it is another user's.
        DeadlineExceededError: The run did not answer in time.
    """
    answer = send_request(run_dir, action, {}, by=by, deadline_s=deadline_s)
    kept = answer.get("checkpoint")
    return ControlAnswer(int(answer["step"]), None if kept is None else Path(kept))
