"""Files of recipes, in this package or given by path, and their summaries.

Imports nothing heavy, as commands look here before they load anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from rl_cli.gpus import Gpus, parse_gpus
from rl_distributed.config import Config, load_config
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean, did_you_mean_file

__all__ = [
    "AboutConfig",
    "RecipeSummary",
    "found_recipe",
    "recipe_names",
    "recipe_path",
    "summarize",
]


class AboutConfig(Config):
    """Section `about` of a recipe: its requirements, for lists and plans."""

    gpus: str | None = None
    """GPUs for which its sizes are chosen, in the form of `rl plan --gpus`: `8x80GB`,
    or `4x8x80GB` for four nodes; the default of `rl plan`. null: no GPU needed."""
    time: str = Field("not known", min_length=1)
    """Duration on that hardware, with a note whether it was measured."""

    @field_validator("gpus")
    @classmethod
    def _check_gpus(cls, value: str | None) -> str | None:
        if value is not None:
            parse_gpus(value)
        return value

    @property
    def planned_for(self) -> Gpus | None:
        """The GPUs; None: no GPU needed."""
        return None if self.gpus is None else parse_gpus(self.gpus)

    @property
    def hardware(self) -> str:
        """Description of the GPUs."""
        gpus = self.planned_for
        if gpus is None:
            return "no GPU"
        noun = "GPU" if gpus.per_node == 1 else "GPUs"
        nodes = f"{gpus.num_nodes} nodes of " if gpus.num_nodes > 1 else ""
        return f"{nodes}{gpus.per_node} {noun} with {gpus.gib:g} GB"


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """One line of a list of recipes."""

    name: str
    algorithm: str
    """Algorithms of its stages, in order."""
    model: str
    """Model trained by the first stage."""
    hardware: str
    time: str
    purpose: str
    """Title of the recipe."""

    def to_dict(self) -> dict[str, str]:
        """Return the fields by name."""
        return asdict(self)


def found_recipe(name: str) -> Path:
    """Return the file of a recipe.

    Args:
        name: Name of a recipe, or path of a recipe file.

    Raises:
        ConfigError: There is no such recipe.
    """
    path, known = recipe_path(name), recipe_names()
    if path is None:
        raise ConfigError(
            f"{name!r} is not a recipe{did_you_mean(name, known) or '.'} Recipes: "
            f"{', '.join(known)}; give your own recipe by its path, ending in .yaml"
        )
    return path


def summarize(name: str) -> RecipeSummary:
    """Summarize a recipe from its file, validating only the section `about`.

    Args:
        name: Name of a recipe, or path of a recipe file.

    Raises:
        ConfigError: There is no such recipe, or its file cannot be read.
    """
    path = found_recipe(name)
    data = load_config(path)
    about = AboutConfig.from_dict(data.get("about") or {}, source=f"{path.name}: about")
    stages: dict[str, Any] = data.get("stages") or {}
    return RecipeSummary(
        name,
        ", ".join(stage.get("algorithm", key) for key, stage in stages.items()),
        _model_of(data),
        about.hardware,
        about.time,
        str(data.get("title", "")),
    )


def _model_of(data: dict[str, Any]) -> str:
    if data.get("model") is not None:
        return "built by the recipe"
    sections = [data.get("common"), *(data.get("stages") or {}).values()]
    for section in sections:
        name = ((section or {}).get("policy") or {}).get("model_name")
        if name is not None:
            return str(name)
    return ""


def recipe_names() -> list[str]:
    """Return the names of the recipes in this package."""
    folder = resources.files("rl_cli") / "recipes"
    names = [entry.name for entry in folder.iterdir()]
    return sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml"))


def recipe_path(name: str) -> Path | None:
    """Return the file of a recipe; None if the name is not that of a recipe.

    Raises:
        ConfigError: It is a path, and there is no such file.
    """
    # Names of the package come first, so that a file beside it cannot take their place
    # by chance.
    if name in recipe_names():
        return Path(str(resources.files("rl_cli") / "recipes" / f"{name}.yaml"))
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            near = did_you_mean_file(path) or "; check the path."
            raise ConfigError(f"There is no recipe file {name}{near}")
        return path
    return None
