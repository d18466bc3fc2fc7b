"""`BaseTrainer`: builds what a run needs, runs the loop (`loop.py`), and closes it.

```
fit: check -> data -> workers -> restore -> [validate] -> steps -> [checkpoint] -> close
```

| part         | consumes        | produces       | waits for        | unblocked by    |
|--------------|-----------------|----------------|------------------|-----------------|
| loop         | batches         | metrics, state | one phase        | the phase       |
| phase        | rows            | rows, metrics  | worker groups    | time, a signal  |
| SignalGuard  | signals         | Interrupted    | protected phases | a second signal |
| ClusterWatch | Ray's processes | a signal       | nothing          | close           |

Shutdown is the reverse of the start: logger, checkpoints, weight sync, environment,
generation, policy, cluster, Ray; each is closed whatever happened to the others, and
only what the trainer made itself.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from rl_algorithms.trainers.algorithm import ConfigT
from rl_algorithms.trainers.callbacks import Callback, CallbackList
from rl_algorithms.trainers.checkpoints import RunCheckpoints
from rl_algorithms.trainers.default_step import DefaultStep
from rl_algorithms.trainers.progress import ProgressDisplay, showing
from rl_algorithms.trainers.run.cluster_loss import cluster_lost_error
from rl_algorithms.trainers.run.folder import (
    CHECKPOINTS,
    Resume,
    RunPlace,
)
from rl_algorithms.trainers.run.history import History
from rl_algorithms.trainers.run.record import write_run_record
from rl_algorithms.trainers.run.result import RESULT, TrainResult, write_result
from rl_algorithms.trainers.run.signals import Interrupted, SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.throughput import Throughput
from rl_algorithms.trainers.run.warnings import WarningKeeper
from rl_algorithms.trainers.sampling.validation_samples import ValidationSamples
from rl_algorithms.trainers.schedule import (
    Patience,
    RunPlan,
    check_accuracy,
    check_held_out,
    check_measured,
    count_steps,
    unranked_warning,
)
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.custom_config import CustomConfig
from rl_algorithms.trainers.settings.keywords import (
    build_config,
    build_tree,
    is_setting,
)
from rl_algorithms.trainers.settings.own_sections import (
    build_with_sections,
    config_class_of,
)
from rl_algorithms.trainers.settings.unused_keys import idle_lines, of_validation
from rl_algorithms.trainers.setup.components import (
    Components,
    Needs,
    check_components,
    choose_environment,
    start_components,
    with_row_lengths,
    with_tokenizer,
)
from rl_algorithms.trainers.setup.given_policy import (
    checked_config,
    told_apart,
    with_ranks,
)
from rl_algorithms.trainers.setup.kept_workers import KeptWorkers
from rl_algorithms.trainers.setup.memory_hint import memory_hint
from rl_algorithms.trainers.setup.reward_trial import try_reward_fn
from rl_algorithms.trainers.steps.memory_turns import MemoryTurns
from rl_distributed.cluster.watch import ClusterWatch, find_loss
from rl_distributed.config import Config
from rl_distributed.errors import ClusterLostError
from rl_distributed.failures.cluster_loss import ClusterLoss
from rl_distributed.logs.logging import get_logger, keeping_log
from rl_distributed.metrics import LoggerFacade
from rl_distributed.runs.folder import RunClaim
from rl_distributed.timing.timer import Timer
from rl_envs.rewards.lists import RewardFns
from rl_models.interfaces import PolicyInterface

__all__ = ["BaseTrainer"]

_logger = get_logger(__name__)


class BaseTrainer(DefaultStep[ConfigT]):
    """Base of all trainers: a subclass says what one step is.

    It sets `algorithm` and `config_class`, implements `_load_data` and `_train_step`,
    and may override the other methods of `Algorithm`.

    ```python
    trainer = DPOTrainer(policy, cluster, max_num_steps=100)
    trainer.train(pairs)
    ```

    Args:
        config: Everything; a mapping is validated first. Or a policy, whose own config
            then is the section `policy`.
        cluster: A `RayVirtualCluster` to use instead of making one, for what the
            policy's own workers do not do: sampling, a critic, a teacher.
        policy: A `PolicyInterface` to use instead of making one; without `config` as if
            it came first.
        generation: A `GenerationInterface` to use instead of making one.
        tokenizer: A tokenizer to use instead of loading the model's.
        pool: Keeps the worker processes for the next trainer; its maker closes it.
        claim: The folder of the run, where its maker has written what the run is;
            default one that the trainer makes by `output_dir`.
        **settings: Keys of the configuration, see `from_pretrained`.

    What is handed in is used and left open: whoever made a policy or a cluster shuts it
    down (`policy.shutdown()`). What the trainer makes it closes.

    Raises:
        ConfigError: Neither a policy nor a configuration is given, or it is wrong.
    """

    config_class: ClassVar[type[TrainerConfig]] = CustomConfig

    def __init__(
        self,
        config: ConfigT | Mapping[str, Any] | PolicyInterface | None = None,
        cluster: Any = None,
        *,
        policy: Any = None,
        generation: Any = None,
        tokenizer: Any = None,
        pool: KeptWorkers | None = None,
        claim: RunClaim | None = None,
        **settings: Any,
    ) -> None:
        before = set(vars(self))
        name, config_class = type(self).__name__, config_class_of(type(self))
        config, policy = told_apart(name, config, policy)
        found = checked_config(name, config_class, config, policy, settings)
        self.config = cast("ConfigT", with_ranks(found, policy, cluster))
        self._alone = ExitStack()
        self._pool = pool
        self._claim = claim
        self.given = Components(cluster, policy, generation, None, tokenizer)
        self.state = TrainerState()
        self.history = History()
        self.timer = Timer()
        self.components = self.given
        self.validation = None
        self.run_name = self.algorithm
        """What a new folder is named after, where the configuration names none."""
        self.run_dir = Path(self.config.output_dir or f"runs/{self.run_name}")
        self.needs = Needs()
        self.plan = self._plan_batches()
        self._of_base = set(vars(self)) - before

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "algorithm"):
            cls.algorithm = cls.__name__.removesuffix("Trainer").lower()

    @classmethod
    def config_type(cls) -> type[TrainerConfig]:
        """Return the class of the configuration, with the sections that are added."""
        return config_class_of(cls)

    @classmethod
    def adds_sections(cls) -> bool:
        """Return whether a class builds its configuration in its own way."""
        own: Any = cls._build_config_from_pretrained
        return own.__func__ is not BaseTrainer._build_config_from_pretrained.__func__  # type: ignore[attr-defined]

    @classmethod
    def _build_config_from_pretrained(
        cls,
        model: str | Path,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return the configuration of a run as a tree, which a subclass may add to.

        A section that is added is a mapping of its keys to their values; its keys are
        settings of `from_pretrained`, and checked as all others.

        Args:
            model: Folder or hub name.
            config: What to start from.
            **settings: Values by name; those of sections that are added stay out.
        """
        known = {n: v for n, v in settings.items() if is_setting(cls.config_class, n)}
        values = {"policy.model_name": str(model), **known}
        return build_tree(cls.config_class, values, base=config)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        cluster: Any = None,
        policy: Any = None,
        generation: Any = None,
        tokenizer: Any = None,
        **settings: Any,
    ) -> Self:
        """Make a trainer for a model folder or hub name.

        Args:
            model: The model.
            config: What to start from; default the algorithm's defaults.
            cluster: See the class; or the section of the configuration.
            policy: See the class; or the section of the configuration.
            generation: See the class; or the section `policy.generation`.
            tokenizer: See the class; or the section `policy.tokenizer`.
            **settings: Keys of the configuration. A name that only one section has may
                stand alone (`num_prompts_per_step=8`, `lr=1e-5`); otherwise a section
                (`policy={...}`) or a dotted path (`**{"policy.backend": "dtensor"}`).

        Raises:
            ConfigError: A name is unknown, or more than one section has it.
        """
        # Each is an object to use, or a section of the configuration.
        if isinstance(cluster, Mapping | Config):
            settings["cluster"], cluster = cluster, None
        if isinstance(policy, Mapping | Config):
            settings["policy"], policy = policy, None
        if isinstance(generation, Mapping | Config):
            settings["generation"], generation = generation, None
        if isinstance(tokenizer, Mapping | Config):
            settings["tokenizer"], tokenizer = tokenizer, None
        if cls.adds_sections():
            built = build_with_sections(cls, str(model), config, settings)
        else:
            values = {"policy.model_name": str(model), **settings}
            built = build_config(cls.config_class, values, base=config)
        given = Components(cluster, policy, generation, None, tokenizer)
        return cls.from_config(built, given)

    @classmethod
    def from_config(
        cls,
        config: TrainerConfig,
        given: Components | None = None,
        *,
        pool: KeptWorkers | None = None,
        claim: RunClaim | None = None,
    ) -> Self:
        """Make a trainer whose `__init__` may take a configuration and nothing else.

        Args:
            config: Everything, as an object of `config_type()`. A class that adds
                sections to its configuration gets the tree of it.
            given: Components to use instead of making them.
            pool: See the class.
            claim: See the class.

        Raises:
            ConfigError: A value is wrong, or the given policy is none.
        """
        trainer = cls(cast("Any", config.to_dict() if cls.adds_sections() else config))
        trainer._pool, trainer._claim = pool, claim
        if given is not None:
            told_apart(cls.__name__, config, given.policy)
            trainer.given = trainer.components = given
            trainer.config = with_ranks(trainer.config, given.policy, given.cluster)
            trainer.plan = trainer._plan_batches()
        return trainer

    def fit(
        self,
        dataset: Any = None,
        *,
        val_dataset: Any = None,
        reward_fn: RewardFns | None = None,
        environment: Any = None,
        callbacks: Iterable[Callback] = (),
        resume: Resume = False,
        overwrite: bool = False,
        progress: bool | ProgressDisplay = True,
    ) -> TrainResult:
        """Train.

        Args:
            dataset: A list of dicts, a data set, a file, a folder, a hub name, a
                `Mixture`, or a function that returns an iterable of rows, which is then
                streamed; default what the configuration names.
            val_dataset: The same, held out.
            reward_fn: Rewards an answer; see `rl_envs.FunctionalRewardWrapper`.
            environment: An environment object, used and left open.
            callbacks: Hooks, called in this order.
            resume: False begins a new run; True goes on with the newest checkpoint of
                `output_dir`, "auto" too if there is one; a path goes on with that
                checkpoint, or that run folder's newest.
            overwrite: Delete the run that `output_dir` holds, if it holds one, and
                begin again there.
            progress: Show the progress on standard error: drawn in place on a terminal
                and in a notebook, else a line per step, at most one every 10 s. Or the
                display that shows it.

        Raises:
            ConfigError: Something is impossible; nothing has been loaded then.
            Interrupted: A signal came; the run is saved.
            ClusterLostError: A process of Ray itself has ended; the run is saved where
                the workers still answer.
        """
        began_s = time.monotonic()
        self._alone.close()
        self._phase = "setup"
        self._opened = False
        self._note_own_names()
        with (
            showing(progress) as display,
            SignalGuard() as self._signals,
            ExitStack() as self._closing,
            ClusterWatch(self._notice_loss),
        ):
            self._callbacks = CallbackList([*callbacks, display])
            if not display.has_begun:
                display.begin(self.algorithm)
            try:
                self._signals.hold()
                if self._claim is None:
                    RunPlace.check(self.config, resume=resume, overwrite=overwrite)
                self._prepare(dataset, val_dataset, reward_fn, environment)
                self._open(resume, overwrite)
                self._signals.release()
                self._train()
                return self._keep_result(began_s)
            except Interrupted as error:
                self._signals.acknowledge()
                ending = self._lost() or error.with_checkpoint(self._keep_checkpoint())
                self._report_exception(ending)
                raise ending from None
            except BaseException as error:
                if isinstance(error, Exception) and (lost := self._lost()) is not None:
                    self._report_exception(lost)
                    raise lost from error
                if (hint := memory_hint(self.config, error)) is not None:
                    error.add_note(hint)
                error.add_note(self._where())
                self._report_exception(error)
                raise
            finally:
                self._signals.close()

    def train(self, dataset: Any = None, **options: Any) -> TrainResult:
        """Train: another name of `fit`, with the same arguments and result."""
        return self.fit(dataset, **options)

    # Start and end ---------------------------------------------------------------

    def _prepare(
        self,
        dataset: Any,
        val_dataset: Any,
        reward_fn: RewardFns | None,
        environment: Any,
    ) -> None:
        """Load the data, and find what can be known to be wrong before a start."""
        config = self.config
        self.state, self.history = TrainerState(), History()
        self._closing.enter_context(WarningKeeper(self.state.warnings))
        self._scorer = scorer = choose_environment(config, reward_fn, environment)
        self.needs = self._needs(has_environment=scorer is not None)
        self._call("on_phase", "data", 0, 0)
        check_components(config, self.given, self.needs, scorer)
        self.config = config = with_row_lengths(config, self.given)
        self.components = with_tokenizer(self.given, config)
        self._loader, self._val_loader = self._load_data(dataset, val_dataset)
        if reward_fn is not None and self.sample_prompt is not None:
            try_reward_fn(reward_fn, self.sample_prompt)
        self._signals.raise_pending()
        self._scored_by_function = reward_fn is not None
        self._follow(self._plan_run())
        has_data = self._val_loader is not None
        idle = config.idle() if has_data else (*config.idle(), of_validation(config))
        for line in idle_lines(config, idle):
            _logger.warning(line)

    def _open(self, resume: Resume, overwrite: bool) -> None:
        """Take the folder of the run, and start what it needs."""
        checkpoint = self._take_folder(resume, overwrite)
        self._open_outputs()
        info = None if checkpoint is None else self._checkpoints.load(checkpoint)
        self._begin_updates(info)
        config, total_steps = self.config, self.state.total_steps
        _logger.info("%s; %d steps", self.plan.describe(), total_steps)
        self._call("on_phase", "setup", 0, total_steps)
        self.components = start_components(
            config,
            self.components,
            self.needs,
            self._closing,
            checkpoint=checkpoint,
            environment=self._scorer,
            signals=self._signals,
            pool=self._pool,
        )
        self._signals.raise_pending()
        self._share_memory()
        self._set_up()
        if checkpoint is not None and info is not None:
            self._restore(checkpoint, info)
            self._bring_given()
        self._loader_state = self._loader.state_dict()
        self._throughput = Throughput.of(config, self.components.policy)
        self._opened = True

    def _share_memory(self) -> None:
        parts = self.components
        self._memory = MemoryTurns(parts.policy, parts.generation, parts.critic)

    def _note_own_names(self) -> None:
        """Tell attributes of the subclass from those that a run sets."""
        if not hasattr(self, "_own_names"):
            self._own_names = set(vars(self)) - self._of_base - {"_of_base"}

    def _set_up(self) -> None:
        before = set(vars(self))
        self._setup_algorithm()
        self._own_names |= set(vars(self)) - before - {"_loss"}

    def _start_alone(self) -> None:
        if self.components.policy is not None and hasattr(self, "_signals"):
            return
        self._note_own_names()
        self._phase, self._opened = "setup", False
        self._callbacks = CallbackList(())
        self.needs = self._needs(has_environment=False)
        check_components(self.config, self.given, self.needs, None)
        self.config = config = with_row_lengths(self.config, self.given)
        with SignalGuard() as self._signals:
            self.components = start_components(
                config,
                with_tokenizer(self.given, config),
                self.needs,
                self._alone,
                checkpoint=None,
                environment=None,
                signals=self._signals,
                pool=self._pool,
            )
        weakref.finalize(self, self._alone.close)
        self._share_memory()
        self._set_up()
        self._throughput = Throughput.of(config, self.components.policy)

    def _take_folder(self, resume: Resume, overwrite: bool) -> Path | None:
        """Own the folder of the run; return the checkpoint to go on from."""
        config = self.config
        if self._claim is not None:
            self.run_dir = self._claim.path
            return RunPlace.of(self._claim, config, resume=resume).checkpoint
        place = RunPlace.find(config, self.run_name, resume=resume, overwrite=overwrite)
        # Owned before anything of another one could be cut off or removed.
        self.run_dir = self._closing.enter_context(place.claim).path
        self._closing.enter_context(keeping_log(self.run_dir / "logs" / "run.jsonl"))
        for warning in self.state.warnings:
            # It was said before there was a file; at this level only that shows it.
            _logger.info("warned of before: %s", warning)
        if place.checkpoint is None:
            source = {"kind": "trainer", "name": self.run_name}
            write_run_record(self.run_dir, {**source, "config": config.to_dict()})
        return place.checkpoint

    def _plan_run(self) -> RunPlan:
        """Say when to validate and to end, and that validations measure what they must.

        Raises:
            ConfigError: They do not, or the run would never end.
        """
        config, schedule = self.config, self._validation_schedule()
        patience = Patience.of(config)
        has_data = self._val_loader is not None
        ending = (patience.metric, self._early_stop().metric)
        for metric in ending:
            check_measured(metric, schedule, has_data=has_data)
        check_held_out(schedule, has_data=has_data)
        if self._scored_by_function:
            ranking = config.checkpointing
            names = (ranking.metric_name if ranking.enabled else None, *ending)
            threshold = getattr(self._settings, "accuracy_threshold", None)
            check_accuracy(names, threshold)
        max_epochs, max_steps = self._limits()
        # A stream has no length.
        length = len(self._loader) if isinstance(self._loader, Sized) else None
        total_steps = count_steps(length, max_epochs, max_steps)
        unranked = unranked_warning(
            config.checkpointing, schedule, total_steps, has_data=has_data
        )
        return RunPlan(schedule, patience, total_steps, unranked)

    def _open_outputs(self) -> None:
        config = self.config
        # As a context: a sink that fails to close does not hide why a run ended.
        self._metrics_logger = self._closing.enter_context(
            LoggerFacade(config.logger, self.run_dir)
        )
        self._metrics_logger.log_hyperparams(config.to_dict())
        self._samples = ValidationSamples(self.run_dir)
        # That of a run that had ended, and goes on, is true no longer.
        (self.run_dir / RESULT).unlink(missing_ok=True)
        folder = self.run_dir / CHECKPOINTS
        self._checkpoints = RunCheckpoints(config.checkpointing, folder, self.algorithm)
        self._closing.callback(self._checkpoints.close)

    def _keep_result(self, began_s: float) -> TrainResult:
        """Return what the run came to, which `result.json` says as well."""
        enabled = self.config.checkpointing.enabled
        best = self._checkpoints.best() if enabled else None
        result = TrainResult(
            metrics=dict(self.state.metrics),
            history=self.history,
            checkpoint_path=best,
            run_dir=self.run_dir,
            steps=self.state.step,
            stop_reason=self.state.stop_reason or "",
            wall_s=round(time.monotonic() - began_s, 2),
            warnings=tuple(self.state.warnings),
        )
        write_result(self.run_dir, result.to_dict(seed=self.config.seed))
        return result

    def _where(self) -> str:
        """Say what the run was doing, for the error that ended it."""
        if not self._opened:
            return "before the first step: while the run was being set up"
        return f"in step {self.state.step + 1}: {self._phase.replace('_', ' ')}"

    def _notice_loss(self, loss: ClusterLoss) -> None:
        """Say at once what Ray may not leave time to say later; end the run.

        Called in the thread of the watch.
        """
        last = self.state.last_checkpoint or "none"
        _logger.error("%s. The run ends now; newest checkpoint: %s", loss, last)
        self._signals.interrupt()

    def _lost(self) -> ClusterLostError | None:
        """Keep a checkpoint and return what to raise, if the Ray cluster is lost."""
        loss = find_loss()
        if loss is None:
            return None
        self._signals.acknowledge()
        kept = self._keep_checkpoint(can_save=loss.workers_answer)
        return cluster_lost_error(loss, self.state.step, kept)

    def _report_exception(self, error: BaseException) -> None:
        try:
            self._call("on_exception", error)
        except Exception:
            # What a hook raises must not hide why the run ended.
            _logger.exception("a callback failed in on_exception")
