"""Fill in the longest row of a policy from the context of its model."""

from __future__ import annotations

from transformers import AutoConfig

from rl_models.checkpoint.context_length import context_length
from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError
from rl_models.row_length import UNKNOWN_CONTEXT, fitting

__all__ = ["with_row_length"]


def with_row_length(config: PolicyConfig) -> PolicyConfig:
    """Return a config with `max_total_sequence_length`.

    Args:
        config: If it has none, its model is on the hub or was made after the config was
            read.

    Raises:
        ModelLoadError: The model is not there, or its config cannot be read.
    """
    if config.max_total_sequence_length is not None:
        return config
    folder = check_model_folder(config.model_name)
    name = str(folder or config.model_name)
    if folder is None:
        check_hub_name(name)
    try:
        model = AutoConfig.from_pretrained(name, **config.hf_config_overrides)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"cannot read the config of the model {name!r}: {error}"
        ) from error
    context = context_length(model) or UNKNOWN_CONTEXT
    return config.replace(max_total_sequence_length=fitting(context, config.to_dict()))
