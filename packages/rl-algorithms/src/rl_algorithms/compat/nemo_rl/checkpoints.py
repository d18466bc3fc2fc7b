"""`CheckpointManager` with the configuration of NeMo RL and paths as strings."""

from __future__ import annotations

from typing import Any

from rl_algorithms.compat.nemo_rl.options import as_keys, refuse_keys
from rl_distributed import checkpoint

__all__ = ["CheckpointManager"]

_MODEL = "rl_models saves a model in one format, that of transformers"
_REFUSED = {
    "ft_save_period": (None, "set save_period"),
    "pretrained_checkpoint": (None, "set policy.model_name to a model folder"),
    "is_async": (False, "begin_finalization finishes a checkpoint in a thread"),
    "is_peft": (False, "policy.lora"),
    "peft_config": (None, "policy.lora"),
    "model_repo_id": (None, _MODEL),
    "model_cache_dir": (None, _MODEL),
}
# How a model is written there; here it is written in one way.
_OF_THE_MODEL = ("model_save_format", "save_consolidated")


class CheckpointManager(checkpoint.CheckpointManager):
    """See `rl_distributed.CheckpointManager`; returned paths are strings.

    Args:
        config: Configuration of NeMo RL, a mapping or an object.

    Raises:
        ConfigError: A key is unknown, or requests an unsupported feature.
    """

    def __init__(self, config: Any) -> None:
        keys = as_keys(config)
        latest = keys.pop("ft_keep_latest_k", None)
        if latest is not None:
            keys["keep_latest_k"] = latest
        refuse_keys(keys, _REFUSED, "checkpointing")
        for key in _OF_THE_MODEL:
            keys.pop(key, None)
        settings = checkpoint.CheckpointingConfig.from_dict(
            keys, source="checkpointing"
        )
        super().__init__(settings)

    def get_latest_checkpoint_path(self) -> str | None:  # type: ignore[override]
        """Return the newest complete checkpoint, or None."""
        found = super().get_latest_checkpoint_path()
        return None if found is None else str(found)

    def get_best_checkpoint_path(self) -> str | None:  # type: ignore[override]
        """Return the complete checkpoint with the best metric, or None."""
        found = super().get_best_checkpoint_path()
        return None if found is None else str(found)
