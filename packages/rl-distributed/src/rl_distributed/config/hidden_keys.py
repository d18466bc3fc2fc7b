"""The configuration of a run as it may lie in a file: without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.config.origins import dotted
from rl_distributed.redaction import REDACTED, redacted

__all__ = ["hide_secrets"]


def hide_secrets(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Put `***` in the place of secrets, by the names of keys and by form.

    Templates stay: `{% set eos_token = '<end>' %}` only looks as if it held one.

    Args:
        config: A tree of settings.

    Returns:
        The tree to write, and the dotted keys whose values are not in it; of a value
        in a list, the key of the list.
    """
    hidden: dict[str, None] = {}
    shown = _hide(config, redacted(config), (), hidden)
    return shown, list(hidden)


def _hide(
    value: Any, shown: Any, path: tuple[str, ...], hidden: dict[str, None]
) -> Any:
    if isinstance(value, Mapping) and isinstance(shown, Mapping):
        return {
            k: _hide(v, shown[k], (*path, str(k)), hidden) for k, v in value.items()
        }
    if isinstance(value, list | tuple) and isinstance(shown, list):
        pairs = zip(value, shown, strict=True)
        return [_hide(item, instead, path, hidden) for item, instead in pairs]
    # Unchanged values hold no secret.
    if value == shown or _is_template(value, shown):
        return value
    hidden[dotted(path)] = None
    return shown


def _is_template(value: Any, shown: Any) -> bool:
    """Whether only a part of a text would be hidden, and the text has placeholders."""
    return isinstance(value, str) and "{" in value and shown != REDACTED
