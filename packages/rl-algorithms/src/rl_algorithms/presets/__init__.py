"""Presets: methods by name, each an algorithm with the settings of a paper.

Each YAML file beside this module is one preset, with `algorithm`, `title`, `paper`,
further names as `aliases`, and `config`, over which the user's settings are merged.
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
    """A named configuration of an algorithm."""

    name: str
    algorithm: str
    """Name of the algorithm whose trainer runs it."""
    title: str
    """One-line description."""
    settings: Mapping[str, Any]
    """Tree of settings that differ from the algorithm's defaults."""
    paper: str | None = None
    """Publication."""
    aliases: tuple[str, ...] = ()
    """Alternative names."""

    def under(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings merged over those of the preset."""
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
    """Return the preset with a name or alias, or None."""
    known = {**_shipped(), **_registered}
    if name in known:
        return known[name]
    return next((p for p in known.values() if name in p.aliases), None)


def register_preset(preset: Preset) -> None:
    """Register a preset.

    Raises:
        ConfigError: Another preset has its name or one of its aliases.
    """
    for name in (preset.name, *preset.aliases):
        present = find_preset(name)
        if present is not None and present != preset:
            raise ConfigError(
                f"there is a preset {name!r} already ({present.title}): choose "
                "another name"
            )
    _registered[preset.name] = preset
