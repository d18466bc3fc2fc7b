"""The trainer loop, once for all algorithms.

```
fit: check -> data -> workers -> restore -> [validate] -> steps -> [checkpoint] -> close
step: draw batch -> _train_step (phases) -> advance -> log -> validate? -> checkpoint?
```

| part        | consumes   | produces       | waits for        | unblocked by     |
|-------------|------------|----------------|------------------|------------------|
| loop        | batches    | metrics, state | one phase        | the phase        |
| phase       | rows       | rows, metrics  | worker groups    | deadline, signal |
| SignalGuard | signals    | Interrupted    | protected phases | a second signal  |

Shutdown is the reverse of the start: logger, checkpoints, weight sync, environment,
generation, policy, cluster, Ray; each is closed whatever happened to the others, and
only what the trainer made itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, cast

from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.callbacks import Callback, CallbackList
from rl_algorithms.trainers.checkpoints import RunCheckpoints
from rl_algorithms.trainers.components import (
    Components,
    Needs,
    check_components,
    choose_environment,
    start_components,
    with_tokenizer,
)
from rl_algorithms.trainers.config import TrainerConfig
from rl_algorithms.trainers.data_limits import try_reward_fn
from rl_algorithms.trainers.pool import WorkerPool
from rl_algorithms.trainers.result import History, TrainResult, sink_name
from rl_algorithms.trainers.run_folder import (
    CHECKPOINTS,
    Resume,
    claim_run_folder,
    find_resume,
)
from rl_algorithms.trainers.schedule import count_steps
from rl_algorithms.trainers.settings import build_config
from rl_algorithms.trainers.signals import Interrupted, SignalGuard
from rl_algorithms.trainers.state import TrainerState
from rl_algorithms.trainers.validation import ValidationResult
from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_distributed.logging import get_logger, log_context
from rl_distributed.metrics import LoggerFacade, to_floats
from rl_distributed.timing import Timer

__all__ = ["BaseTrainer"]

_logger = get_logger(__name__)

# From the begin of these phases to the end of the step the weights are no longer those
# of the last step, and the step is not counted yet: nothing could be saved.
_PROTECTED = frozenset({"policy_training"})


class BaseTrainer(Algorithm[ConfigT]):
    """Base of all trainers: a subclass says what one step is.

    It sets `algorithm` and `config_class`, implements `_load_data` and `_train_step`,
    and may override the other methods of `Algorithm`.

    Args:
        config: Everything; a mapping is validated first.
        cluster: A `RayVirtualCluster` to use instead of making one.
        policy: A `PolicyInterface` to use instead of making one.
        generation: A `GenerationInterface` to use instead of making one.
        tokenizer: A tokenizer to use instead of loading the model's.
        pool: Keeps the worker processes for the next trainer; its maker closes it.

    What is handed in is used and left open; what the trainer makes it closes.
    """

    def __init__(
        self,
        config: ConfigT | Mapping[str, Any],
        *,
        cluster: Any = None,
        policy: Any = None,
        generation: Any = None,
        tokenizer: Any = None,
        pool: WorkerPool | None = None,
    ) -> None:
        self.config = self._checked(config)
        self._pool = pool
        self.given = Components(cluster, policy, generation, None, tokenizer)
        self.state = TrainerState()
        self.history = History()
        self.timer = Timer()
        self.components = self.given
        self.validation: ValidationResult | None = None
        self.run_dir = Path(self.config.output_dir)
        self.needs = Needs()
        self.plan = self._plan_batches()

    @classmethod
    def _checked(cls, config: Any) -> ConfigT:
        if isinstance(config, Mapping):
            source = f"config of {cls.__name__}"
            config = cls.config_class.from_dict(dict(config), source=source)
        if not isinstance(config, cls.config_class):
            raise ConfigError(
                f"{cls.__name__} takes a {cls.config_class.__name__}: got "
                f"{type(config).__name__}"
            )
        return cast("ConfigT", config)

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
            generation: See the class.
            tokenizer: See the class.
            **settings: Keys of the configuration. A name that only one section has may
                stand alone (`num_prompts_per_step=8`, `lr=1e-5`); otherwise a section
                (`policy={...}`) or a dotted path (`**{"policy.backend": "dtensor"}`).

        Raises:
            ConfigError: A name is unknown, or more than one section has it.
        """
        # `cluster` and `policy` are objects to use, or sections of the configuration.
        if isinstance(cluster, Mapping | Config):
            settings["cluster"], cluster = cluster, None
        if isinstance(policy, Mapping | Config):
            settings["policy"], policy = policy, None
        values = {"policy.model_name": str(model), **settings}
        built = build_config(cls.config_class, values, base=config)
        return cls(
            cast("ConfigT", built),
            cluster=cluster,
            policy=policy,
            generation=generation,
            tokenizer=tokenizer,
        )

    # The loop ------------------------------------------------------------------

    def fit(
        self,
        dataset: Any = None,
        *,
        val_dataset: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        environment: Any = None,
        callbacks: Iterable[Callback] = (),
        resume: Resume = False,
    ) -> TrainResult:
        """Train.

        Args:
            dataset: A list of dicts, a data set, a file, a folder or a hub name;
                default what the configuration names.
            val_dataset: The same, held out.
            reward_fn: Rewards an answer; see `rl_envs.FunctionalRewardWrapper`.
            environment: An environment object, used and left open.
            callbacks: Hooks, called in this order.
            resume: False begins a new run; True goes on with the newest checkpoint of
                `output_dir`, "auto" too if there is one; a path goes on with that
                checkpoint, or that run folder's newest.

        Raises:
            ConfigError: Something is impossible; nothing has been loaded then.
            Interrupted: A signal came; the run is saved.
        """
        self._callbacks = CallbackList(callbacks)
        self._phase = "setup"
        self._opened = False
        with SignalGuard() as self._signals, ExitStack() as self._closing:
            try:
                self._signals.hold()
                self._open(dataset, val_dataset, reward_fn, environment, resume)
                self._signals.release()
                self._train()
                return self._result()
            except Interrupted as error:
                self._signals.acknowledge()
                interruption = error.with_checkpoint(self._keep_checkpoint())
                self._report_exception(interruption)
                raise interruption from None
            except BaseException as error:
                error.add_note(f"in {self._phase} of step {self.state.step + 1}")
                self._report_exception(error)
                raise
            finally:
                self._signals.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of a step, and tell callbacks that it begins.

        Args:
            name: Name of the timer.
        """
        self._signals.check()
        if name in _PROTECTED:
            self._signals.hold()
        self._phase = name
        step = min(self.state.step + 1, max(self.state.total_steps, 1))
        self._call("on_phase", name, step, self.state.total_steps)
        with self.timer.time(name):
            yield

    def request_stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint."""
        self.state.stop_reason = reason

    def sync_weights(self) -> None:
        """Give generation the policy's weights, if it does not have them."""
        sync = self.components.sync
        if sync is None or not sync.is_stale:
            return
        with self.phase("prepare_for_generation"):
            sync.sync_weights(version=self.state.weight_version)

    def train_policy(
        self, rows: Any, loss: Any, rows_per_optimizer_step: int
    ) -> Mapping[str, Any]:
        """Train the policy on rows, and note that its weights are new.

        Returns:
            What `PolicyInterface.train` returns.
        """
        with self.phase("policy_training"):
            output: Mapping[str, Any] = self.components.policy.train(
                rows, loss, gbs=rows_per_optimizer_step, timer=self.timer
            )
        self.state.weight_version += rows.size // rows_per_optimizer_step
        if self.components.sync is not None:
            self.components.sync.mark_stale()
        return output

    def draw_batch(self) -> Any:
        """Return the next batch of the epoch, or None at its end."""
        return next(self._batches, None)

    def _train(self) -> None:
        state = self.state
        self._call("on_train_begin")
        if state.step == 0:
            self._validate_if_due()
        while not self._finished():
            self._call("on_epoch_begin")
            self._batches = iter(self._loader)
            while (batch := self.draw_batch()) is not None:
                self._run_step(batch)
                if self._finished():
                    break
            else:
                state.epoch += 1
                state.step_in_epoch = 0
                self._loader_state = self._loader.state_dict()
                self._call("on_epoch_end")
        unsaved = self._checkpoints.saved_at != state.step
        if unsaved and self._checkpoints.due(state.step, last=True, best=False):
            self._save_checkpoint()
        self._call("on_train_end")

    def _finished(self) -> bool:
        max_epochs, max_steps = self._limits()
        state = self.state
        if state.stop_reason is None:
            if max_steps is not None and state.step >= max_steps:
                state.stop_reason = f"max_num_steps ({max_steps}) reached"
            elif max_epochs is not None and state.epoch >= max_epochs:
                state.stop_reason = f"max_num_epochs ({max_epochs}) reached"
        return state.stop_reason is not None

    def _run_step(self, batch: Any) -> None:
        self.timer.reset()
        with log_context(step=self.state.step + 1):
            self._call("on_step_begin")
            with self.timer.time("total_step_time"):
                metrics = to_floats(self._train_step(batch))
            self._advance(metrics)
            # The step counts from here on, so an interruption can save it.
            self._signals.release()
            self._after_step()

    def _advance(self, metrics: Mapping[str, float]) -> None:
        state = self.state
        state.step += 1
        state.step_in_epoch += 1
        state.consumed_samples += int(metrics.get("num_samples", 0))
        state.total_valid_tokens += int(metrics.get("num_valid_tokens", 0))
        self._loader_state = self._loader.state_dict()
        timing = self.timer.get_timing_metrics("sum")
        named = {f"train:{name}": value for name, value in metrics.items()}
        named |= {f"timing:{name}": value for name, value in timing.items()}
        named |= _performance(metrics, timing)
        self._record(named)
        self._call("on_step_end", named)

    def _after_step(self) -> None:
        self._checkpoints.mark_step()
        best = self._validate_if_due()
        if self._checkpoints.due(self.state.step, last=self._last_step(), best=best):
            self._save_checkpoint()

    def _record(self, named: Mapping[str, float]) -> None:
        step = self.state.step
        self.state.metrics.update(named)
        self.history.add(step, named)
        sinks = {sink_name(name): value for name, value in named.items()}
        self._metrics_logger.log_metrics(sinks, step, step_finished=True)

    # Validation ----------------------------------------------------------------

    def _validate_if_due(self) -> bool:
        """Validate when it is time; return whether the ranking metric improved."""
        last = self._last_step()
        if self._val_loader is None or not self._schedule.due(
            self.state.step, last=last
        ):
            return False
        self._call("on_validation_begin")
        timer = Timer()
        with self.phase("validation"), timer.time("total_validation_time"):
            self.validation = self._validate(self._val_loader)
        metrics = {f"val:{k}": v for k, v in to_floats(self.validation.metrics).items()}
        _, earlier = self.history.column(self.config.checkpointing.metric_name or "")
        best = self._checkpoints.is_best(metrics, earlier)
        self.state.validated_at = self.state.step
        self._record(metrics)
        self._metrics_logger.log_metrics(
            timer.get_timing_metrics(), self.state.step, prefix="timing/validation"
        )
        self._call("on_validation_end", metrics)
        reason = self._early_stop().reason(metrics)
        if reason is not None:
            self.request_stop(reason)
        return best

    def _last_step(self) -> bool:
        state = self.state
        return state.stop_reason is not None or state.step >= state.total_steps

    # Checkpoints ---------------------------------------------------------------

    def _save_checkpoint(self) -> Path:
        state = self.state
        with self._signals.protected(), self.phase("checkpointing"):
            path = self._checkpoints.save(
                state,
                self.components.policy,
                run_config=self.config.to_dict(),
                dataloader=self._loader_state,
                callbacks=self._callbacks.state_dict(),
            )
            state.last_checkpoint = str(path)
        self._record({"timing:checkpointing": self.timer.reduce("checkpointing")})
        self._call("on_checkpoint", path)
        return path

    def _keep_checkpoint(self) -> Path | None:
        """Save what an interrupted run has reached, where that is possible."""
        if not self._opened or not self.config.checkpointing.enabled:
            return None
        try:
            if not self._signals.held and self._checkpoints.saved_at != self.state.step:
                self._save_checkpoint()
        except Interrupted:
            # A further signal: what was written whole counts, the rest does not.
            self._signals.acknowledge()
        except Exception:
            _logger.exception("no checkpoint of step %d", self.state.step)
        last = self.state.last_checkpoint
        return Path(last) if last else None

    def _restore(self, checkpoint: Path) -> None:
        info = self._checkpoints.load(checkpoint)
        self.state.restore(info["state"])
        self.state.last_checkpoint = str(checkpoint)
        self._loader.load_state_dict(info["dataloader"])
        self._callbacks.load_state_dict(info["callbacks"])
        self._metrics_logger.resume_at(self.state.step)
        path = self._metrics_logger.log_dir / "metrics.jsonl"
        self.history = History.read(path, up_to=self.state.step)

    # Start and end ---------------------------------------------------------------

    def _open(
        self,
        dataset: Any,
        val_dataset: Any,
        reward_fn: Callable[..., Any] | None,
        environment: Any,
        resume: Resume,
    ) -> None:
        config = self.config
        self.state, self.history = TrainerState(), History()
        scorer = choose_environment(config, reward_fn, environment)
        self.needs = self._needs(has_environment=scorer is not None)
        self._call("on_phase", "data", 0, 0)
        check_components(config, self.given, self.needs)
        self.components = with_tokenizer(self.given, config)
        self._loader, self._val_loader = self._load_data(dataset, val_dataset)
        if reward_fn is not None and self.sample_prompt is not None:
            try_reward_fn(reward_fn, self.sample_prompt)
        self._signals.raise_pending()
        self._schedule = self._validation_schedule()
        max_epochs, max_steps = self._limits()
        total_steps = count_steps(len(self._loader), max_epochs, max_steps)
        found = find_resume(config.output_dir, resume, config.checkpointing)
        self.run_dir = found.path if found else claim_run_folder(config.output_dir)
        checkpoint = found.checkpoint if found else None
        self._open_outputs()
        _logger.info("%s; %d steps", self.plan.describe(), total_steps)
        self._call("on_phase", "setup", 0, total_steps)
        self.components = start_components(
            config,
            self.components,
            self.needs,
            self._closing,
            checkpoint=checkpoint,
            environment=scorer,
            signals=self._signals,
            pool=self._pool,
        )
        self._signals.raise_pending()
        self._setup_algorithm()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.state.total_steps = total_steps
        self._loader_state = self._loader.state_dict()
        self._opened = True

    def _open_outputs(self) -> None:
        config = self.config
        self._metrics_logger = LoggerFacade(config.logger, self.run_dir)
        self._closing.callback(self._metrics_logger.close)
        self._metrics_logger.log_hyperparams(config.to_dict())
        folder = self.run_dir / CHECKPOINTS
        self._checkpoints = RunCheckpoints(config.checkpointing, folder, self.algorithm)
        self._closing.callback(self._checkpoints.close)

    def _result(self) -> TrainResult:
        enabled = self.config.checkpointing.enabled
        best = self._checkpoints.best() if enabled else None
        return TrainResult(
            metrics=dict(self.state.metrics),
            history=self.history,
            checkpoint_path=best,
            run_dir=self.run_dir,
            steps=self.state.step,
            stop_reason=self.state.stop_reason or "",
        )

    def _call(self, hook: str, *arguments: Any) -> None:
        self._callbacks.call(hook, self, *arguments)

    def _report_exception(self, error: BaseException) -> None:
        try:
            self._call("on_exception", error)
        except Exception:
            # What a hook raises must not hide why the run ended.
            _logger.exception("a callback failed in on_exception")


def _performance(
    metrics: Mapping[str, float], timing: Mapping[str, float]
) -> dict[str, float]:
    """Return figures per second, by the names of NeMo RL."""
    step_s = timing["total_step_time"]
    rates = {
        "samples_per_sec": (metrics.get("num_samples"), step_s),
        "tokens_per_sec": (metrics.get("num_tokens"), step_s),
        "generation_tokens_per_sec": (
            metrics.get("num_generated_tokens"),
            timing.get("generation"),
        ),
        "policy_training_tokens_per_sec": (
            metrics.get("num_tokens"),
            timing.get("policy_training"),
        ),
    }
    return {
        f"performance:{name}": amount / seconds
        for name, (amount, seconds) in rates.items()
        if amount is not None and seconds
    }
