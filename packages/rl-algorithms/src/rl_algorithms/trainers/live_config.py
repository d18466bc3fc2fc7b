"""Changing the configuration of a run between its steps.

```
update_config --> queue --.
updates.jsonl --> replay --+--> all or none: check, change the parts, write, take over
requests/     ------------'
```

| part         | consumes          | produces        | waits for     | unblocked by |
|--------------|-------------------|-----------------|---------------|--------------|
| `LiveConfig` | updates, requests | answers, a file | workers       | deadlines    |
| `update_run` | an answer         | a request       | the next step | its deadline |

What has an effect outside of the driver comes first, as only that can fail; what has
been changed already is changed back then.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.checkpoints import RunCheckpoints
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.schedule import Patience, RunPlan, ValidationSchedule
from rl_algorithms.trainers.settings.config_updates import (
    ConfigUpdate,
    Moment,
    UpdateFile,
)
from rl_algorithms.trainers.settings.keywords import changed_config
from rl_algorithms.trainers.setup.components import Components
from rl_distributed.config.changes import value_at
from rl_distributed.errors import ConfigError, DistributedError
from rl_distributed.logs.logging import get_logger, set_log_level
from rl_distributed.metrics import LoggerFacade
from rl_distributed.runs.requests import RunRequest, RunRequests
from rl_distributed.security.audit import audit

__all__ = ["LiveConfig"]

_logger = get_logger(__name__)

_OPTIMIZERS = ("policy", "critic")


class LiveConfig(Algorithm[ConfigT]):
    """The part of the trainer loop that changes the configuration of its run."""

    state: TrainerState
    run_dir: Path
    given: Components
    _closing: ExitStack
    _signals: SignalGuard
    _checkpoints: RunCheckpoints
    _metrics_logger: LoggerFacade
    _schedule: ValidationSchedule
    _patience: Patience
    _requests: RunRequests
    _updates: UpdateFile
    _config_at_start: ConfigT
    _thread: int | None = None
    """The thread of the run; None: nothing runs."""

    @abstractmethod
    def _plan_run(self) -> RunPlan:
        """Return what the run will do; raise ConfigError where that cannot be."""

    def _follow(self, plan: RunPlan) -> None:
        """Go on by this plan."""
        self._schedule, self._patience = plan.validations, plan.patience
        self.state.total_steps = plan.total_steps
        if plan.warning is not None and plan.warning not in self.state.warnings:
            _logger.warning(plan.warning)

    # For people and callbacks ----------------------------------------------------

    def update_config(self, changes: Mapping[str, Any], *, by: str = "program") -> None:
        """Change the configuration of the run that goes on.

        ```python
        class Halve(Callback):
            def on_validation_end(self, trainer, *_):
                if stuck():
                    trainer.update_config({"lr": 5e-6}, by="Halve")
        ```

        It is checked here, and has its effect between two optimizer steps: what a hook
        `on_step_end` asks for, before the validation and the checkpoint that follow the
        step; anything else, before the next step. All keys change, or none.

        Args:
            changes: New values by name (`lr`), dotted path (`policy.optimizer.kwargs.
                lr`) or section (`{"grpo": {"val_period": 5}}`).
            by: The person or the program, for `updates.jsonl`.

        Raises:
            ConfigError: A key is unknown or cannot change, a value is wrong, nothing
                runs, or another thread than that of the run calls.
        """
        if self._thread is None:
            raise ConfigError(
                "update_config changes a run that goes on, and none does: call it in a "
                "hook of a callback; before fit, change the configuration itself"
            )
        if threading.get_ident() != self._thread:
            raise ConfigError(
                "update_config must be called in the thread of the run, as in a hook "
                "of a callback: from elsewhere, call update_run(trainer.run_dir, ...)"
            )
        config = self.config
        for earlier, who in self._queue:
            config, _ = changed_config(config, earlier, by=_source(who))
        new, flat = changed_config(config, changes, by=_source(by))
        self._check_update(config, new)
        self._queue.append((flat, by))

    # For the loop ----------------------------------------------------------------

    def _begin_updates(self, info: Mapping[str, Any] | None) -> None:
        """Take up the updates of the run, before what it needs is started.

        Args:
            info: Of the checkpoint that the run goes on from.

        Raises:
            ConfigError: An update of an earlier process does not fit any more.
        """
        self._queue: list[tuple[dict[str, Any], str]] = []
        self._updates = UpdateFile(self.run_dir)
        self._requests = self._closing.enter_context(RunRequests(self.run_dir))
        self._config_at_start = self.config
        self._closing.push(self._end_updates)
        recorded = self._updates.read()
        in_force = [] if info is None else info["state"].get("updates", [])
        for update in map(ConfigUpdate.from_dict, in_force):
            by = f"update {update.number} of the run, {_source(update.by)},"
            self.config, _ = changed_config(self.config, update.changes, by=by)
        numbers = {update["number"] for update in in_force}
        self._replays = [u for u in recorded if u.number not in numbers]
        self._last_number = max([0, *numbers, *(u.number for u in recorded)])
        if in_force:
            self._follow(self._plan_run())
            self._checkpoints.change(self.config.checkpointing)
            interval_s = self.config.logger.sample_resources_every_s
            self._metrics_logger.sample_resources_every(interval_s)
        self._set_level(self.config.logger.level)
        self._thread = threading.get_ident()

    def _bring_given(self) -> None:
        """Give parts that were handed in the settings of the updates in force.

        What the trainer has started has them from its start.
        """
        self._change_given(self._config_at_start, self.config)

    def _change_given(self, old: ConfigT, new: ConfigT) -> None:
        for name in _OPTIMIZERS:
            settings, _ = _optimizer_settings(old, new, name)
            part = getattr(self.given, name)
            if settings and part is not None:
                part.change_optimizer(**settings)
        generation, wanted = self.given.generation, _num_replicas(new)
        if generation is not None and wanted != _num_replicas(old):
            # Those that come back wait for the first sync of the next run.
            generation.resize(wanted)

    def _end_updates(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave all as the next run of this trainer begins with it."""
        self._thread = None
        self._set_level(None)
        now, self.config = self.config, self._config_at_start
        if error is None:  # else their workers may be gone
            self._change_given(now, self.config)
        for changes, by in self._queue:
            _logger.warning(
                "an update by %s came too late and has no effect: %s", by, changes
            )

    def _apply_updates(self, moment: Moment) -> None:
        """Have updates take effect that are due here: recorded, queued, asked for."""
        for update in [u for u in self._replays if u.is_due(self.state.step, moment)]:
            self._replays.remove(update)
            self._take_effect(update.changes, update.by, moment, replayed=update)
        while self._queue:
            changes, by = self._queue.pop(0)
            new, _ = changed_config(self.config, changes, by=_source(by))
            # A callback that runs again after a resume asks for what is there already.
            if new != self.config:
                self._take_effect(changes, by, moment)
        for request in self._requests.take():
            self._answer(request, moment)

    def _answer(self, request: RunRequest, moment: Moment) -> None:
        if request.kind != "update":
            request.refuse(
                f"the run knows no request {request.kind!r}; it knows update"
            )
            return
        try:
            changes = request.body.get("changes", {})
            update = self._take_effect(changes, request.by, moment)
        except (DistributedError, OSError) as error:
            _logger.warning("an update by %s was refused: %s", request.by, error)
            audit("run.update", str(self.run_dir), "refused", by=request.by)
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
        """Apply all changes, or none and raise; record them, unless they are."""
        old = self.config
        new, flat = changed_config(old, changes, by=_source(by))
        plan = self._check_update(old, new)
        before = {key: value_at(old, key) for key in flat}
        place = (self.state.step, moment)
        update = replayed or ConfigUpdate.now(
            self._last_number + 1, place, by, flat, before
        )
        with self._signals.protected(), ExitStack() as undo:
            self._change_parts(old, new, undo)
            if replayed is None:
                self._updates.append(update)
            undo.pop_all()
            self.config = new
            self._follow(plan)
            self.state.updates.append(update.to_dict())
            self._last_number = max(self._last_number, update.number)
        how = "applied again" if replayed else "applied"
        _logger.info(
            "update %d %s after step %d: %s", update.number, how, *place[:1], update
        )
        self._metrics_logger.log_text("config_update", str(update), self.state.step)
        audit("run.update", str(self.run_dir), by=by, step=place[0], changes=flat)
        return update

    def _check_update(self, old: ConfigT, new: ConfigT) -> RunPlan:
        """Check what spans the configuration, the data and the parts of the run.

        Raises:
            ConfigError: See the message.
        """
        for name in _OPTIMIZERS:
            settings, _ = _optimizer_settings(old, new, name)
            part = getattr(self.components, name)
            if settings and not hasattr(part, "change_optimizer"):
                raise ConfigError(
                    f"{name}.optimizer cannot change while the run goes on: "
                    f"{type(part).__name__} has no method change_optimizer(**settings)"
                )
        if _num_replicas(old) != _num_replicas(new):
            generation = self.components.generation
            if not hasattr(generation, "resize"):
                raise ConfigError(
                    "policy.generation.num_replicas cannot change while the run goes "
                    f"on: {type(generation).__name__} has no method resize"
                )
            generation.check_num_replicas(_num_replicas(new))
        self.config = new
        try:
            return self._plan_run()
        finally:
            self.config = old

    # Parts -----------------------------------------------------------------------

    def _change_parts(self, old: ConfigT, new: ConfigT, undo: ExitStack) -> None:
        """Change what lives outside of the configuration; `undo` changes it back."""
        if _num_replicas(old) != _num_replicas(new):
            undo.callback(self._resize, _num_replicas(old))
            self._resize(_num_replicas(new))
        for name in _OPTIMIZERS:
            settings, before = _optimizer_settings(old, new, name)
            if settings:
                part = getattr(self.components, name)
                part.change_optimizer(**settings)
                undo.callback(part.change_optimizer, **before)
        if old.checkpointing != new.checkpointing:
            undo.callback(self._checkpoints.change, old.checkpointing)
            self._checkpoints.change(new.checkpointing)
        if old.logger.level != new.logger.level:
            undo.callback(self._set_level, old.logger.level)
            self._set_level(new.logger.level)
        interval_s = new.logger.sample_resources_every_s
        if old.logger.sample_resources_every_s != interval_s:
            sample_every = self._metrics_logger.sample_resources_every
            undo.callback(sample_every, old.logger.sample_resources_every_s)
            sample_every(interval_s)

    def _resize(self, num_replicas: int | None) -> None:
        self.components.generation.resize(num_replicas)
        sync = self.components.sync
        if sync is not None and not sync.is_stale:
            # Else the next sync brings the new replicas what they serve.
            sync.restore_weights()

    _restore_level: Callable[[], None] | None = None

    def _set_level(self, level: str | None) -> None:
        """Log from this level on; None: from that of the program."""
        restore, self._restore_level = self._restore_level, None
        if restore is not None:
            restore()
        if level is not None:
            self._restore_level = set_log_level(level)


def _source(by: str) -> str:
    return f"the update by {by}"


def _num_replicas(config: Any) -> int | None:
    generation = config.policy.generation
    return None if generation is None else generation.num_replicas


def _optimizer_settings(
    old: Any, new: Any, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a model's optimizer that differ: after and before."""
    if getattr(new, name, None) is None:
        return {}, {}
    earlier = getattr(old, name).optimizer.kwargs
    later = getattr(new, name).optimizer.kwargs
    changed = {key: v for key, v in later.items() if earlier.get(key) != v}
    return changed, {key: earlier[key] for key in changed if key in earlier}
