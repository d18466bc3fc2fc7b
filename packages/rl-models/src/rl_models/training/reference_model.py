"""The frozen copy of the initial model, where a policy keeps none."""

from __future__ import annotations

from rl_distributed.errors import BatchError

__all__ = ["no_reference_model"]


def no_reference_model() -> BatchError:
    """Return the error of a call that needs the copy."""
    return BatchError(
        "the policy keeps no reference model; build it with init_reference_model=True"
    )
