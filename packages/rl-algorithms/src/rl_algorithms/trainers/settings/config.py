"""Configuration shared by all algorithms."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl_algorithms.data.config import DataConfig, DataKind
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.unused_keys import Idle, refuse_unread
from rl_distributed.checkpoint import CheckpointingConfig
from rl_distributed.cluster.config import ClusterConfig, ClusterSize
from rl_distributed.config import Config, changeable
from rl_distributed.errors import ConfigError
from rl_distributed.metrics import LoggerConfig
from rl_distributed.runs.control_config import ControlConfig
from rl_distributed.workers.policy import OnNodeLost
from rl_envs.task_limits import TaskLimits
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
    """Section `env`: the environment that rewards the answers."""

    name: str
    """Name of a registered environment."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's class."""
    num_workers: int = Field(1, gt=0)
    """Number of processes that share the rows."""
    num_cpus: float = Field(0.0, ge=0)
    """Number of CPUs that Ray reserves for each process; 0 fits into a full cluster."""
    deadline_s: float = Field(600.0, gt=0)
    """Deadline in seconds for a call of the environment; a later one is an error."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of environment variables of this program to pass to the processes, such as
    the key of a judge model. They get no other secrets."""
    max_restarts: int = Field(3, ge=0)
    """Maximum number of times in a row that dead processes are replaced and their rows
    sent again; with 0, the first death is an infrastructure error."""
    limits: TaskLimits = Field(default_factory=TaskLimits)
    """Limits of each task; those of a row's column `task_limits` come first."""

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
    """Name such as `val:accuracy`; null for `checkpointing.metric_name`."""
    min_delta: float = Field(0.0, ge=0, json_schema_extra=changeable())
    """Minimum improvement over the best value that counts."""
    goal: Literal["max", "min"] | None = None
    """Whether higher or lower values are better. null for
    `checkpointing.higher_is_better` if it is about the same metric; otherwise lower is
    better for a loss and higher for anything else."""


class FaultToleranceConfig(Config):
    """Section `fault_tolerance`: recovery from lost training workers, and from hangs.

    Lost generators and environments are replaced as set in their own sections.
    """

    max_restarts: int = Field(3, ge=0)
    """Maximum number of times in a row that training workers that die or hang are
    restarted. The run then goes back to its newest checkpoint, or to its start, and
    repeats the steps since then. A step beyond the one that failed resets the count.
    With 0, the first loss ends the run. Requires `checkpointing.enabled` and a policy
    started by the run itself."""
    snapshot_period: int | None = Field(None, ge=1)
    """Steps between snapshots of the whole state in the driver's memory, to which a run
    goes back if its newest checkpoint is older: it then repeats at most this many
    steps. The training workers may be on any nodes. The driver needs memory for two
    snapshots, each with the size of a checkpoint. null for no snapshots."""
    on_node_lost: OnNodeLost = "wait"
    """What happens to training workers that no node has room for, as after the loss of
    one or where `cluster.min_nodes` are enough to start: `wait` for a node;
    `shrink`: train with as many workers as have one and fit `policy.parallelism`, and
    with more from the next checkpoint on after a node has come; `fail`: end the run.
    Replicas that sample have `policy.generation.on_node_lost`."""
    min_workers: int = Field(1, ge=1)
    """Smallest number of training workers that `shrink` goes on with."""
    node_deadline_s: float = Field(300.0, gt=0)
    """Seconds to wait for a node where too few training workers have one; the run then
    ends and can be resumed."""
    stall_limit_s: float | None = Field(7200.0, gt=0)
    """Seconds without any progress, from the first step on, after which the run reports
    who waits for whom, with the stacks of all processes, and ends. Progress is the
    begin or end of a phase, an answer or a verdict. It must be longer than the longest
    of these. null for no limit."""

    @model_validator(mode="after")
    def _check_snapshots(self) -> Self:
        if self.snapshot_period is not None and not self.max_restarts:
            raise ValueError(
                f"snapshot_period={self.snapshot_period} needs max_restarts of at "
                "least 1: got 0, with which no run goes back; set one of them"
            )
        return self


class TrainerConfig(Config):
    """The whole configuration of a run; each algorithm adds a section of its own."""

    data_kind: ClassVar[DataKind | None] = None
    """Kind of the data rows; None if the trainer reads them in its own way."""

    rates_prompts: ClassVar[bool] = False
    """Whether the trainer reports pass rates to `data.pass_rate_filter`."""

    seed: int = Field(42, ge=0)
    """Seed of everything random: data order, sampling, dropout."""
    output_dir: str | None = None
    """Folder of this run alone; null for a new folder `runs/NAME-NNN`."""
    policy: PolicyConfig
    """The model, its training and its sampling."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Training and validation data."""
    env: EnvConfig | None = None
    """The environment; null if a reward function or an environment object is passed."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """The machines."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """Schedule, ranking and retention of checkpoints."""
    early_stop: EarlyStopConfig | None = None
    """End of a run that no longer improves; null for never."""
    fault_tolerance: FaultToleranceConfig = Field(default_factory=FaultToleranceConfig)
    """Recovery from the loss of training workers."""
    peak_tflops_per_worker: float | None = Field(None, gt=0)
    """Peak rate of one training worker's device at its precision, in 10^12 operations
    per second, for `performance:train_fp_utilization`. null for the peak of the GPU if
    its name is known, and no such metric otherwise."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Sinks of the metrics, and logging."""
    record_training: bool = False
    """Whether to write the rows of every training call to `recording/` of the run
    folder, from which `rl replay` repeats the training bit by bit."""
    control: ControlConfig | None = None
    """Address for `rl ctl`, which admits keys with roles; null for none, so that only
    the owner of the run controls it, through its folder."""

    def unread(self) -> tuple[str, ...]:
        """Return the keys that the algorithm does not read; setting one is an error."""
        return ()

    def idle(self) -> tuple[Idle, ...]:
        """Return the features that are disabled; keys set for them are logged."""
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
        """Return the kind of the data rows."""
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
        """Check that answers can be scored, if the algorithm needs that.

        Args:
            is_given: Whether a reward function or an environment is given.

        Raises:
            ConfigError: They cannot be scored.
        """

    @model_validator(mode="after")
    def _check_unread(self) -> Self:
        skips = () if self.rates_prompts else ("data.pass_rate_filter",)
        refuse_unread(self, (*self.unread(), *skips))
        return self

    @property
    def updates_in_flight(self) -> bool:
        """Whether the generator takes new weights while it samples."""
        return False

    @property
    def sampling_cluster(self) -> ClusterSize | None:
        """The generator's own machines; None: it is on those of `cluster`."""
        return None

    @property
    def num_workers(self) -> int:
        """Number of training workers of each policy."""
        return self.cluster.num_bundles

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel shares of a training batch.

        Raises:
            ConfigError: `policy.parallelism` does not fit the number of workers.
        """
        return self.policy.parallelism.data_size(self.num_workers)
