"""Find the model to evaluate: a model folder, a checkpoint, or a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.resume import CHECKPOINTS
from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.config import load_config
from rl_distributed.errors import ConfigError

__all__ = ["EvaluationTarget", "find_target"]

_NOT_OF_AN_EVALUATION = (
    "train",
    "validation",
    "split_validation_size",
    "shuffle",
    "drop_last",
    "pass_rate_filter",
)


@dataclass(frozen=True)
class EvaluationTarget:
    """A model, and the configuration of the run that trained it."""

    model: str
    """Folder or hub name."""
    run_config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run; empty for a plain model."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that an `EvalConfig` takes from the run.

        The prompts are the run's validation data; columns, templates, environment and
        sampling parameters are those of the run.
        """
        run = self.run_config
        data = dict(run.get("data") or {})
        found: dict[str, Any] = {
            "data": {k: v for k, v in data.items() if k not in _NOT_OF_AN_EVALUATION}
        }
        if data.get("validation"):
            found["datasets"] = {"validation": data["validation"]}
        if run.get("env"):
            found["env"] = run["env"]
        generation = (run.get("policy") or {}).get("generation")
        if generation:
            found["generation"] = generation
        for section in run.values():
            if isinstance(section, Mapping) and "max_rollout_turns" in section:
                found["max_rollout_turns"] = section["max_rollout_turns"]
        return found if run else {}


def find_target(name: str | Path) -> EvaluationTarget:
    """Return the model that a folder or a name refers to.

    | given | model |
    |---|---|
    | a checkpoint (`.../checkpoints/step_N`) | its weights |
    | a run's folder | the weights of its best checkpoint, else of the newest |
    | anything else | the folder or hub name itself |

    Raises:
        ConfigError: The run has no checkpoint.
    """
    path = Path(name).expanduser()
    weights = path / "policy" / "weights"
    if weights.is_dir():
        return EvaluationTarget(str(weights), _run_config(path))
    if not (path / CHECKPOINTS).is_dir():
        return EvaluationTarget(str(name))
    manager = CheckpointManager(CheckpointingConfig(), path / CHECKPOINTS)
    newest = manager.get_latest_checkpoint_path()
    if newest is None:
        raise ConfigError(
            f"the run {path} has no whole checkpoint: there is nothing to evaluate"
        )
    config = _run_config(newest)
    ranking = CheckpointingConfig.from_dict(config.get("checkpointing") or {})
    # A second one: the ranking is in the configuration that the newest checkpoint
    # holds.
    manager = CheckpointManager(ranking, path / CHECKPOINTS)
    # Without a ranking metric, or a validation, there is no best one.
    best = manager.get_best_checkpoint_path() or newest
    return EvaluationTarget(str(best / "policy" / "weights"), config)


def _run_config(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "config.yaml"
    return dict(load_config(file)) if file.exists() else {}
