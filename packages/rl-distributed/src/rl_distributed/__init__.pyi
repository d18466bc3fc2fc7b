from .actor_environments import (
    ActorEnvironment as ActorEnvironment,
    ContainerEnvironment as ContainerEnvironment,
    DriverEnvironment as DriverEnvironment,
    EnvironmentStore as EnvironmentStore,
    ExtraEnvironment as ExtraEnvironment,
    InstalledEnvironment as InstalledEnvironment,
    InterpreterEnvironment as InterpreterEnvironment,
    OverlayEnvironment as OverlayEnvironment,
    UvWorkspaceEnvironment as UvWorkspaceEnvironment,
)
from .batch.batched_data_dict import (
    BatchedDataDict as BatchedDataDict,
    DynamicBatchingArgs as DynamicBatchingArgs,
    SequencePackingArgs as SequencePackingArgs,
    SlicedDataDict as SlicedDataDict,
)
from .batch.packing import (
    PackingAlgorithm as PackingAlgorithm,
    SequencePacker as SequencePacker,
    get_packer as get_packer,
)
from .checkpoint import (
    CheckpointingConfig as CheckpointingConfig,
    CheckpointManager as CheckpointManager,
)
from .cluster.config import ClusterConfig as ClusterConfig
from .cluster.resources import ResourceManager as ResourceManager
from .cluster.start import (
    init_ray as init_ray,
    shutdown_ray as shutdown_ray,
    wait_for_nodes as wait_for_nodes,
)
from .cluster.virtual_cluster import RayVirtualCluster as RayVirtualCluster
from .config import (
    Config as Config,
    ConfigDocument as ConfigDocument,
    ConfigRow as ConfigRow,
    Override as Override,
    apply_overrides as apply_overrides,
    explain_config as explain_config,
    load_config as load_config,
    merge_configs as merge_configs,
    parse_overrides as parse_overrides,
)
from .errors import (
    ActorEnvironmentError as ActorEnvironmentError,
    AuditError as AuditError,
    BatchError as BatchError,
    CallCancelledError as CallCancelledError,
    CheckpointError as CheckpointError,
    ClusterLostError as ClusterLostError,
    ConfigError as ConfigError,
    DeadlineExceededError as DeadlineExceededError,
    DistributedError as DistributedError,
    LockHeldError as LockHeldError,
    MissingExtraError as MissingExtraError,
    PackingError as PackingError,
    QueueClosedError as QueueClosedError,
    RegistryError as RegistryError,
    ResourceInsufficientError as ResourceInsufficientError,
    SecurityError as SecurityError,
    ShardingError as ShardingError,
    TransferError as TransferError,
    UserError as UserError,
    WorkerDiedError as WorkerDiedError,
    WorkerError as WorkerError,
    WorkerHungError as WorkerHungError,
    WorkerMethodError as WorkerMethodError,
    WorkerStartError as WorkerStartError,
)
from .failures.worker import (
    WorkerFailure as WorkerFailure,
    WorkerHealth as WorkerHealth,
)
from .file_lock import FileLock as FileLock, FolderLock as FolderLock
from .launch import (
    KubeRayConfig as KubeRayConfig,
    SlurmConfig as SlurmConfig,
    kuberay_manifest as kuberay_manifest,
    slurm_script as slurm_script,
)
from .logs.logging import (
    configure_logging as configure_logging,
    get_logger as get_logger,
    log_context as log_context,
)
from .metrics import (
    Distribution as Distribution,
    Histogram as Histogram,
    Last as Last,
    LoggerConfig as LoggerConfig,
    LoggerFacade as LoggerFacade,
    Max as Max,
    Mean as Mean,
    Min as Min,
    ResourceSampler as ResourceSampler,
    Sum as Sum,
    reduce_metrics as reduce_metrics,
)
from .named_sharding import NamedSharding as NamedSharding
from .queues.queue import BoundedQueue as BoundedQueue
from .registry import Registry as Registry
from .security.access import make_certificates as make_certificates
from .security.audit import (
    enable_audit as enable_audit,
    make_audit_key as make_audit_key,
    verify_audit_log as verify_audit_log,
)
from .security.tls_files import TlsFiles as TlsFiles
from .timing.timer import TimeoutChecker as TimeoutChecker, Timer as Timer
from .timing.tracing import Span as Span, export_chrome_trace as export_chrome_trace
from .transfer import (
    CollectiveLink as CollectiveLink,
    CudaIpcLink as CudaIpcLink,
    FileLink as FileLink,
    Manifest as Manifest,
    ObjectStoreLink as ObjectStoreLink,
    SharedMemoryLink as SharedMemoryLink,
    TensorStream as TensorStream,
    receive_tensors as receive_tensors,
    send_tensors as send_tensors,
)
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
    WorkerResult as WorkerResult,
    is_cancelled as is_cancelled,
    recursive_merge_options as recursive_merge_options,
    stop_if_cancelled as stop_if_cancelled,
)
