"""What the configurations of all algorithms share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl_algorithms.data.config import DataConfig
from rl_distributed.checkpoint import CheckpointingConfig
from rl_distributed.config import Config
from rl_distributed.metrics import LoggerConfig
from rl_distributed.virtual_cluster import ClusterConfig
from rl_models.config import PolicyConfig

__all__ = ["EnvConfig", "TrainerConfig"]


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


class TrainerConfig(Config):
    """Everything that one run needs; each algorithm adds a section of its own."""

    seed: int = Field(42, ge=0)
    """Seed of everything random: data order, sampling, dropout."""
    output_dir: str = "runs/run"
    """Folder of the run. A folder that another run has used is left alone: the new run
    goes to `<output_dir>-2`, and so on."""
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
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Where metrics go."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel training workers."""
        return self.cluster.num_nodes * self.cluster.workers_per_node
