"""Data: sources -> processed rows -> batches, in an order that can be resumed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.data.collate import SFTCollator, rl_collate_fn
    from rl_algorithms.data.config import DataConfig, DatasetConfig, SourceConfig
    from rl_algorithms.data.dataset import ProcessedDataset
    from rl_algorithms.data.demonstrations import process_demonstrations
    from rl_algorithms.data.loader import BatchedDataLoader
    from rl_algorithms.data.message_log import (
        add_loss_mask_to_message_log,
        batched_message_log_to_flat_message,
        get_formatted_message_log,
        get_keys_from_message_log,
        message_log_to_flat_messages,
    )
    from rl_algorithms.data.mixture import Mixture
    from rl_algorithms.data.module import DataModule
    from rl_algorithms.data.preferences import (
        PreferenceCollator,
        PreferenceDatumSpec,
        process_preferences,
    )
    from rl_algorithms.data.prompts import process_prompts
    from rl_algorithms.data.sources import load_dataset_any
    from rl_algorithms.data.types import DatumSpec, LLMMessageLogType
    from rl_algorithms.data.validation_sets import ValidationParts

__all__ = [
    "BatchedDataLoader",
    "DataConfig",
    "DataModule",
    "DatasetConfig",
    "DatumSpec",
    "LLMMessageLogType",
    "Mixture",
    "PreferenceCollator",
    "PreferenceDatumSpec",
    "ProcessedDataset",
    "SFTCollator",
    "SourceConfig",
    "ValidationParts",
    "add_loss_mask_to_message_log",
    "batched_message_log_to_flat_message",
    "get_formatted_message_log",
    "get_keys_from_message_log",
    "load_dataset_any",
    "message_log_to_flat_messages",
    "process_demonstrations",
    "process_preferences",
    "process_prompts",
    "rl_collate_fn",
]

_MODULES = {
    "BatchedDataLoader": "loader",
    "DataConfig": "config",
    "DataModule": "module",
    "DatasetConfig": "config",
    "DatumSpec": "types",
    "LLMMessageLogType": "types",
    "Mixture": "mixture",
    "PreferenceCollator": "preferences",
    "PreferenceDatumSpec": "preferences",
    "ProcessedDataset": "dataset",
    "SFTCollator": "collate",
    "SourceConfig": "config",
    "ValidationParts": "validation_sets",
    "add_loss_mask_to_message_log": "message_log",
    "batched_message_log_to_flat_message": "message_log",
    "get_formatted_message_log": "message_log",
    "get_keys_from_message_log": "message_log",
    "load_dataset_any": "sources",
    "message_log_to_flat_messages": "message_log",
    "process_demonstrations": "demonstrations",
    "process_preferences": "preferences",
    "process_prompts": "prompts",
    "rl_collate_fn": "collate",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
