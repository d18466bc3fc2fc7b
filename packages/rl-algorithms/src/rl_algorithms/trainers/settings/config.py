"""What the configurations of all algorithms share."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl_algorithms.data.config import DataConfig, DataKind
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.unused_keys import Idle, refuse_unread
from rl_distributed.checkpoint import CheckpointingConfig
from rl_distributed.cluster.config import ClusterConfig
from rl_distributed.config import Config, changeable
from rl_distributed.errors import ConfigError
from rl_distributed.metrics import LoggerConfig
from rl_models.config import PolicyConfig

__all__ = ["EarlyStopConfig", "EnvConfig", "FaultToleranceConfig", "TrainerConfig"]

DEFAULT_BATCH_SIZE = 32
_OF_CHECKPOINTS = tuple(
    f"checkpointing.{name}"
    for name in (
        "save_period",
        "keep_top_k",
        "keep_latest_k",
        "checkpoint_must_save_by",
        "save_optimizer",
    )
)


class EnvConfig(Config):
    """Section `env`: which environment rewards the answers."""

    name: str
    """Name of a registered environment."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's class."""
    num_workers: int = Field(1, gt=0)
    """Processes that share the rows."""
    num_cpus: float = Field(0.0, ge=0)
    """CPUs that Ray sets aside for each; 0 fits into a full cluster."""
    deadline_s: float = Field(600.0, gt=0)
    """A call of the environment that has not ended by then is reported."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of variables of the program's environment that its processes get, such as
    the key of a judge that they ask; they have no other secrets of it."""
    max_restarts: int = Field(3, ge=0)
    """How often in a row processes of the environment that died are replaced and their
    rows sent again; 0: the first death is an infrastructure error."""

    def passed(self) -> dict[str, str]:
        """Return the variables of `pass_env` with their values.

        Raises:
            ConfigError: One is not set here.
        """
        missing = [name for name in self.pass_env if name not in os.environ]
        if missing:
            raise ConfigError(
                f"env.pass_env names {', '.join(missing)}, which the environment of "
                "this program does not have: set it, or leave it out"
            )
        return {name: os.environ[name] for name in self.pass_env}


class EarlyStopConfig(Config):
    """Section `early_stop`: end a run that no longer improves."""

    patience: int = Field(gt=0, json_schema_extra=changeable())
    """Number of validations without a new best value after which the run ends."""
    metric: str | None = None
    """Name such as `val:accuracy`; null: `checkpointing.metric_name`."""
    min_delta: float = Field(0.0, ge=0, json_schema_extra=changeable())
    """A value counts as better when it exceeds the best one by more than this."""
    goal: Literal["max", "min"] | None = None
    """Whether the metric shall rise or fall; null: as `checkpointing.higher_is_better`
    says of the same metric, else a loss shall fall and anything else rise."""


class FaultToleranceConfig(Config):
    """Section `fault_tolerance`: what happens when training workers are lost.

    Lost generators and environments are replaced by the settings of their sections.
    """

    max_restarts: int = Field(3, ge=0)
    """How often in a row training workers that die or hang are started again. The run
    then goes back to its newest checkpoint, or to its start, and does the steps since
    then again. A step beyond the one that failed resets the count. 0: the first loss
    ends the run. Needs `checkpointing.enabled` and a policy that the run has started
    itself; not with `asynchronous`."""


class TrainerConfig(Config):
    """Everything that one run needs; each algorithm adds a section of its own."""

    data_kind: ClassVar[DataKind | None] = None
    """What rows are read as; None: the trainer reads them in its own way."""

    rates_prompts: ClassVar[bool] = False
    """Whether the trainer tells `data.pass_rate_filter` how prompts were solved."""

    seed: int = Field(42, ge=0)
    """Seed of everything random: data order, sampling, dropout."""
    output_dir: str | None = None
    """Folder of the run, and of no other one; null: a new folder `runs/NAME-NNN`."""
    policy: PolicyConfig
    """The model, how it is trained, and how it samples."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Where the data come from."""
    env: EnvConfig | None = None
    """The environment; null where a reward function or an object is handed in."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """The machines."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """When the run is saved."""
    early_stop: EarlyStopConfig | None = None
    """When a run that no longer improves is ended; null: never."""
    fault_tolerance: FaultToleranceConfig = Field(default_factory=FaultToleranceConfig)
    """How the run goes on without workers that it has lost."""
    peak_tflops_per_worker: float | None = Field(None, gt=0)
    """Peak rate of one training worker's device in the precision that it computes in,
    in 10^12 operations per second, for `performance:train_fp_utilization`; null: that
    of the GPU where its name is known, else no such metric."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Where metrics go."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys that the algorithm does not read; set, they are refused."""
        return ()

    def idle(self) -> tuple[Idle, ...]:
        """Return what is turned off; keys of it that are set are named in the log."""
        return tuple(
            Idle(cause, keys)
            for cause, is_off, keys in (
                (
                    "checkpointing.enabled=false",
                    not self.checkpointing.enabled,
                    _OF_CHECKPOINTS,
                ),
                (
                    "data.streaming=false",
                    not self.data.streaming,
                    ("data.streaming_shuffle_rows",),
                ),
            )
            if is_off
        )

    def kind_of_data(self) -> DataKind | None:
        """Return what rows are read as."""
        return self.data_kind

    def plan_batches(self) -> BatchPlan:
        """Return the batch sizes.

        Raises:
            ConfigError: They do not divide.
        """
        size = self.policy.train_global_batch_size or DEFAULT_BATCH_SIZE
        micro = self.policy.train_micro_batch_size
        return BatchPlan(size, 1, size, self.data_parallel_size, micro)

    def check_scorer(self, *, is_given: bool) -> None:
        """Check that something scores answers where that is needed.

        Args:
            is_given: Whether there is a reward function or an environment.

        Raises:
            ConfigError: There is none.
        """

    @model_validator(mode="after")
    def _check_unread(self) -> Self:
        skips = () if self.rates_prompts else ("data.pass_rate_filter",)
        refuse_unread(self, (*self.unread(), *skips))
        return self

    @property
    def num_workers(self) -> int:
        """Training workers of each policy."""
        return self.cluster.num_nodes * self.cluster.workers_per_node

    @property
    def data_parallel_size(self) -> int:
        """Shares that the rows of a training batch are cut into.

        Raises:
            ConfigError: `policy.parallelism` does not fit the number of workers.
        """
        return self.policy.parallelism.data_size(self.num_workers)
