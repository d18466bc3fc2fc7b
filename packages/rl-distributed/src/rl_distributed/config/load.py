"""Load a YAML configuration: parents, overrides, interpolation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_distributed.config.interpolation import interpolate
from rl_distributed.config.origins import ConfigDocument, merge_configs, plain_copy
from rl_distributed.config.overrides import apply_overrides, parse_overrides
from rl_distributed.config.yaml_file import read_yaml
from rl_distributed.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["load_config"]

PARENTS_KEY = "defaults"
_SUFFIXES = (".yaml", ".yml")
_MOST_GENERATIONS = 50


def load_config(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    *,
    schema: type[BaseModel] | None = None,
) -> ConfigDocument:
    """Get the merged data of a YAML file, as a dict that knows the origin of its keys.

    Args:
        path: The file. Its `defaults:` key, a path or a list of paths relative to the
            file, names parents; later parents win over earlier ones, and the file
            wins over all.
        overrides: `key=value`, `+key=value`, `++key=value` or `~key`.
        schema: With a configuration class, an override may set any key of the class,
            and interpolation finds the defaults of keys that are not in the data.

    Raises:
        ConfigError: A file is missing, is no YAML or inherits from itself, an override
            is malformed or names an unknown key, or an interpolation has no target.
    """
    document = _load_with_parents(Path(path), (), {})
    document = apply_overrides(document, parse_overrides(overrides), schema)
    return interpolate(document, schema)


def _load_with_parents(
    path: Path, chain: tuple[Path, ...], loaded: dict[Path, ConfigDocument]
) -> ConfigDocument:
    """Load a file over its parents.

    Args:
        path: The file.
        chain: The files that inherit from it, one from the other.
        loaded: What was loaded before. Files may share parents, and these theirs: each
            is read once.
    """
    resolved = path.resolve()
    if resolved in loaded:
        return loaded[resolved]
    if resolved in chain:
        cycle = [*chain[chain.index(resolved) :], resolved]
        raise ConfigError(
            f"'{PARENTS_KEY}' go in a circle: {' -> '.join(map(str, cycle))}"
        )
    if len(chain) > _MOST_GENERATIONS:
        raise ConfigError(
            f"'{PARENTS_KEY}' of {chain[0]} go back more than {_MOST_GENERATIONS} "
            f"generations, to {resolved}; inherit from fewer files"
        )
    own = read_yaml(path)
    parents = _parent_paths(own, path)
    # It controls how the file is read and is not a key of the configuration.
    own.pop(PARENTS_KEY, None)
    own.forget_origins((PARENTS_KEY,))
    document = ConfigDocument()
    for parent in parents:
        inherited = _load_with_parents(parent, (*chain, resolved), loaded)
        document = merge_configs(document, inherited)
    loaded[resolved] = merge_configs(document, own)
    return loaded[resolved]


def _parent_paths(document: ConfigDocument, path: Path) -> list[Path]:
    listed: Any = plain_copy(document.get(PARENTS_KEY))
    origin = document.origin((PARENTS_KEY,))
    names = [listed] if isinstance(listed, str) else listed or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"'{PARENTS_KEY}' must be a path or a list of paths: "
            f"got {listed!r} ({origin})"
        )
    found = []
    for name in names:
        file = path.parent / Path(name).expanduser()
        candidates = [file, *(file.with_name(file.name + end) for end in _SUFFIXES)]
        existing = [candidate for candidate in candidates if candidate.is_file()]
        if not existing:
            raise ConfigError(
                f"{origin} inherits from {name!r}, but {file} does not exist; "
                "the path is relative to the file that names it"
            )
        found.append(existing[0])
    return found
