"""The checkpoints of a run: when one is due, what is in it, which is the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.state import TrainerState
from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.errors import ConfigError
from rl_distributed.private_files import make_private_folder
from rl_distributed.timing.timer import TimeoutChecker
from rl_models.interfaces import PolicyInterface

__all__ = ["RunCheckpoints"]


class RunCheckpoints:
    """Saves and restores a run.

    ```
    step_N/training_info.json   metrics, state of loop, data, callbacks, algorithm
           config.yaml          the configuration
           policy/weights/      a Hugging Face folder, tokenizer included
           policy/optimizer/    the exact training state
           critic/              the same of the critic, where there is one
    ```

    Args:
        config: When, and what stays.
        folder: Where.
        algorithm: Name of the algorithm; a checkpoint of another one is refused.
    """

    def __init__(
        self, config: CheckpointingConfig, folder: Path, algorithm: str
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._manager = CheckpointManager(config, folder)
        self._deadline = TimeoutChecker(
            config.checkpoint_must_save_by, fit_last_save_time=True
        )
        self._deadline.start_iterations()
        if config.enabled:
            make_private_folder(self._manager.checkpoint_dir)
        self.saved_at = -1
        """Step of the newest checkpoint; -1 before the first."""

    def change(self, config: CheckpointingConfig) -> None:
        """Save by other settings from now on, in the same folder."""
        if config.checkpoint_must_save_by != self._config.checkpoint_must_save_by:
            self._deadline.set_timeout(config.checkpoint_must_save_by)
        self._config = self._manager.config = config

    def mark_step(self) -> None:
        """Note that a step ended: the deadline reckons with the time of one."""
        self._deadline.mark_iteration()

    def due(self, step: int, *, last: bool, best: bool) -> bool:
        """Return whether to save after `step` steps.

        Args:
            step: Steps done.
            last: No further step follows.
            best: A validation has just found the best policy so far.
        """
        if not self._config.enabled:
            return False
        keep = best and self._config.keep_top_k is not None
        # The best is worth a checkpoint only where worse ones are deleted for it.
        periodic = last or keep or step % self._config.save_period == 0
        return periodic or self._deadline.check_save()

    def is_late(self) -> bool:
        """Return once whether the time by which a checkpoint must be saved has come."""
        return self._config.enabled and self._deadline.check_save()

    def begin_step(self) -> None:
        """Note that a step begins now: what came before counts for none."""
        self._deadline.start_iterations()

    def is_best(self, metrics: Mapping[str, float], earlier: list[float]) -> bool:
        """Return whether the ranking metric is better than all earlier values."""
        name = self._config.metric_name
        if name is None or name not in metrics:
            return False
        if not earlier:
            return True
        if self._config.higher_is_better:
            return metrics[name] > max(earlier)
        return metrics[name] < min(earlier)

    def save(
        self,
        state: TrainerState,
        policy: PolicyInterface,
        metrics: Mapping[str, float],
        *,
        run_config: Mapping[str, Any],
        dataloader: Mapping[str, Any],
        callbacks: Mapping[str, Any],
        own: Mapping[str, Any],
        critic: PolicyInterface | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder.

        Args:
            state: The state of the loop.
            policy: What is saved.
            metrics: What was measured at this step, and at no earlier one: those rank
                the checkpoint.
            run_config: The configuration.
            dataloader: State of the data.
            callbacks: States of the callbacks.
            own: What the algorithm keeps besides.
            critic: What else is saved.

        Raises:
            CheckpointError: It cannot be written; older ones stay.
        """
        info = {
            **self._unmeasured(state, metrics),
            # Flat, as programs that rank checkpoints look for metrics at the top.
            **metrics,
            "algorithm": self._algorithm,
            "state": state.to_dict(),
            "dataloader": dict(dataloader),
            "callbacks": dict(callbacks),
            "own": dict(own),
        }
        with self._manager.writing(state.step, info, run_config) as folder:
            for name, model in (("policy", policy), ("critic", critic)):
                if model is None:
                    continue
                weights = folder / name / "weights"
                optimizer = folder / name / "optimizer"
                model.save_checkpoint(
                    weights,
                    optimizer if self._config.save_optimizer else None,
                    # Beside the weights: the folder is a model that anything loads.
                    tokenizer_path=weights,
                )
        self.saved_at = state.step
        return self._manager.checkpoint_dir / f"step_{state.step}"

    def _unmeasured(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> dict[str, None]:
        """Return the ranking metric as null where another step will have it.

        The manager warns of a metric that is missing, because its name may be wrong.
        """
        name = self._config.metric_name
        if name is None or name in metrics:
            return {}
        not_validated = name.startswith("val:") and state.validated_at != state.step
        return {name: None} if not_validated or name in state.metrics else {}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Return the training information of a checkpoint.

        Raises:
            ConfigError: Another algorithm wrote it.
            CheckpointError: It is damaged.
        """
        self._manager.verify(checkpoint)
        info = self._manager.load_training_info(checkpoint)
        if info is None or info.get("algorithm") != self._algorithm:
            raise ConfigError(
                f"resume: {checkpoint} was not written by the algorithm "
                f"{self._algorithm!r}; give a checkpoint of that algorithm"
            )
        self.saved_at = int(info["state"]["step"])
        return info

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, else the newest one."""
        return self._manager.get_best_checkpoint_path()

    def close(self) -> None:
        """Finish what is being written."""
        self._manager.shutdown()
