"""`Recovery`: continues a run after the loss of its training workers.

```
call fails -> workers lost? -> generators, environment: left as they are
                            -> workers: restarted with the state of the newest
                               snapshot or checkpoint, or of the start
                            -> loop: goes back to that step
checkpoint saved -> nodes came? -> workers: more of them, with its state
```
Each rank holds a part of the weights and the optimizer state that no other rank has, so
all of them go back. Steps are repeated exactly: same prompts, seeds and weight
versions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.live_config import LiveConfig
from rl_algorithms.trainers.outputs import RunOutputs
from rl_algorithms.trainers.run.snapshots import Snapshot, Snapshots
from rl_algorithms.trainers.setup.starting import Starter
from rl_distributed.checkpoint.memory import FolderInMemory
from rl_distributed.cluster.watch import find_loss
from rl_distributed.errors import WorkerDiedError, WorkerHungError
from rl_distributed.logs.logging import get_logger
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["Recovery", "StartingPoint"]

_logger = get_logger(__name__)


@dataclass(frozen=True)
class StartingPoint:
    """A point from which a run can continue."""

    checkpoint: Path | None
    """Folder of a checkpoint, or of the algorithm's own files in a snapshot; None for
    the weights and optimizer that the run began with."""
    info: Mapping[str, Any]
    """State of the loop, the data, the callbacks and the algorithm."""
    last_checkpoint: str | None
    """The newest checkpoint of the run at this point."""
    snapshot: Snapshot | None = None
    """Holds the models in place of `checkpoint`."""


class Recovery(Generic[ConfigT]):
    """Restarts lost training workers, a bounded number of times.

    Args:
        trainer: Trainer that owns the workers.
        outputs: Outputs of the run, including its checkpoints.
        updates: Live changes of the configuration, which are rolled back as well.
    """

    def __init__(
        self,
        trainer: Algorithm[ConfigT],
        outputs: RunOutputs,
        updates: LiveConfig[ConfigT],
    ) -> None:
        self._trainer, self._outputs, self._updates = trainer, outputs, updates
        settings = trainer.config.fault_tolerance
        self._max_restarts = settings.max_restarts
        self._snapshots = Snapshots(settings.snapshot_period)
        self._num_in_a_row = 0
        self._failed_in = 0
        """The furthest step that failed."""
        self._beginning: StartingPoint | None = None

    def begin(self, info: Mapping[str, Any]) -> None:
        """Remember the state that the run begins with.

        Args:
            info: What a checkpoint of this state would hold besides the models.
        """
        last = self._trainer.state.last_checkpoint
        checkpoint = Path(last) if last else None
        # A deep copy: later steps change lists and dictionaries of the state in place.
        self._beginning = StartingPoint(checkpoint, copy.deepcopy(dict(info)), last)

    def snapshot_is_due(self) -> bool:
        """Return whether to take a snapshot of the present state."""
        state = self._trainer.state
        if self._outputs.checkpoints.saved_at == state.step:
            self._snapshots.drop()
            return False
        is_due = self._snapshots.are_due(state.step)
        return is_due and self._why_not_ever() is None

    def take_snapshot(self, info: Mapping[str, Any]) -> None:
        """Keep the present state in memory.

        Args:
            info: What a checkpoint of this state would hold besides the models.
        """
        trainer = self._trainer
        parts = trainer.components
        models = {
            name: model
            for name, model in (("policy", parts.policy), ("critic", parts.critic))
            if isinstance(model, TrainingPolicy)
        }
        self._snapshots.take(models, info, trainer._write_own)

    def can_mend(self, error: Exception) -> bool:
        """Return whether the run can continue; if not, add the reason to the error."""
        if not self._is_lost(error) or find_loss() is not None:
            return False
        why = self._why_not_ever()
        if why is None and self._num_restarts() >= self._max_restarts:
            why = (
                f"fault_tolerance.max_restarts={self._max_restarts} restarts in a row "
                "are used up"
            )
        if why is not None:
            error.add_note(f"The run does not start the lost workers again: {why}.")
        return why is None

    def _why_not_ever(self) -> str | None:
        """Return why no loss of workers can be mended in this run; None if one can."""
        trainer = self._trainer
        reasons = (
            (trainer.given.policy is not None, "the policy was given to it"),
            (trainer.given.critic is not None, "the critic was given to it"),
            (trainer.given.teacher is not None, "the teacher was given to it"),
            (
                not trainer.config.checkpointing.enabled,
                "it keeps no state to go back to (checkpointing.enabled=false)",
            ),
        )
        return next((reason for holds, reason in reasons if holds), None)

    @contextmanager
    def start_again(self, error: Exception) -> Iterator[StartingPoint]:
        """Restart the workers; yield the point from which the loop continues.

        Its folder lasts as long as the block.

        Raises:
            WorkerError: They do not start.
            CheckpointError: The newest checkpoint is damaged.
        """
        trainer = self._trainer
        failed_in = trainer.state.step + 1
        self._num_in_a_row = self._num_restarts() + 1
        self._failed_in = max(self._failed_in, failed_in)
        cause = str(error).strip().splitlines()[0]
        with self._newest() as point:
            found = point.info["state"]["step"]
            _logger.warning(
                "training workers are lost in step %d, and are started again (%d of %d "
                "in a row); the run goes back to step %d: %s",
                *(failed_in, self._num_in_a_row, self._max_restarts, found, cause),
            )
            self._updates.go_back(point.info)
            try:
                self._reload(point)
            except Exception as problem:
                # Why they do not start says nothing of why they had to.
                problem.add_note(f"The first cause: {cause}")
                raise
            yield point

    def can_grow(self) -> bool:
        """Return whether more training workers could continue from the checkpoint."""
        parts = self._trainer.components
        trained = (parts.policy, parts.critic)
        found = [part for part in trained if isinstance(part, TrainingPolicy)]
        # All of them share the bundles, and are given the same layout again.
        return bool(found) and all(part.can_grow for part in found)

    @contextmanager
    def grow(self) -> Iterator[StartingPoint]:
        """Start more workers with the newest state; yield the point they are at.

        Raises:
            WorkerError: They do not start.
            CheckpointError: The newest checkpoint is damaged.
        """
        with self._newest() as point:
            _logger.warning("nodes have come: more workers train from here on")
            self._reload(point)
            yield point

    def _num_restarts(self) -> int:
        """Return the number of restarts without a step beyond the furthest failure."""
        is_beyond = self._trainer.state.step + 1 > self._failed_in
        return 0 if is_beyond else self._num_in_a_row

    @contextmanager
    def _newest(self) -> Iterator[StartingPoint]:
        last = self._trainer.state.last_checkpoint
        snapshot = self._snapshots.newest
        if snapshot and snapshot.step > self._outputs.checkpoints.saved_at:
            with snapshot.own.opened() as folder:
                yield StartingPoint(
                    folder, copy.deepcopy(snapshot.info), last, snapshot
                )
            return
        # A checkpoint that this run only resumed from equals the beginning, which is
        # already in memory.
        if last and self._outputs.checkpoints.saved_at >= 0:
            path = Path(last)
            yield StartingPoint(path, self._outputs.checkpoints.load(path), last)
            return
        assert self._beginning is not None  # `begin` precedes every step
        # A copy, as of a snapshot: the run takes lists and dictionaries of it over and
        # changes them, and may have to go back to it once more.
        yield replace(self._beginning, info=copy.deepcopy(self._beginning.info))

    def _reload(self, point: StartingPoint) -> None:
        trainer = self._trainer
        models: Mapping[str, FolderInMemory | None] = {}
        if point.snapshot is not None:
            models = point.snapshot.models
        parts, needs = trainer.components, trainer.needs
        starter = Starter(trainer.config, ExitStack())
        policy, critic, teacher = parts.policy, parts.critic, parts.teacher
        if isinstance(policy, TrainingPolicy):
            reference = needs.reference_policy
            starter.policy(
                policy.cluster,
                reference,
                point.checkpoint,
                policy,
                models.get("policy"),
            )
        if isinstance(critic, TrainingPolicy):
            cluster, snapshot = critic.cluster, models.get("critic")
            starter.further_policy(
                "critic", cluster, point.checkpoint, critic, snapshot
            )
        # Only if lost: a teacher is never trained, so a living one has the right
        # weights.
        if isinstance(teacher, TrainingPolicy) and teacher.is_lost:
            starter.further_policy("teacher", teacher.cluster, None, teacher)
        if parts.sync is not None:
            # Repeated steps repeat their versions, which would be refused as stale
            # otherwise.
            parts.sync.go_back()

    def _is_lost(self, error: BaseException) -> bool:
        """Return whether a worker of a trained model or a teacher is the cause."""
        # A list of those seen: a chain of causes may have a circle.
        causes: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in causes:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        # Lost workers alone are not enough: after an exception in one rank the others
        # are released too, and repeating the step would only raise it again.
        kinds = (WorkerDiedError, WorkerHungError)
        parts = self._trainer.components
        return any(isinstance(cause, kinds) for cause in causes) and any(
            isinstance(part, TrainingPolicy) and part.is_lost
            for part in (parts.policy, parts.critic, parts.teacher)
        )
