"""Where recipes lie: those of this package, and those that a user gives by path.

Imports nothing heavy: a command looks here before it loads anything.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rl_distributed.errors import ConfigError

__all__ = ["recipe_names", "recipe_path"]


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with this package."""
    folder = resources.files("rl_cli") / "recipes"
    names = [entry.name for entry in folder.iterdir()]
    return sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml"))


def recipe_path(name: str) -> Path | None:
    """Return the file of a recipe; None where it is no recipe's name.

    Raises:
        ConfigError: It is a path, and there is no such file.
    """
    if name in recipe_names():
        return Path(str(resources.files("rl_cli") / "recipes" / f"{name}.yaml"))
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"There is no recipe file {name}; check the path.")
        return path
    return None
