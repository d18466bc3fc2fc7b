"""Methods by name: an algorithm and what the method's paper sets of it, as data.

Each YAML file beside this module is one preset: `algorithm`, `title`, `paper`, further
names as `aliases`, and `config`, which is merged beneath what the user sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rl_distributed.config import load_config, merge_configs
from rl_distributed.errors import ConfigError

__all__ = ["Preset", "find_preset", "preset_names", "register_preset"]


@dataclass(frozen=True)
class Preset:
    """A named way to configure an algorithm."""

    name: str
    algorithm: str
    """Name of the algorithm whose trainer runs it."""
    title: str
    """One line that says what it is."""
    settings: Mapping[str, Any]
    """Tree of configuration keys that differ from the algorithm's defaults."""
    paper: str | None = None
    """Where it was published."""
    aliases: tuple[str, ...] = ()
    """Further names."""

    def under(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tree of settings that begins with those of the preset."""
        return merge_configs(self.settings, settings)


_registered: dict[str, Preset] = {}


@cache
def _shipped() -> dict[str, Preset]:
    found = {}
    for entry in resources.files(__name__).iterdir():
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            found[name] = _read(name, Path(str(entry)))
    return dict(sorted(found.items()))


def _read(name: str, path: Path) -> Preset:
    data = load_config(path)
    return Preset(
        name=name,
        algorithm=data["algorithm"],
        title=data["title"],
        settings=data["config"],
        paper=data.get("paper"),
        aliases=tuple(data.get("aliases", ())),
    )


def preset_names() -> list[str]:
    """Return the names of all presets, sorted, without aliases."""
    return sorted({**_shipped(), **_registered})


def find_preset(name: str) -> Preset | None:
    """Return the preset of that name or alias, or None."""
    known = {**_shipped(), **_registered}
    if name in known:
        return known[name]
    return next((p for p in known.values() if name in p.aliases), None)


def register_preset(preset: Preset) -> None:
    """Make a preset known.

    Raises:
        ConfigError: Another one has its name, or one of its aliases.
    """
    for name in (preset.name, *preset.aliases):
        present = find_preset(name)
        if present is not None and present != preset:
            raise ConfigError(
                f"there is a preset {name!r} already ({present.title}): choose "
                "another name"
            )
    _registered[preset.name] = preset
