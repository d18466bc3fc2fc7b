"""`RunningTrainer`: the part of a trainer that callbacks may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rl_algorithms.trainers.run.history import History
    from rl_algorithms.trainers.run.state import TrainerState
    from rl_algorithms.trainers.sampling.validation import ValidationResult
    from rl_algorithms.trainers.settings.config import TrainerConfig
    from rl_algorithms.trainers.setup.components import Components

__all__ = ["RunningTrainer"]


class RunningTrainer(Protocol):
    """A trainer during `fit`; every `BaseTrainer` is one."""

    state: TrainerState
    """Counters of the run; `stop_reason` ends it after the step."""
    history: History
    """Metrics of every step so far."""
    components: Components
    """Policy, generation, environment and tokenizer."""
    run_dir: Path
    """Folder of the run."""
    validation: ValidationResult | None
    """Result of the latest validation."""

    @property
    def config(self) -> TrainerConfig:
        """Configuration, including the updates so far."""

    def request_stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint."""

    def update_config(self, changes: Mapping[str, Any], *, by: str = "program") -> None:
        """Change the configuration during the run."""
