"""Changing the configuration of a run between its steps.

```
update_config --> queue --.
updates.jsonl --> replay --+--> all or none: check, change the parts, write, adopt
requests/     ------------'
```

| part         | consumes          | produces        | waits for     | unblocked by |
|--------------|-------------------|-----------------|---------------|--------------|
| `LiveConfig` | updates, requests | answers, a file | workers       | deadlines    |
| `update_run` | an answer         | a request       | the next step | its deadline |

Changes outside of the driver come first, because only these can fail; if one does, the
earlier ones are undone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

from rl_algorithms.trainers.outputs import RunOutputs
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.schedule import RunPlan
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.config_updates import (
    ConfigUpdate,
    Moment,
    UpdateFile,
)
from rl_algorithms.trainers.settings.keywords import changed_config
from rl_algorithms.trainers.setup.components import Components
from rl_distributed.config.changes import value_at
from rl_distributed.config.problems import show
from rl_distributed.errors import ConfigError, DistributedError
from rl_distributed.logs.logging import get_logger, set_log_level
from rl_distributed.redaction import hide_values, named_secrets
from rl_distributed.runs.requests import RunRequest
from rl_distributed.security.audit import audit
from rl_models.interfaces import GenerationInterface

__all__ = ["OPTIMIZERS", "LiveConfig", "nothing_runs", "optimizer_settings"]

_logger = get_logger(__name__)

OPTIMIZERS = ("policy", "critic")
"""Models whose optimizers can change during a run."""

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


class ChangingTrainer(Protocol[ConfigT]):
    """A trainer whose configuration can change during a run."""

    config: ConfigT
    state: TrainerState
    components: Components

    @property
    def given(self) -> Components:
        """Components that were passed in."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""


