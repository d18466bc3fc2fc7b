"""From a response to the action that is sent to a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.errors import ConfigError
from rl_envs.bridges.openenv.config import OpenEnvConfig
from rl_envs.bridges.openenv.functions import load_function
from rl_envs.json_checks import NotJsonError, read_json
from rl_envs.worlds.game import said_action

__all__ = ["ActionForm"]

_TEXT = "{text}"


class ActionForm:
    """Reads actions.

    Args:
        config: The settings.

    Raises:
        ConfigError: The function cannot be loaded.
    """

    def __init__(self, config: OpenEnvConfig) -> None:
        self._template, self._part = config.action, config.read_action
        self._name = config.action_function
        self._function = load_function(self._name) if self._name else None

    def read(self, response: str) -> tuple[dict[str, Any], str]:
        """Return the action of a response, and the part that it was read from.

        Raises:
            ValueError: It is none; the message is for the model.
            ConfigError: The function gives no action.
        """
        text = said_action(response) if self._part == "move" else response.strip()
        if self._function is None:
            return self._filled(text), text
        action = self._function(text)
        if not isinstance(action, Mapping):
            raise ConfigError(
                f"action_function {self._name!r} must return a dict: got "
                f"{type(action).__name__} {action!r:.60}"
            )
        return dict(action), text

    def _filled(self, text: str) -> dict[str, Any]:
        action = _fill(self._template, text)
        if not isinstance(action, dict):
            raise ValueError("That is no action: it must be a JSON object.")
        return action


def _fill(template: Any, text: str) -> Any:
    if isinstance(template, dict):
        return {key: _fill(part, text) for key, part in template.items()}
    if isinstance(template, list):
        return [_fill(part, text) for part in template]
    if not isinstance(template, str):
        return template
    if template == "{int}":
        return _number(int, text, "a whole number")
    if template == "{float}":
        return _number(float, text, "a number")
    if template == "{json}":
        try:
            return read_json(text)
        except NotJsonError as error:
            raise ValueError(f"That is no action: {error}.") from None
    return template.replace(_TEXT, text)


def _number(kind: type[int] | type[float], text: str, rule: str) -> int | float:
    # Finite and of a sane length: it is sent as JSON.
    if len(text) <= 40 and "_" not in text:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is not None and abs(value) != float("inf") and value == value:
            return value
    raise ValueError(f"That is no action: it must be {rule}.")
