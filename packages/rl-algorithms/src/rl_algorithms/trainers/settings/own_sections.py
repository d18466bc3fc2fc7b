"""Sections that a trainer adds to its configuration as plain mappings.

The result of `_build_config_from_pretrained` without settings determines the keys of a
section, their types and their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import Field, create_model

from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.keywords import build_config, route
from rl_distributed.config import Config
from rl_distributed.errors import ConfigError

__all__ = ["build_with_sections", "config_class_of"]

# A default of 1 says nothing against 0.5, so integers accept floats as well.
_TYPES: dict[type, Any] = {bool: bool, int: int | float, float: float, str: str}


@cache
def config_class_of(trainer: Any) -> type[TrainerConfig]:
    """Return the class of a trainer's configuration, including added sections.

    Raises:
        ConfigError: An added section is not a mapping of keys to defaults.
    """
    declared: type[TrainerConfig] = trainer.config_class
    if not trainer.adds_sections():
        return declared
    name = trainer.__name__
    tree = _checked_tree(name, trainer._build_config_from_pretrained("model"))
    sections: dict[str, Any] = {}
    for section, values in tree.items():
        if section in declared.model_fields:
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{name}._build_config_from_pretrained must return the section "
                f"{section!r} as a mapping of keys to values: got "
                f"{type(values).__name__}"
            )
        fields: dict[str, Any] = {
            key: (_TYPES.get(type(value), Any), value) for key, value in values.items()
        }
        made = create_model(f"{name}_{section}", __base__=Config, **fields)
        sections[section] = (made, Field(default_factory=made))
    if not sections:
        return declared
    return create_model(f"{name}Config", __base__=declared, **sections)


def _checked_tree(name: str, tree: Any) -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return dict(tree)
    raise ConfigError(
        f"{name}._build_config_from_pretrained must return the configuration of "
        f"super(), with additions: got {type(tree).__name__}"
    )


def build_with_sections(
    trainer: Any,
    model: str,
    base: Config | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> TrainerConfig:
    """Return the configuration of a trainer with sections of its own.

    Args:
        trainer: Class of the trainer.
        model: Folder or hub name.
        base: Configuration to start from.
        settings: Values by name or dotted path.

    Raises:
        ConfigError: A name is unknown, or a value is wrong.
    """
    cls = config_class_of(trainer)
    for name in settings:
        route(cls, name)
    given = {} if base is None else {"config": base}
    built = trainer._build_config_from_pretrained(model, **given, **settings)
    tree = _checked_tree(trainer.__name__, built)
    own = set(cls.model_fields) - set(trainer.config_class.model_fields)
    start = base.to_dict() if isinstance(base, Config) else dict(base or {})
    # The method takes plain names only, so values of its sections in `base` would be
    # lost without this.
    for section in own & set(start):
        kept = {k: v for k, v in start[section].items() if k not in settings}
        tree[section] = {**tree.get(section, {}), **kept}
    whole = {n: v for n, v in settings.items() if n.partition(".")[0] in own}
    source = f"the settings of {trainer.__name__}"
    return build_config(cls, whole, base=tree, source=source)
