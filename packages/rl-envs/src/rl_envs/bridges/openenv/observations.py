"""Observations of a server as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rl_distributed.errors import ConfigError
from rl_envs.bridges.openenv.config import OpenEnvServer
from rl_envs.bridges.openenv.functions import load_function

__all__ = ["ObservationText"]

_FIELD = re.compile(r"\{([A-Za-z_][\w.]*)\}")


class ObservationText:
    """Turns observations into text.

    Args:
        server: The settings.

    Raises:
        ConfigError: The function cannot be loaded.
    """

    def __init__(self, server: OpenEnvServer) -> None:
        self._show, self._name = server.show, server.observation_function
        self._function = load_function(self._name) if self._name else None

    def of(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation.

        Raises:
            ConfigError: It lacks a field of `show`, or the function gives no text.
        """
        if self._function is not None:
            text = self._function(dict(observation))
            if not isinstance(text, str):
                raise ConfigError(
                    f"observation_function {self._name!r} must return text: got "
                    f"{type(text).__name__} {text!r:.60}"
                )
            return text
        if self._show:
            return _FIELD.sub(lambda found: _field(observation, found[1]), self._show)
        only = next(iter(observation.values()), None)
        if len(observation) == 1 and isinstance(only, str):
            return only
        return json.dumps(observation, ensure_ascii=False)


def _field(observation: Mapping[str, Any], path: str) -> str:
    value: Any = observation
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ConfigError(
                f"show names the field {path!r}, which an observation lacks: it has "
                f"{_paths(observation)}"
            )
        value = value[name]
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _paths(observation: Mapping[str, Any]) -> str:
    return ", ".join(map(str, observation)) or "no fields"