class LiveConfig(Generic[ConfigT]):
    """Changes the configuration of a run between its steps.

    Args:
        trainer: Trainer whose configuration changes.
        outputs: Outputs of the run, some of whose settings can change.
        signals: Signal guard that holds signals while an update takes effect.
        plan: Returns the plan of the run for the trainer's configuration; raises
            ConfigError if it is impossible.
        follow: Makes the run follow a plan.
    """

    def __init__(
        self,
        trainer: ChangingTrainer[ConfigT],
        outputs: RunOutputs,
        signals: SignalGuard,
        plan: Callable[[], RunPlan],
        follow: Callable[[RunPlan], None],
    ) -> None:
        self._trainer, self._outputs, self._signals = trainer, outputs, signals
        self._plan, self._follow = plan, follow
        self._queue: list[tuple[dict[str, Any], str]] = []
        self._config_at_start = trainer.config
        self._thread: int | None = None
        """Thread of the run; None while nothing runs."""
        self._restore_level: Callable[[], None] | None = None

    def update(self, changes: Mapping[str, Any], by: str) -> None:
        """See `Algorithm.update_config`."""
        if self._thread is None:
            raise nothing_runs()
        if threading.get_ident() != self._thread:
            raise ConfigError(
                "update_config must be called in the thread of the run, as in a hook "
                "of a callback: from elsewhere, call update_run(trainer.run_dir, ...)"
            )
        config = self._trainer.config
        # Checked on top of the queued updates, as it will be applied after them.
        for earlier, who in self._queue:
            config, _ = changed_config(config, earlier, by=_source(who))
        new, flat = changed_config(config, changes, by=_source(by))
        self._check_update(config, new)
        self._queue.append((flat, by))

    def begin(self, info: Mapping[str, Any] | None, closing: ExitStack) -> None:
        """Restore the updates of the run, before its components are started.

        Args:
            info: Training information of the checkpoint to resume.
            closing: Exit stack that ends the updates.

        Raises:
            ConfigError: An update of an earlier process no longer fits.
        """
        self._file = UpdateFile(self._trainer.run_dir)
        closing.push(self._end)
        self._take_up([] if info is None else info["state"].get("updates", []))
        self._thread = threading.get_ident()

    def go_back(self, info: Mapping[str, Any]) -> None:
        """Restore the configuration that the run had at a checkpoint.

        Later updates are applied again, at the steps at which they were made.

        Args:
            info: See `begin`.
        """
        replicas = _num_replicas(self._trainer.config)
        self._trainer.config = self._config_at_start
        self._take_up(info["state"].get("updates", []))
        wanted = _num_replicas(self._trainer.config)
        if replicas != wanted:
            self._resize(wanted)

    def _take_up(self, in_force: Sequence[Mapping[str, Any]]) -> None:
        trainer, outputs = self._trainer, self._outputs
        recorded = self._file.read()
        for update in map(ConfigUpdate.from_dict, in_force):
            by = f"update {update.number} of the run, {_source(update.by)},"
            trainer.config, _ = changed_config(trainer.config, update.changes, by=by)
        numbers = {update["number"] for update in in_force}
        self._replays = [u for u in recorded if u.number not in numbers]
        self._last_number = max([0, *numbers, *(u.number for u in recorded)])
        if recorded or in_force:
            self._follow(self._plan())
            outputs.checkpoints.change(trainer.config.checkpointing)
            interval_s = trainer.config.logger.sample_resources_every_s
            outputs.metrics.sample_resources_every(interval_s)
        self._set_level(trainer.config.logger.level)

    def bring_given(self) -> None:
        """Apply the updates in force to components that were passed in.

        Components that the trainer started have had them from the start.
        """
        self._change_given(self._config_at_start, self._trainer.config)

    def _change_given(self, old: ConfigT, new: ConfigT) -> None:
        for name in OPTIMIZERS:
            settings, _ = optimizer_settings(old, new, name)
            part = getattr(self._trainer.given, name)
            if settings and part is not None:
                part.change_optimizer(**settings)
        generation, wanted = self._trainer.given.generation, _num_replicas(new)
        if generation is not None and wanted != _num_replicas(old):
            # New replicas get their weights at the first sync of the next run.
            _resizable(generation).resize(wanted)

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the initial configuration, with which the next `fit` begins."""
        self._thread = None
        self._set_level(None)
        now, self._trainer.config = self._trainer.config, self._config_at_start
        if error is None:  # after an error their workers may be gone
            self._change_given(now, self._config_at_start)
        for changes, by in self._queue:
            _logger.warning(
                "an update by %s came too late and has no effect: %s", by, changes
            )

    def apply(self, moment: Moment) -> None:
        """Apply the updates that are due: first recorded ones, then queued ones."""
        for update in [
            u for u in self._replays if u.is_due(self._trainer.state.step, moment)
        ]:
            self._replays.remove(update)
            self._take_effect(update.changes, update.by, moment, replayed=update)
        while self._queue:
            changes, by = self._queue.pop(0)
            new, _ = changed_config(self._trainer.config, changes, by=_source(by))
            # After a resume, a callback may request again what is already in force.
            if new != self._trainer.config:
                self._take_effect(changes, by, moment)

    def answer(self, request: RunRequest, moment: Moment) -> None:
        """Apply the update of another process, or reject it."""
        changes = request.body.get("changes", {})
        try:
            update = self._take_effect(changes, request.by, moment)
        except (DistributedError, OSError) as error:
            shown = _without_secrets(str(error), changes)
            _logger.warning("an update by %s was refused: %s", request.by, shown)
            audit(
                "run.update",
                str(self._trainer.run_dir),
                "refused",
                by=request.by,
                step=self._trainer.state.step,
                changes=changes,
                error=shown,
            )
            request.refuse(str(error))
        else:
            request.answer(update.to_dict())

    def _take_effect(
        self,
        changes: Mapping[str, Any],
        by: str,
        moment: Moment,
        *,
        replayed: ConfigUpdate | None = None,
    ) -> ConfigUpdate:
        """Apply all changes, or raise and apply none; record them unless replayed."""
        trainer = self._trainer
        old = trainer.config
        new, flat = changed_config(old, changes, by=_source(by))
        plan = self._check_update(old, new)
        before = {key: value_at(old, key) for key in flat}
        place = (trainer.state.step, moment)
        update = replayed or ConfigUpdate.now(
            self._last_number + 1, place, by, flat, before
        )
        # A signal in between would leave workers and driver with different settings.
        with self._signals.protected(), ExitStack() as undo:
            self._change_parts(old, new, undo)
            if replayed is None:
                # Written before it counts: a run that dies right here repeats the
                # update instead of forgetting it.
                self._file.append(update)
            undo.pop_all()
            trainer.config = new
            self._follow(plan)
            trainer.state.updates.append(update.to_dict())
            self._last_number = max(self._last_number, update.number)
        how = "applied again" if replayed else "applied"
        _logger.info(
            "update %d %s after step %d: %s", update.number, how, *place[:1], update
        )
        self._outputs.metrics.log_text("config_update", str(update), place[0])
        audit("run.update", str(trainer.run_dir), by=by, step=place[0], changes=flat)
        return update

    def _check_update(self, old: ConfigT, new: ConfigT) -> RunPlan:
        """Check an update against the configuration, the data and the components.

        Raises:
            ConfigError: See the message.
        """
        for name in OPTIMIZERS:
            settings, _ = optimizer_settings(old, new, name)
            part = getattr(self._trainer.components, name)
            if settings and not hasattr(part, "change_optimizer"):
                raise ConfigError(
                    f"{name}.optimizer cannot change while the run goes on: "
                    f"{type(part).__name__} has no method change_optimizer(**settings)"
                )
        if _num_replicas(old) != _num_replicas(new):
            generation = self._trainer.components.generation
            _resizable(generation).check_num_replicas(_num_replicas(new))
        # The plan comes from methods of the trainer, which read its configuration.
        self._trainer.config = new
        try:
            return self._plan()
        finally:
            self._trainer.config = old

    def _change_parts(self, old: ConfigT, new: ConfigT, undo: ExitStack) -> None:
        """Apply changes outside of the configuration; `undo` reverts them."""
        if _num_replicas(old) != _num_replicas(new):
            # Registered before the call: a resize that fails halfway has changed
            # something.
            undo.callback(self._resize, _num_replicas(old))
            self._resize(_num_replicas(new))
        for name in OPTIMIZERS:
            settings, before = optimizer_settings(old, new, name)
            if settings:
                part = getattr(self._trainer.components, name)
                part.change_optimizer(**settings)
                undo.callback(part.change_optimizer, **before)
        if old.checkpointing != new.checkpointing:
            checkpoints = self._outputs.checkpoints
            undo.callback(checkpoints.change, old.checkpointing)
            checkpoints.change(new.checkpointing)
        if old.logger.level != new.logger.level:
            undo.callback(self._set_level, old.logger.level)
            self._set_level(new.logger.level)
        interval_s = new.logger.sample_resources_every_s
        if old.logger.sample_resources_every_s != interval_s:
            sample_every = self._outputs.metrics.sample_resources_every
            undo.callback(sample_every, old.logger.sample_resources_every_s)
            sample_every(interval_s)

    def _resize(self, num_replicas: int | None) -> None:
        _resizable(self._trainer.components.generation).resize(num_replicas)
        sync = self._trainer.components.sync
        if sync is not None and not sync.is_stale:
            # If the weights are stale, the next sync reaches the new replicas anyway.
            sync.restore_weights()

    def _set_level(self, level: str | None) -> None:
        """Set the log level; None restores the program's own."""
        restore, self._restore_level = self._restore_level, None
        if restore is not None:
            restore()
        if level is not None:
            self._restore_level = set_log_level(level)


