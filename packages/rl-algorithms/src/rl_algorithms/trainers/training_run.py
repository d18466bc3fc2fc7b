"""`TrainingRun`: one `fit` of a trainer, from the first check to the shutdown.

```
check -> data -> folder -> workers -> restore -> [validate] -> steps -> close
```

| part         | consumes        | produces       | waits for        | unblocked by    |
|--------------|-----------------|----------------|------------------|-----------------|
| loop         | batches         | metrics, state | one phase        | the phase       |
| phase        | rows            | rows, metrics  | worker groups    | time, a signal  |
| SignalGuard  | signals         | Interrupted    | protected phases | a second signal |
| ClusterWatch | Ray's processes | a signal       | nothing          | close           |
| Watchdog     | progress        | a signal       | its limit        | close           |

Shutdown reverses the start: logger, checkpoints, weight sync, environment, generation,
policy, cluster, Ray. Each is closed regardless of errors in the others, and only if the
trainer created it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic

from rl_algorithms.errors import StalledError
from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.callbacks import Callback, CallbackList, RunHooks
from rl_algorithms.trainers.live_config import LiveConfig
from rl_algorithms.trainers.loop import TrainingLoop
from rl_algorithms.trainers.outputs import RunOutputs
from rl_algorithms.trainers.recording.recorder import TrainingRecorder
from rl_algorithms.trainers.recording.recording import start_facts
from rl_algorithms.trainers.run.cluster_loss import cluster_lost_error
from rl_algorithms.trainers.run.history import History
from rl_algorithms.trainers.run.record import write_run_record
from rl_algorithms.trainers.run.result import TrainResult
from rl_algorithms.trainers.run.resume import Resume, RunPlace
from rl_algorithms.trainers.run.signals import Interrupted, SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.throughput import Throughput
from rl_algorithms.trainers.run.warnings import WarningKeeper
from rl_algorithms.trainers.run.watchdog import RunView, Watchdog
from rl_algorithms.trainers.run_control import RunControl
from rl_algorithms.trainers.schedule import (
    Patience,
    RunPlan,
    check_accuracy,
    check_held_out,
    check_measured,
    count_steps,
    unranked_warning,
)
from rl_algorithms.trainers.settings.rollout_config import SamplingSettings
from rl_algorithms.trainers.settings.unused_keys import idle_lines, of_validation
from rl_algorithms.trainers.setup.component_checks import (
    check_components,
    choose_environment,
    with_row_lengths,
    with_tokenizer,
)
from rl_algorithms.trainers.setup.component_start import start_components
from rl_algorithms.trainers.setup.kept_workers import KeptWorkers
from rl_algorithms.trainers.setup.memory_hint import memory_hint
from rl_algorithms.trainers.setup.reward_trial import try_reward_fn
from rl_algorithms.trainers.setup.safe_save import why_unsafe
from rl_algorithms.trainers.step_tools import StepTools
from rl_distributed.cluster.watch import ClusterWatch, find_loss
from rl_distributed.errors import ClusterLostError
from rl_distributed.failures.cluster_loss import ClusterLoss
from rl_distributed.logs.logging import get_logger, keeping_log
from rl_distributed.runs.folder import RunClaim
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.lists import RewardFns

__all__ = ["TrainingRun", "start_alone"]

_logger = get_logger(__name__)


class TrainingRun(Generic[ConfigT]):
    """Builds the parts of a run, runs the loop, and closes them.

    Args:
        trainer: Trainer of the run.
        callbacks: Callbacks, called in this order.
        pool: Pool that keeps the worker processes for the next trainer.
        claim: Claimed folder of the run, if its owner has already written its record.
    """

    def __init__(
        self,
        trainer: Algorithm[ConfigT],
        callbacks: Iterable[Callback],
        *,
        pool: KeptWorkers | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        self._began_s = time.monotonic()
        self._trainer, self._pool, self._claim = trainer, pool, claim
        self._hooks = RunHooks(CallbackList(callbacks), trainer)
        self._signals, self._closing = SignalGuard(), ExitStack()
        self._loop: TrainingLoop[ConfigT] | None = None
        """Set once everything is built."""
        self._watchdog = Watchdog(
            trainer.config.fault_tolerance.stall_limit_s,
            self._signals,
            RunView(self._where, trainer._waits, lambda: trainer.run_dir),
        )

    def fit(
        self,
        dataset: Any,
        val_dataset: Any,
        reward_fn: RewardFns | None,
        environment: EnvironmentInterface[Any] | None,
        *,
        resume: Resume,
        overwrite: bool,
    ) -> TrainResult:
        """Train; see `BaseTrainer.fit`."""
        trainer = self._trainer
        watch = ClusterWatch(self._notice_loss)
        # The watchdog outlasts what is closed, which may hang as well.
        with self._signals, self._watchdog, self._closing, watch:
            try:
                # A signal during the set-up is raised between its steps, where
                # everything made so far is known to the exit stack.
                self._signals.hold()
                if self._claim is None:
                    # Before the data are read, which may take minutes: a folder that is
                    # already taken should be reported at once.
                    RunPlace.check(trainer.config, resume=resume, overwrite=overwrite)
                self._prepare(dataset, val_dataset, reward_fn, environment)
                outputs, loop = self._open(resume, overwrite)
                self._signals.release()
                self._watchdog.begin()
                loop.run()
                return outputs.write_result(
                    trainer.config, trainer.state, trainer.history, self._began_s
                )
            except KeyboardInterrupt as error:
                ending = self._interrupted(error)
                self._report_exception(ending)
                raise ending from None
            except BaseException as error:
                # Calls into a lost cluster raise all kinds of errors; the loss itself
                # is the one to report.
                if isinstance(error, Exception):
                    cause = self._lost() or self._stalled()
                    if cause is not None:
                        self._report_exception(cause)
                        raise cause from error
                if (hint := memory_hint(trainer.config, error)) is not None:
                    error.add_note(hint)
                error.add_note(self._where())
                self._report_exception(error)
                raise
            finally:
                self._signals.close()

    # Start -----------------------------------------------------------------------

    def _prepare(
        self,
        dataset: Any,
        val_dataset: Any,
        reward_fn: RewardFns | None,
        environment: EnvironmentInterface[Any] | None,
    ) -> None:
        """Load the data, and find every error that can be found before the start."""
        trainer = self._trainer
        trainer.state, trainer.history = TrainerState(), History()
        self._closing.enter_context(WarningKeeper(trainer.state.warnings))
        self._scorer = scorer = choose_environment(
            trainer.config, reward_fn, environment
        )
        trainer.needs = trainer._needs(has_environment=scorer is not None)
        self._hooks.call("on_phase", "data", 0, 0)
        check_components(trainer.config, trainer.given, trainer.needs, scorer)
        trainer.config = config = with_row_lengths(trainer.config, trainer.given)
        trainer.components = with_tokenizer(trainer.given, config)
        self._loaders = trainer._load_data(dataset, val_dataset)
        if reward_fn is not None and trainer.sample_prompt is not None:
            # Otherwise a broken reward function would fail only after the first
            # answers, minutes from now.
            try_reward_fn(reward_fn, trainer.sample_prompt)
        self._signals.raise_pending()
        self._scored_by_function = reward_fn is not None
        self._follow(self._plan_run())
        has_data = self._loaders[1] is not None
        idle = config.idle() if has_data else (*config.idle(), of_validation(config))
        for line in idle_lines(config, idle):
            _logger.warning(line)

    def _open(
        self, resume: Resume, overwrite: bool
    ) -> tuple[RunOutputs, TrainingLoop[ConfigT]]:
        """Claim the folder of the run, and start its components."""
        trainer = self._trainer
        checkpoint = self._take_folder(resume, overwrite)
        outputs = RunOutputs(
            trainer.config, trainer.run_dir, trainer.algorithm, self._closing
        )
        # Of the configuration before updates, which a replay repeats.
        facts = start_facts(trainer) if outputs.recorder.is_on else {}
        # Before workers start, so that a damaged checkpoint is reported in a second.
        info = None if checkpoint is None else outputs.checkpoints.load(checkpoint)
        updates = LiveConfig(
            trainer, outputs, self._signals, self._plan_run, self._follow
        )
        trainer._updates = updates
        control = RunControl(
            trainer,
            updates,
            outputs,
            self._hooks,
            self._signals,
            self._watchdog.note,
        )
        # Registered before the parts that it releases, so that it runs after they
        # close.
        self._closing.callback(self._let_go)
        control.begin(self._closing)
        updates.begin(info, self._closing)
        total_steps = trainer.state.total_steps
        _logger.info("%s; %d steps", trainer.plan.describe(), total_steps)
        self._hooks.call("on_phase", "setup", 0, total_steps)
        trainer.components = start_components(
            trainer.config,
            trainer.components,
            trainer.needs,
            self._closing,
            checkpoint=checkpoint,
            environment=self._scorer,
            signals=self._signals,
            pool=self._pool,
        )
        self._signals.raise_pending()
        # Registered after the components, so that it runs before they close.
        self._closing.callback(trainer._close)
        self._closing.callback(outputs.close_timeline, trainer.timer)
        self._tools = _equip(
            trainer, self._hooks, self._signals, self._watchdog.note, outputs.recorder
        )
        loop = TrainingLoop(
            trainer,
            self._loaders,
            self._tools,
            outputs,
            control,
            self._hooks,
            self._signals,
            lambda: self._plan,
        )
        if checkpoint is not None and info is not None:
            loop.restore(checkpoint, info)
            updates.bring_given()
        outputs.recorder.begin(trainer.state.step, facts)
        self._loop = loop
        return outputs, loop

    def _take_folder(self, resume: Resume, overwrite: bool) -> Path | None:
        """Claim the folder of the run; return the checkpoint to resume, if any."""
        trainer = self._trainer
        config, name = trainer.config, trainer.run_name
        if self._claim is not None:
            trainer.run_dir = self._claim.path
            return RunPlace.of(self._claim, config, resume=resume).checkpoint
        place = RunPlace.find(config, name, resume=resume, overwrite=overwrite)
        # Claimed before anything is cut off or removed, which may belong to another
        # run.
        trainer.run_dir = self._closing.enter_context(place.claim).path
        self._closing.enter_context(keeping_log(trainer.run_dir / "logs" / "run.jsonl"))
        for warning in trainer.state.warnings:
            # Logged before the file existed; at this level only the file shows it.
            _logger.info("earlier warning: %s", warning)
        if place.checkpoint is None:
            source = {"kind": "trainer", "name": name, "config": config.to_dict()}
            write_run_record(trainer.run_dir, source)
        return place.checkpoint

    # Plan ------------------------------------------------------------------------

    def _plan_run(self) -> RunPlan:
        """Return when to validate and to end, and check that validations are possible.

        Raises:
            ConfigError: A metric would never be measured, or the run would never end.
        """
        trainer, (loader, val_loader) = self._trainer, self._loaders
        config, schedule = trainer.config, trainer._validation_schedule()
        patience = Patience.of(config)
        has_data = val_loader is not None
        ending = (patience.metric, trainer._early_stop().metric)
        for metric in ending:
            check_measured(metric, schedule, has_data=has_data)
        check_held_out(schedule, has_data=has_data)
        if self._scored_by_function:
            ranking = config.checkpointing
            names = (ranking.metric_name if ranking.enabled else None, *ending)
            settings, threshold = trainer._settings, None
            if isinstance(settings, SamplingSettings):
                threshold = settings.accuracy_threshold
            check_accuracy(names, threshold)
        max_epochs, max_steps = trainer._limits()
        # A stream has no length.
        length = len(loader) if isinstance(loader, Sized) else None
        total_steps = count_steps(length, max_epochs, max_steps)
        unranked = unranked_warning(
            config.checkpointing, schedule, total_steps, has_data=has_data
        )
        return RunPlan(schedule, patience, total_steps, unranked)

    def _follow(self, plan: RunPlan) -> None:
        """Follow a plan from now on."""
        self._plan = plan
        state = self._trainer.state
        state.total_steps = plan.total_steps
        if plan.warning is not None and plan.warning not in state.warnings:
            _logger.warning(plan.warning)

    # End -------------------------------------------------------------------------

    def _keep_checkpoint(self, *, can_save: bool = True) -> Path | None:
        """Save the progress of an interrupted run; return the newest checkpoint.

        Args:
            can_save: Whether the workers can be reached.
        """
        if self._loop is None or not self._trainer.config.checkpointing.enabled:
            return None
        self._loop.keep_checkpoint(can_save=can_save)
        last = self._trainer.state.last_checkpoint
        return Path(last) if last else None

    def _let_go(self) -> None:
        """Break reference cycles: see `RunHooks`."""
        self._trainer._updates = self._loop = None

    def _where(self) -> str:
        """Return what the run was doing, for the error that ended it."""
        if self._loop is None:
            return "before the first step: while the run was being set up"
        phase = self._tools.phase_name.replace("_", " ")
        return f"in step {self._trainer.state.step + 1}: {phase}"

    def _notice_loss(self, loss: ClusterLoss) -> None:
        """Log the loss at once, and end the run.

        Called in the thread of the watch.
        """
        last = self._trainer.state.last_checkpoint or "none"
        # Logged here, because Ray may end this process before the loop gets to it.
        _logger.error("%s. The run ends now; newest checkpoint: %s", loss, last)
        self._signals.interrupt()

    def _interrupted(self, error: KeyboardInterrupt) -> BaseException:
        """Save a checkpoint if one can be; return the error to raise for a signal."""
        signum = self._signals.pending
        if isinstance(error, Interrupted):
            signum = error.signum
        if signum is None:  # raised by the user's own code
            error.add_note(self._where())
            return error
        # While Ray waits, it raises a plain one in place of that of the handler.
        self._signals.acknowledge()
        return (
            self._lost()
            or self._stalled()
            or Interrupted(signum).with_checkpoint(self._keep_checkpoint())
        )

    def _lost(self) -> ClusterLostError | None:
        """Save a checkpoint and return the error to raise, if the cluster is lost."""
        loss = find_loss()
        if loss is None:
            return None
        self._signals.acknowledge()
        # Workers that do not answer cannot save, and waiting for them would use up the
        # time left.
        kept = self._keep_checkpoint(can_save=loss.workers_answer)
        return cluster_lost_error(loss, self._trainer.state.step, kept)

    def _stalled(self) -> StalledError | None:
        """Save a checkpoint if one is safe; return the error to raise for a stall."""
        if self._watchdog.where is None:
            return None
        self._watchdog.react()
        self._signals.acknowledge()
        why = why_unsafe(self._signals, self._trainer.components)
        kept = self._keep_checkpoint(can_save=why is None)
        if not self._trainer.config.checkpointing.enabled:
            why = None
        return self._watchdog.error(kept, why)

    def _report_exception(self, error: BaseException) -> None:
        try:
            self._hooks.call("on_exception", error)
        except Exception:
            # An exception in a hook must not hide why the run ended.
            _logger.exception("a callback failed in on_exception")


def start_alone(
    trainer: Algorithm[ConfigT], closing: ExitStack, pool: KeptWorkers | None
) -> None:
    """Start the components of a step that is called without `fit`.

    Args:
        trainer: Trainer of the step.
        closing: Exit stack that closes them.
        pool: Pool that keeps the worker processes for the next trainer.
    """
    trainer.needs = trainer._needs(has_environment=False)
    check_components(trainer.config, trainer.given, trainer.needs, None)
    trainer.config = config = with_row_lengths(trainer.config, trainer.given)
    with SignalGuard() as signals:
        trainer.components = start_components(
            config,
            with_tokenizer(trainer.given, config),
            trainer.needs,
            closing,
            checkpoint=None,
            environment=None,
            signals=signals,
            pool=pool,
        )
    _equip(trainer, RunHooks(CallbackList(()), trainer), signals)


def _equip(
    trainer: Algorithm[ConfigT],
    hooks: RunHooks,
    signals: SignalGuard,
    on_progress: Callable[[], None] = lambda: None,
    recorder: TrainingRecorder | None = None,
) -> StepTools:
    """Create the tools of a trainer's steps, once its workers exist."""
    throughput = Throughput.of(trainer.config, trainer.components.policy)
    tools = StepTools(trainer, hooks, signals, throughput, on_progress, recorder)
    trainer._equip(tools)
    return tools
