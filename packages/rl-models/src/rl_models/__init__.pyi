from .build.config import (
    ModelBuildConfig as ModelBuildConfig,
    TokenizerBuildConfig as TokenizerBuildConfig,
)
from .build.model import build_model as build_model
from .config import (
    DTensorConfig as DTensorConfig,
    DynamicBatchingConfig as DynamicBatchingConfig,
    MegatronConfig as MegatronConfig,
    OptimizerConfig as OptimizerConfig,
    PolicyConfig as PolicyConfig,
    SchedulerConfig as SchedulerConfig,
    SequencePackingConfig as SequencePackingConfig,
    TokenizerConfig as TokenizerConfig,
)
from .errors import (
    ContextLengthError as ContextLengthError,
    GenerationError as GenerationError,
    ModelLoadError as ModelLoadError,
    ModelsError as ModelsError,
    NonFiniteGradientError as NonFiniteGradientError,
    UnsupportedModelError as UnsupportedModelError,
    WeightSyncError as WeightSyncError,
)
from .generation.config import GenerationConfig as GenerationConfig
from .generation.vllm_config import VllmConfig as VllmConfig
from .interfaces import (
    GenerationBackend as GenerationBackend,
    GenerationInterface as GenerationInterface,
    LossFunction as LossFunction,
    PolicyInterface as PolicyInterface,
    TrainingBackend as TrainingBackend,
)
from .ops.causal_lm import load_causal_lm as load_causal_lm
from .policy.generation_policy import GenerationPolicy as GenerationPolicy
from .policy.huggingface_policy import HuggingFacePolicy as HuggingFacePolicy
from .policy.megatron_policy import MegatronPolicy as MegatronPolicy
from .policy.training_policy import TrainingPolicy as TrainingPolicy
from .policy.vllm_generation import VllmGeneration as VllmGeneration
from .registry import (
    get_generation_backend as get_generation_backend,
    get_training_backend as get_training_backend,
    register_generation_backend as register_generation_backend,
    register_training_backend as register_training_backend,
)
from .types import (
    GenerationDatumSpec as GenerationDatumSpec,
    GenerationOutputSpec as GenerationOutputSpec,
    LogprobOutputSpec as LogprobOutputSpec,
    LossInputType as LossInputType,
    LossType as LossType,
    ReferenceLogprobOutputSpec as ReferenceLogprobOutputSpec,
    SamplingParams as SamplingParams,
    TrainDatumSpec as TrainDatumSpec,
    TrainOutput as TrainOutput,
    ValueOutputSpec as ValueOutputSpec,
)
from .version import __version__ as __version__
from .weights.config import (
    ProbeConfig as ProbeConfig,
    WeightSyncConfig as WeightSyncConfig,
)
from .weights.sync import WeightSynchronizer as WeightSynchronizer