def nothing_runs() -> ConfigError:
    """Return the error for an update while no run is in progress."""
    return ConfigError(
        "update_config changes a run in progress, and there is none: call it in a hook "
        "of a callback; before fit, change the configuration itself"
    )


def _source(by: str) -> str:
    return f"the update by {by}"


def _without_secrets(error: str, changes: Any) -> str:
    """Return an error without the secrets among the changes, which it may quote."""
    secrets = named_secrets(changes)
    # Long ones are quoted up to a limit only.
    quoted = [show(value).strip('"').removesuffix("...") for value in secrets]
    return hide_values(error, [*secrets, *quoted])


class ResizableGenerator(Protocol):
    """A generator whose number of replicas can change during a run."""

    def check_num_replicas(self, num_replicas: int | None) -> None:
        """Raise ConfigError if this number is impossible."""

    def resize(self, num_replicas: int | None) -> None:
        """Start or stop replicas."""


def _resizable(generation: GenerationInterface | None) -> ResizableGenerator:
    if not hasattr(generation, "resize"):
        raise ConfigError(
            "policy.generation.num_replicas cannot change while the run goes on: "
            f"{type(generation).__name__} has no method resize"
        )
    return cast("ResizableGenerator", generation)


def _num_replicas(config: TrainerConfig) -> int | None:
    generation = config.policy.generation
    return None if generation is None else generation.num_replicas


def optimizer_settings(
    old: Any, new: Any, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizer arguments of a model that changed: new and old values."""
    if getattr(new, name, None) is None:
        return {}, {}
    earlier = getattr(old, name).optimizer.kwargs
    later = getattr(new, name).optimizer.kwargs
    changed = {key: v for key, v in later.items() if earlier.get(key) != v}
    return changed, {key: earlier[key] for key in changed if key in earlier}
