"""Configuration files of NeMo RL as plain mappings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_algorithms.compat.nemo_rl.differences import warn_difference
from rl_distributed import config
from rl_distributed.config.origins import plain_copy

__all__ = [
    "load_config",
    "load_config_with_inheritance",
    "parse_hydra_overrides",
    "register_omegaconf_resolvers",
]


class LoadedConfig(dict[str, Any]):
    """Data of a file, which overrides are applied to before `${...}` is resolved."""

    def __init__(self, path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.path = path

    def is_changed(self) -> bool:
        """Return whether the program has changed the data since they were loaded."""
        loaded: dict[str, Any] = plain_copy(config.load_config(self.path))
        return loaded != self


def load_config(config_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file with its `defaults`, and resolve every `${...}`."""
    return LoadedConfig(config_path, plain_copy(config.load_config(config_path)))


def load_config_with_inheritance(
    config_path: str | os.PathLike[str],
    base_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Read a YAML file with its `defaults`, as `load_config` does.

    Args:
        config_path: The file.
        base_dir: Folder that a relative path starts from; None: the current one.
    """
    return load_config(Path(base_dir or "") / config_path)


def parse_hydra_overrides(
    cfg: Mapping[str, Any], overrides: Iterable[str]
) -> dict[str, Any]:
    """Return the configuration with overrides applied.

    Args:
        cfg: What `load_config` returned, or any mapping.
        overrides: `key=value`, `+key=value`, `++key=value` or `~key`.

    Raises:
        ConfigError: An override is malformed, or names an unknown key.
    """
    texts = list(overrides)
    found: dict[str, Any]
    if isinstance(cfg, LoadedConfig) and not cfg.is_changed():
        found = plain_copy(config.load_config(cfg.path, texts))
        return found
    if isinstance(cfg, LoadedConfig):
        warn_difference(
            "parse_hydra_overrides: ${...} was resolved when the file was loaded, and "
            "does not follow overrides, as the configuration was changed in between"
        )
    found = plain_copy(config.apply_overrides(cfg, config.parse_overrides(texts)))
    return found


def register_omegaconf_resolvers() -> None:
    """Do nothing: the resolvers `add`, `mul`, `div`, `max` and `min` are built in."""
