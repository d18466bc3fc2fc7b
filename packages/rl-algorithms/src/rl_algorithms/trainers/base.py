"""`BaseTrainer`: the base of all trainers, with their construction and `fit`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from rl_algorithms.data import DataModule
from rl_algorithms.data.loader import Loader
from rl_algorithms.data.types import Tokenizer
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.progress import ProgressDisplay, showing
from rl_algorithms.trainers.run.result import TrainResult
from rl_algorithms.trainers.run.resume import Resume
from rl_algorithms.trainers.sampling.validation import ValidationResult
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
from rl_algorithms.trainers.setup.components import Components
from rl_algorithms.trainers.setup.given_policy import (
    checked_config,
    told_apart,
    with_ranks,
)
from rl_algorithms.trainers.setup.kept_workers import KeptWorkers
from rl_algorithms.trainers.step_tools import StepTools
from rl_algorithms.trainers.steps.method_loss import MethodLoss
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_algorithms.trainers.training_run import TrainingRun, start_alone
from rl_distributed.batch.batched_data_dict import AnyRows
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.config import Config
from rl_distributed.runs.folder import RunClaim
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.lists import RewardFns
from rl_models.interfaces import GenerationInterface, LossFunction, PolicyInterface
from rl_models.types import TRAINING_ROWS

__all__ = ["BaseTrainer"]


Section = Mapping[str, Any] | Config
"""A section of the configuration, in whose place an object may be given."""


class BaseTrainer(Algorithm[ConfigT]):
    """Base of all trainers: a subclass defines one step.

    A subclass sets `algorithm` and `config_class`, and overrides methods of
    `Algorithm`. The defaults train on rows with answers, with one optimizer step per
    batch.

    ```python
    trainer = DPOTrainer(policy, cluster, max_num_steps=100)
    trainer.train(pairs)
    ```

    Args:
        config: The whole configuration; a mapping is validated first. Or a policy,
            whose own config becomes the section `policy`.
        cluster: A `RayVirtualCluster` to use instead of creating one, for workers other
            than the policy's own: sampling, a critic, a teacher.
        policy: A `PolicyInterface` to use instead of creating one; without `config`,
            the same as passing it first.
        generation: A `GenerationInterface` to use instead of creating one.
        tokenizer: A tokenizer to use instead of loading the model's.
        pool: Pool that keeps the worker processes for the next trainer; its owner
            closes it.
        claim: Claimed folder of the run, in which its owner has already written the
            run's record; by default, the trainer claims one from `output_dir`.
        **settings: Keys of the configuration, see `from_pretrained`.

    Objects passed in are used and left open: whoever created a policy or a cluster
    shuts it down (`policy.shutdown()`). The trainer closes what it creates.

    Raises:
        ConfigError: Neither a policy nor a configuration is given, or it is invalid.
    """

    config_class: ClassVar[type[TrainerConfig]] = CustomConfig

    def __init__(
        self,
        config: ConfigT | Mapping[str, Any] | PolicyInterface | None = None,
        cluster: RayVirtualCluster | None = None,
        *,
        policy: PolicyInterface | None = None,
        generation: GenerationInterface | None = None,
        tokenizer: Tokenizer | None = None,
        pool: KeptWorkers | None = None,
        claim: RunClaim | None = None,
        **settings: Any,
    ) -> None:
        # Everything set between here and the end is the trainer's; what a subclass adds
        # later is sent to the workers with its loss.
        before = set(vars(self))
        name, config_class = type(self).__name__, config_class_of(type(self))
        tree, policy = told_apart(name, config, policy)
        found = checked_config(name, config_class, tree, policy, settings)
        super().__init__(
            cast("ConfigT", with_ranks(found, policy, cluster)),
            Components(cluster, policy, generation, None, tokenizer),
        )
        self._alone = ExitStack()
        self._pool = pool
        self._claim = claim
        self._of_base = set(vars(self)) - before

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "algorithm"):
            cls.algorithm = cls.__name__.removesuffix("Trainer").lower()

    @classmethod
    def config_type(cls) -> type[TrainerConfig]:
        """Return the class of the configuration, including added sections."""
        return config_class_of(cls)

    @classmethod
    def adds_sections(cls) -> bool:
        """Return whether the class overrides how its configuration is built."""
        own: Any = cls._build_config_from_pretrained
        return own.__func__ is not BaseTrainer._build_config_from_pretrained.__func__  # type: ignore[attr-defined]

    @classmethod
    def _build_config_from_pretrained(
        cls,
        model: str | Path,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return the configuration of a run as a tree, to which a subclass may add.

        An added section maps its keys to their values. Its keys become settings of
        `from_pretrained` and are checked like all others.

        Args:
            model: Folder or hub name.
            config: Configuration to start from.
            **settings: Values by name; those of added sections are ignored here.
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
        cluster: RayVirtualCluster | Section | None = None,
        policy: PolicyInterface | Section | None = None,
        generation: GenerationInterface | Section | None = None,
        tokenizer: Tokenizer | Section | None = None,
        **settings: Any,
    ) -> Self:
        """Create a trainer for a model folder or hub name.

        Args:
            model: The model.
            config: Configuration to start from; by default the algorithm's defaults.
            cluster: See the class; or the section of the configuration.
            policy: See the class; or the section of the configuration.
            generation: See the class; or the section `policy.generation`.
            tokenizer: See the class; or the section `policy.tokenizer`.
            **settings: Keys of the configuration. A name that exists in one section
                only may be given alone (`num_prompts_per_step=8`, `lr=1e-5`); otherwise
                use a section (`policy={...}`) or a dotted path
                (`**{"policy.backend": "dtensor"}`).

        Raises:
            ConfigError: A name is unknown, or more than one section has it.
        """
        # Each of these is either an object to use or a section of the configuration.
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
        """Create a trainer whose `__init__` may take nothing but a configuration.

        Args:
            config: The whole configuration, an object of `config_type()`. A class that
                adds sections to its configuration receives it as a tree.
            given: Components to use instead of creating them.
            pool: See the class.
            claim: See the class.

        Raises:
            ConfigError: A value is wrong, or the given policy is not a policy.
        """
        trainer = cls(cast("Any", config.to_dict() if cls.adds_sections() else config))
        # Set afterwards: the `__init__` of a subclass need not accept them.
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
        environment: EnvironmentInterface[Any] | None = None,
        callbacks: Iterable[Callback] = (),
        resume: Resume = False,
        overwrite: bool = False,
        progress: bool | ProgressDisplay = True,
    ) -> TrainResult:
        """Train.

        Args:
            dataset: A list of dicts, a data set, a file, a folder, a hub name, a
                `Mixture`, or a function that returns an iterable of rows, which is then
                streamed; by default the data set named in the configuration.
            val_dataset: Held-out data, in the same forms.
            reward_fn: Function that rewards an answer; see
                `rl_envs.FunctionalRewardWrapper`.
            environment: An environment object, used and left open.
            callbacks: Callbacks, called in this order.
            resume: False starts a new run; True continues from the newest checkpoint of
                `output_dir`, and "auto" does so if there is one; a path continues from
                that checkpoint, or from the newest one of that run folder.
            overwrite: Whether to delete the run in `output_dir`, if there is one, and
                start over.
            progress: Whether to show progress on standard error: drawn in place on a
                terminal and in a notebook, otherwise a line per step, at most one every
                10 s. Or a display to use.

        Raises:
            ConfigError: The run is impossible as configured; nothing has been loaded.
            Interrupted: A signal came; the run is saved.
            ClusterLostError: A process of Ray itself has ended; the run is saved if the
                workers still answer.
        """
        # Workers that `_train_step` started without `fit` would hold the resources that
        # this run needs.
        self._alone.close()
        self._note_own_names()
        with showing(progress) as display:
            run = TrainingRun(
                self, [*callbacks, display], pool=self._pool, claim=self._claim
            )
            if not display.has_begun:
                display.begin(self.algorithm)
            return run.fit(
                dataset,
                val_dataset,
                reward_fn,
                environment,
                resume=resume,
                overwrite=overwrite,
            )

    def train(self, dataset: Any = None, **options: Any) -> TrainResult:
        """Train; an alias of `fit` with the same arguments and result."""
        return self.fit(dataset, **options)

    # What an algorithm may leave out -----------------------------------------------

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        kind = self.config.kind_of_data()
        if kind is None:
            raise AlgorithmError(
                f"{type(self).__name__} must define how its data are read: set "
                f"data_kind of {type(self.config).__name__}, or override _load_data"
            )
        data = DataModule(
            self.config.data,
            self.components.required.tokenizer,
            kind=kind,
            batch_size=self.plan.num_prompts,
            max_length=self.config.policy.row_limit,
            seed=self.config.seed,
            train=dataset,
            validation=val_dataset,
        )
        return data.train_loader, data.validation_loader()

    def _build_loss(self) -> LossFunction:
        method = inspect.getattr_static(type(self), "_compute_loss")
        if isinstance(method, staticmethod):
            return super()._build_loss()
        return MethodLoss(self, self._own_names)

    def _setup_algorithm(self) -> None:
        self._loss = self._build_loss()

    def _train_step(self, batch: AnyRows) -> Mapping[str, Any]:
        if self._tools is None:
            self._note_own_names()
            start_alone(self, self._alone, self._pool)
            # Without `fit` nothing else marks the end, so the workers end with the
            # trainer.
            weakref.finalize(self, self._alone.close)
        metrics: dict[str, Any] = dict(count_tokens(batch))
        rows, global_batch_size = pad_to_plan(TRAINING_ROWS.checked(batch), self.plan)
        output = self.train_policy(rows, self._loss, global_batch_size)
        return metrics | train_metrics(output)

    def _validate(self, loader: Loader) -> ValidationResult:
        """Measure the loss on held-out rows."""
        # Weighted by rows, because the last batch may be smaller.
        total = count = 0.0
        for batch in map(TRAINING_ROWS.checked, loader):
            output = self.components.required.policy.train(
                batch, self._loss, eval_mode=True, global_batch_size=batch.size
            )
            total += float(output["loss"].mean()) * batch.size
            count += batch.size
            self._at_work.note_progress()
        return ValidationResult({"val_loss": total / count if count else 0.0})

    # Attributes that a loss may use in the workers ---------------------------------

    def _note_own_names(self) -> None:
        """Distinguish attributes of the subclass from those that a run sets."""
        if not hasattr(self, "_own_names"):
            self._own_names = set(vars(self)) - self._of_base - {"_of_base"}

    def _equip(self, tools: StepTools) -> None:
        before = set(vars(self))
        super()._equip(tools)
        self._own_names |= set(vars(self)) - before - {"_loss"}
