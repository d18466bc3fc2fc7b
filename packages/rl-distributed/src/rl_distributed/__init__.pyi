from .actor_environments import ActorEnvironment as ActorEnvironment
from .batch.batched_data_dict import (
    BatchedDataDict as BatchedDataDict,
    DynamicBatchingArgs as DynamicBatchingArgs,
    SequencePackingArgs as SequencePackingArgs,
    SlicedDataDict as SlicedDataDict,
)
from .batch.packing import (
    PackingAlgorithm as PackingAlgorithm,
    get_packer as get_packer,
)
from .checkpoint import CheckpointManager as CheckpointManager
from .cluster.config import ClusterConfig as ClusterConfig
from .cluster.resources import ResourceManager as ResourceManager
from .cluster.start import (
    init_ray as init_ray,
    shutdown_ray as shutdown_ray,
)
from .cluster.virtual_cluster import RayVirtualCluster as RayVirtualCluster
from .config import (
    Config as Config,
    load_config as load_config,
    parse_overrides as parse_overrides,
)
from .errors import (
    ConfigError as ConfigError,
    DeadlineExceededError as DeadlineExceededError,
    WorkerDiedError as WorkerDiedError,
    WorkerError as WorkerError,
    WorkerHungError as WorkerHungError,
)
from .logs.logging import get_logger as get_logger
from .metrics import LoggerFacade as LoggerFacade
from .named_sharding import NamedSharding as NamedSharding
from .timing.timer import Timer as Timer
from .version import __version__ as __version__
from .workers import (
    FailFast as FailFast,
    MultiWorkerFuture as MultiWorkerFuture,
    RayWorkerBuilder as RayWorkerBuilder,
    RayWorkerGroup as RayWorkerGroup,
    RestartGroup as RestartGroup,
    RestartWorker as RestartWorker,
    Retry as Retry,
    WorkerPool as WorkerPool,
    recursive_merge_options as recursive_merge_options,
)
