"""The state of a run: progress for callbacks, and the part that checkpoints store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["TrainerState"]


@dataclass
class TrainerState:
    """Progress of a run; callbacks read it, checkpoints store it."""

    step: int = 0
    """Number of completed steps since the run began, over all its processes."""
    epoch: int = 0
    """Number of complete passes over the data."""
    step_in_epoch: int = 0
    """Number of completed steps in the current pass."""
    total_steps: int = 0
    """Number of steps at which the run ends."""
    consumed_samples: int = 0
    """Number of trained rows (prompts x generations, or examples)."""
    total_valid_tokens: int = 0
    """Number of trained tokens."""
    weight_version: int = 0
    """Version of the policy's weights: its number of optimizer steps."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest metrics by name, such as `train:loss` and `val:accuracy`."""
    validated_at: int = -1
    """Step of the latest validation; -1 before the first."""
    best_value: float | None = None
    """Best value of the metric that `early_stop` watches."""
    validations_since_best: int = 0
    """Number of validations since then."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the run, each once."""
    updates: list[dict[str, Any]] = field(default_factory=list)
    """Updates of the configuration in force, as in `updates.jsonl`."""
    stop_reason: str | None = None
    """Why the run ends, once it is known."""
    stopped_by: str | None = None
    """The person or program that requested the end of the run; None for nobody."""
    last_checkpoint: str | None = None
    """The newest checkpoint of the run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore a saved state, except why and where the earlier process ended."""
        ending = {"total_steps", "stop_reason", "stopped_by", "last_checkpoint"}
        keep = {*ending, "warnings"}
        earlier = data.get("warnings", [])
        # In place: the handler that collects warnings holds this very list.
        self.warnings[:] = dict.fromkeys([*earlier, *self.warnings])
        for f in fields(self):
            if f.name in data and f.name not in keep:
                setattr(self, f.name, data[f.name])
