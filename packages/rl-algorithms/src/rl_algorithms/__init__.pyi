from .advantages import (
    AdvantageConfig as AdvantageConfig,
    GRPOAdvantageEstimator as GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator as RawRewardAdvantageEstimator,
    calculate_baseline_and_std_per_prompt as calculate_baseline_and_std_per_prompt,
)
from .api import train as train
from .data import (
    BatchedDataLoader as BatchedDataLoader,
    DataConfig as DataConfig,
    DataModule as DataModule,
    Mixture as Mixture,
    load_dataset_any as load_dataset_any,
)
from .distillation.config import (
    DistillationConfig as DistillationConfig,
    DistillationSettings as DistillationSettings,
)
from .distillation.trainer import DistillationTrainer as DistillationTrainer
from .dpo.config import DPOConfig as DPOConfig, DPOSettings as DPOSettings
from .dpo.trainer import DPOTrainer as DPOTrainer
from .errors import AlgorithmError as AlgorithmError, DataError as DataError
from .evaluation import (
    EvalConfig as EvalConfig,
    EvaluationResult as EvaluationResult,
    evaluate as evaluate,
)
from .grpo.config import GRPOConfig as GRPOConfig, GRPOSettings as GRPOSettings
from .grpo.trainer import GRPOTrainer as GRPOTrainer
from .losses import (
    ClippedPGLossConfig as ClippedPGLossConfig,
    ClippedPGLossFn as ClippedPGLossFn,
    DistillationLossConfig as DistillationLossConfig,
    DistillationLossFn as DistillationLossFn,
    DPOLossConfig as DPOLossConfig,
    DPOLossFn as DPOLossFn,
    MseValueLossConfig as MseValueLossConfig,
    MseValueLossFn as MseValueLossFn,
    NLLLossFn as NLLLossFn,
    PreferenceLossConfig as PreferenceLossConfig,
    PreferenceLossFn as PreferenceLossFn,
    calculate_kl as calculate_kl,
    masked_mean as masked_mean,
)
from .ppo.config import PPOConfig as PPOConfig, PPOSettings as PPOSettings
from .ppo.trainer import PPOTrainer as PPOTrainer
from .presets import (
    Preset as Preset,
    preset_names as preset_names,
    register_preset as register_preset,
)
from .registry import (
    algorithm_names as algorithm_names,
    get_algorithm as get_algorithm,
    get_config_class as get_config_class,
    register_algorithm as register_algorithm,
)
from .replay.result import ReplayResult as ReplayResult
from .replay.run_replay import replay_run as replay_run
from .rm.config import RMConfig as RMConfig, RMSettings as RMSettings
from .rm.scoring import RewardModelFn as RewardModelFn
from .rm.trainer import RMTrainer as RMTrainer
from .rollout import (
    Outcome as Outcome,
    RetryConfig as RetryConfig,
    RolloutConfig as RolloutConfig,
    RolloutEngine as RolloutEngine,
    RolloutResult as RolloutResult,
    RolloutSettings as RolloutSettings,
)
from .sft.config import SFTConfig as SFTConfig, SFTSettings as SFTSettings
from .sft.trainer import SFTTrainer as SFTTrainer
from .trainers.base import BaseTrainer as BaseTrainer
from .trainers.callbacks import Callback as Callback, LoggingCallback as LoggingCallback
from .trainers.run.control_requests import (
    ControlAnswer as ControlAnswer,
    control_run as control_run,
)
from .trainers.run.history import History as History
from .trainers.run.result import TrainResult as TrainResult
from .trainers.run.signals import Interrupted as Interrupted
from .trainers.run.state import TrainerState as TrainerState
from .trainers.sampling.validation import ValidationResult as ValidationResult
from .trainers.settings.config import (
    EnvConfig as EnvConfig,
    TrainerConfig as TrainerConfig,
)
from .trainers.settings.config_updates import (
    ConfigUpdate as ConfigUpdate,
    update_run as update_run,
)
from .trainers.settings.run_settings import RunSettings as RunSettings
from .trainers.setup.kept_workers import KeptWorkers as KeptWorkers
from .trainers.trainer_interface import RunningTrainer as RunningTrainer
from .version import __version__ as __version__
