from .collate import SFTCollator as SFTCollator, rl_collate_fn as rl_collate_fn
from .compat import (
    add_loss_mask_to_message_log as add_loss_mask_to_message_log,
    batched_message_log_to_flat_message as batched_message_log_to_flat_message,
    get_formatted_message_log as get_formatted_message_log,
    get_keys_from_message_log as get_keys_from_message_log,
    message_log_to_flat_messages as message_log_to_flat_messages,
)
from .config import (
    DataConfig as DataConfig,
    DatasetConfig as DatasetConfig,
    SourceConfig as SourceConfig,
)
from .dataset import ProcessedDataset as ProcessedDataset
from .demonstrations import process_demonstrations as process_demonstrations
from .loader import BatchedDataLoader as BatchedDataLoader
from .mixture import Mixture as Mixture
from .module import DataModule as DataModule
from .preferences import (
    PreferenceCollator as PreferenceCollator,
    PreferenceDatumSpec as PreferenceDatumSpec,
    process_preferences as process_preferences,
)
from .prompts import process_prompts as process_prompts
from .sources import load_dataset_any as load_dataset_any
from .types import DatumSpec as DatumSpec, LLMMessageLogType as LLMMessageLogType
from .validation_sets import ValidationParts as ValidationParts
