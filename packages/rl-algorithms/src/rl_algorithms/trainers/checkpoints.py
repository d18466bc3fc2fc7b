"""The checkpoints of a run: schedule, content and ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.state import TrainerState
from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.errors import ConfigError
from rl_distributed.private_files import create_private_folder
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
           critic/              the same for the critic, if there is one
           asynchronous/        finished answers of later steps, if sampled ahead
    ```

    Args:
        config: Schedule, ranking and retention.
        folder: Folder of the checkpoints.
        algorithm: Name of the algorithm; checkpoints of another one are rejected.
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
            create_private_folder(self._manager.checkpoint_dir)
        self.saved_at = -1
        """Step of the newest checkpoint; -1 before the first."""

    def change(self, config: CheckpointingConfig) -> None:
        """Use other settings from now on, in the same folder."""
        # Only if it changed: setting it again would make a deadline that has already
        # led to a checkpoint count once more.
        if config.checkpoint_must_save_by != self._config.checkpoint_must_save_by:
            self._deadline.set_timeout(config.checkpoint_must_save_by)
        self._config = self._manager.config = config

    def mark_step(self) -> None:
        """Record the end of a step; the deadline allows for the duration of one."""
        self._deadline.mark_iteration()

    def due(self, step: int, *, last: bool, best: bool) -> bool:
        """Return whether to save after `step` steps.

        Args:
            step: Number of completed steps.
            last: Whether no further step follows.
            best: Whether a validation has just found the best policy so far.
        """
        if not self._config.enabled:
            return False
        keep = best and self._config.keep_top_k is not None
        # Without a limit, each new best would add a checkpoint; with one, it replaces a
        # worse one.
        periodic = last or keep or step % self._config.save_period == 0
        return periodic or self._deadline.check_save()

    def is_late(self) -> bool:
        """Return True, once, when the deadline for a checkpoint has passed."""
        return self._config.enabled and self._deadline.check_save()

    def begin_step(self) -> None:
        """Restart the clock of the step, so that the time before does not count."""
        self._deadline.start_iterations()

    def is_best(self, metrics: Mapping[str, float], earlier: list[float]) -> bool:
        """Return whether the ranking metric is better than all earlier values."""
        name = self._config.metric_name
        if name is None or math.isnan(metrics.get(name, math.nan)):
            return False
        # NaN is neither more nor less than any number, so none would be better.
        earlier = [value for value in earlier if not math.isnan(value)]
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
        write_own: Callable[[Path], None] = lambda folder: None,
        critic: PolicyInterface | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder.

        Args:
            state: State of the loop.
            policy: Model to save.
            metrics: Metrics of this step only; they rank the checkpoint.
            run_config: The configuration.
            dataloader: State of the data loader.
            callbacks: States of the callbacks.
            own: State of the algorithm.
            write_own: Writes files of the algorithm into the folder.
            critic: Second model to save, if any.

        Raises:
            CheckpointError: It cannot be written; older ones stay.
        """
        info = {
            **self._unmeasured(state, metrics),
            # At the top level, where tools that rank checkpoints look for metrics.
            **metrics,
            "algorithm": self._algorithm,
            # After the metrics, so that no metric can replace a part of the state.
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
                    # Beside the weights, so that the folder is a complete model for any
                    # library.
                    tokenizer_path=weights,
                )
            write_own(folder)
        self.saved_at = state.step
        return self._manager.checkpoint_dir / f"step_{state.step}"

    def _unmeasured(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> dict[str, None]:
        """Return the ranking metric as null if it is only measured at other steps.

        The manager warns about a missing metric, because its name may be wrong; here it
        is known to be right.
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
        # Verified before anything is read: the models are loaded minutes later, and a
        # damaged file would only then be found.
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
        """Return the checkpoint with the best metric, or the newest without one."""
        return self._manager.get_best_checkpoint_path()

    def close(self) -> None:
        """Wait for checkpoints that are still being written."""
        self._manager.shutdown()
