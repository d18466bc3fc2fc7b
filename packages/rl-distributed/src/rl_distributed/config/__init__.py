"""Typed, frozen configuration, and YAML files with inheritance and overrides."""

from __future__ import annotations

from rl_distributed.config.base import Config
from rl_distributed.config.changes import change_config, changeable_keys
from rl_distributed.config.interpolation import interpolate
from rl_distributed.config.key_docs import ConfigRow, explain_config
from rl_distributed.config.load import load_config
from rl_distributed.config.origins import ConfigDocument, merge_configs
from rl_distributed.config.overrides import (
    Override,
    apply_overrides,
    parse_overrides,
)
from rl_distributed.config.schema import changeable

__all__ = [
    "Config",
    "ConfigDocument",
    "ConfigRow",
    "Override",
    "apply_overrides",
    "change_config",
    "changeable",
    "changeable_keys",
    "explain_config",
    "interpolate",
    "load_config",
    "merge_configs",
    "parse_overrides",
]
