"""What a trainer knows about its run, and what a resumed run needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["TrainerState"]


@dataclass
class TrainerState:
    """Progress of a run; callbacks read it, checkpoints store it."""

    step: int = 0
    """Steps done since the run began, over all its processes."""
    epoch: int = 0
    """Passes over the data that are complete."""
    step_in_epoch: int = 0
    """Steps done in the current pass."""
    total_steps: int = 0
    """Step at which the run ends."""
    consumed_samples: int = 0
    """Rows that were trained on (prompts x generations, or examples)."""
    total_valid_tokens: int = 0
    """Tokens that were trained on."""
    weight_version: int = 0
    """Version of the policy's weights: the optimizer steps behind it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest metrics by name, such as `train:loss` and `val:accuracy`."""
    validated_at: int = -1
    """Step of the newest validation; -1 before the first."""
    best_value: float | None = None
    """Best value of the metric that `early_stop` watches."""
    validations_since_best: int = 0
    """Validations after that one."""
    warnings: list[str] = field(default_factory=list)
    """What the run was warned of, each once."""
    updates: list[dict[str, Any]] = field(default_factory=list)
    """Updates of the configuration that are in force, as `updates.jsonl` has them."""
    stop_reason: str | None = None
    """Why the run ends, once that is known."""
    stopped_by: str | None = None
    """The person or program that asked for the end of the run; None: nobody."""
    last_checkpoint: str | None = None
    """The newest checkpoint of the run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over a stored state, but not why or where the earlier run ended."""
        ending = {"total_steps", "stop_reason", "stopped_by", "last_checkpoint"}
        keep = {*ending, "warnings"}
        earlier = data.get("warnings", [])
        self.warnings[:] = dict.fromkeys([*earlier, *self.warnings])
        for f in fields(self):
            if f.name in data and f.name not in keep:
                setattr(self, f.name, data[f.name])
