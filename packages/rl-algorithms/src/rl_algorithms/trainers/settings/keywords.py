"""Configuration from keyword arguments: `lr=1e-5` finds its section."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_distributed.config import Config, change_config, changeable_keys
from rl_distributed.config.changes import flatten_changes
from rl_distributed.config.schema import SchemaNode
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "build_config",
    "build_tree",
    "changeable_in",
    "changeable_settings",
    "changed_config",
    "is_setting",
    "route",
]

ConfigT = TypeVar("ConfigT", bound=Config)

_OPTIMIZER_KWARGS = "policy.optimizer.kwargs"
# Plain names that exist in several sections but mean one of them.
_MEANINGS = {"backend": "policy.backend"}
# Keys without effect during a run: a teacher is frozen, and a critic does not sample.
_FROZEN = ("teacher.", "critic.generation.")
_ALIASES = {name: f"{_OPTIMIZER_KWARGS}.{name}" for name in ("lr", "weight_decay")}


@cache
def _paths(cls: type[Config]) -> dict[str, tuple[str, ...]]:
    """Return the dotted paths of every name in a configuration class."""
    found: dict[str, list[str]] = {}
    for path, _ in SchemaNode.of(cls).walk():
        found.setdefault(path[-1], []).append(".".join(path))
    for alias, target in _ALIASES.items():
        if alias not in found:
            found[alias] = [target]
    return {name: tuple(paths) for name, paths in found.items()}


def route(cls: type[Config], name: str) -> str:
    """Return the dotted path of a setting.

    A field of the class itself comes first, then the only section with that name;
    `backend` is the training backend. A dotted path is returned unchanged.

    Raises:
        ConfigError: No section has the name, or several have it.
    """
    if "." in name or name in cls.model_fields:
        return name
    paths = _paths(cls).get(name, ())
    if _MEANINGS.get(name) in paths:
        return _MEANINGS[name]
    # With a second model, a plain name refers to the policy.
    own = [path for path in paths if path.startswith("policy.")]
    others = {path.removeprefix("policy.") for path in own}
    if len(own) == 1 and all(path.partition(".")[2] in others for path in paths):
        return own[0]
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise ConfigError(
            f"setting {name!r} is ambiguous: it could be {' or '.join(paths)}; give "
            f"the path, as in **{{{paths[0]!r}: ...}}"
        )
    hint = did_you_mean(name, _paths(cls))
    raise ConfigError(
        f"unknown setting {name!r} of {cls.__name__}{hint or '; see its fields'}"
    )


def build_config(
    cls: type[ConfigT],
    settings: Mapping[str, Any],
    *,
    base: Config | Mapping[str, Any] | None = None,
    source: str = "the settings",
) -> ConfigT:
    """Build a configuration from settings.

    Args:
        cls: Class of the configuration.
        settings: Values by name or dotted path.
        base: Configuration to start from; by default the defaults of the class.
        source: Name of the settings in messages.

    Raises:
        ConfigError: A name is unknown or ambiguous, or a value is wrong.
    """
    return cls.from_dict(build_tree(cls, settings, base=base), source=source)


def is_setting(cls: type[Config], name: str) -> bool:
    """Return whether `route` accepts a name, or a dotted path begins with a section."""
    first, dot, _ = name.partition(".")
    return first in cls.model_fields or (not dot and name in _paths(cls))


def build_tree(
    cls: type[Config],
    settings: Mapping[str, Any],
    *,
    base: Config | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the tree that `build_config` validates."""
    tree: dict[str, Any] = _copy(base.to_dict() if isinstance(base, Config) else base)
    for name, value in settings.items():
        path = route(cls, name).split(".")
        place = tree
        if ".".join(path[:-1]) == _OPTIMIZER_KWARGS:
            _keep_optimizer_defaults(cls, tree)
        for key in path[:-1]:
            below = place.get(key)
            if not isinstance(below, dict):
                below = place[key] = {}
            place = below
        plain = value.to_dict() if isinstance(value, Config) else value
        present = place.get(path[-1])
        # Merged: a section as a setting changes its own keys and keeps the others of
        # `base`.
        if isinstance(plain, Mapping) and isinstance(present, dict):
            _merge(present, plain)
        else:
            place[path[-1]] = _copy(plain) if isinstance(plain, Mapping) else plain
    return tree


def changeable_settings(config: Config) -> list[str]:
    """Return the dotted keys of a configuration that may change during a run.

    They are marked in their classes. Keys of models that neither learn nor sample, and
    keys that the algorithm does not read, are left out.
    """
    unread = config.unread() if isinstance(config, TrainerConfig) else ()
    left_out = tuple(f"{key}." for key in unread)
    keys = changeable_in(type(config))
    return [key for key in keys if not f"{key}.".startswith(left_out)]


def changeable_in(cls: type[Config]) -> list[str]:
    """Return the dotted keys of a class that may change, whatever its values."""
    return [key for key in changeable_keys(cls) if not key.startswith(_FROZEN)]


def changed_config(
    config: ConfigT, changes: Mapping[str, Any], *, by: str
) -> tuple[ConfigT, dict[str, Any]]:
    """Return a validated copy of a run's configuration with changes.

    Args:
        config: The configuration, which is not modified.
        changes: Values by name, dotted path or section, as for `build_config`.
        by: Name of the changes in messages.

    Returns:
        The copy, and the changes by dotted path.

    Raises:
        ConfigError: A name is unknown or ambiguous, a key cannot change, or a value is
            wrong.
    """
    if not isinstance(changes, Mapping) or not all(isinstance(k, str) for k in changes):
        raise ConfigError(
            f"{by} must be a mapping of keys to values, such as {{'lr': 1e-6}}: got "
            f"{changes!r}"
        )
    cls = type(config)
    plain = {
        name: value.to_dict() if isinstance(value, Config) else value
        for name, value in changes.items()
    }
    flat: dict[str, Any] = {}
    for name, value in flatten_changes(cls, plain).items():
        path = route(cls, name)
        # `lr` and its dotted path may both be given, and their order must not decide.
        if path in flat:
            raise ConfigError(f"{by} gives {path} twice: give it once")
        flat[path] = value
    allowed = changeable_settings(config)
    return change_config(config, flat, by=by, allowed=allowed), flat


def _keep_optimizer_defaults(cls: type[Config], tree: dict[str, Any]) -> None:
    """Keep the optimizer's other default arguments if only `lr` is set."""
    keys = tuple(_OPTIMIZER_KWARGS.split("."))
    place = tree
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    if keys[-1] not in place and "name" not in place:
        default = SchemaNode.of(cls).default(keys)
        place[keys[-1]] = dict(default) if isinstance(default, Mapping) else {}


def _merge(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        present = target.get(key)
        if isinstance(value, Mapping) and isinstance(present, dict):
            _merge(present, value)
        else:
            target[key] = value


def _copy(tree: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        key: _copy(value) if isinstance(value, Mapping) else value
        for key, value in (tree or {}).items()
    }
