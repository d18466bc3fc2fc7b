"""The error that ends a run when a process of Ray itself has died."""

from __future__ import annotations

from pathlib import Path

from rl_distributed.errors import ClusterLostError
from rl_distributed.failures.cluster_loss import ClusterLoss

__all__ = ["cluster_lost_error"]


def cluster_lost_error(
    loss: ClusterLoss, step: int, kept: Path | None
) -> ClusterLostError:
    """Return an error that says what was lost and what was saved.

    Args:
        loss: The lost process of Ray.
        step: Number of completed steps.
        kept: The newest complete checkpoint, if there is one.
    """
    error = ClusterLostError(f"{loss}. {_describe_kept(step, kept)}")
    error.loss = loss
    return error


def _describe_kept(step: int, kept: Path | None) -> str:
    """Describe the checkpoint from which the run can be resumed."""
    if kept is None:
        return f"No checkpoint was kept of the {step} steps done"
    saved = kept.name.removeprefix("step_")
    if saved == str(step):
        return f"The checkpoint of step {step}, the last one done, is kept in {kept}"
    return (
        f"The newest whole checkpoint is that of step {saved}, in {kept}; step {step}, "
        "the last one done, could not be saved"
    )
