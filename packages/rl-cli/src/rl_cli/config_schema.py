"""JSON Schema of the files that `rl train` accepts."""

from __future__ import annotations

from typing import Any

from rl_algorithms.presets import find_preset
from rl_algorithms.registry import algorithm_names, get_config_class
from rl_cli.recipe_files import recipe_path
from rl_cli.run_config import RecipeConfig
from rl_distributed.config.json_schema import (
    DIALECT,
    config_json_schema,
    json_schemas,
)

__all__ = ["RECIPE", "schema_of"]

RECIPE = "recipe"
"""Name that stands for every recipe, as they share one schema."""


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of a file.

    Args:
        name: An algorithm, a preset of one, a recipe, or `recipe`.

    Raises:
        RegistryError: There is no such algorithm.
    """
    is_algorithm = name in algorithm_names() or find_preset(name) is not None
    if not is_algorithm and (name == RECIPE or recipe_path(name) is not None):
        return _recipe_schema()
    return config_json_schema(get_config_class(name))


def _recipe_schema() -> dict[str, Any]:
    """Return the schema of recipes, where `algorithm` decides the keys of a stage."""
    classes = {name: get_config_class(name) for name in algorithm_names()}
    definitions = json_schemas([RecipeConfig, *classes.values()])
    schema = definitions.pop(RecipeConfig.__name__)
    choices = {"enum": list(classes), "description": "Algorithm of this stage."}
    for cls in classes.values():
        definitions[cls.__name__]["properties"]["algorithm"] = choices
    schema["properties"]["stages"]["additionalProperties"] = {
        "type": "object",
        "properties": {"algorithm": {"type": "string"}},
        "allOf": [
            {
                "if": {
                    "properties": {"algorithm": {"const": name}},
                    "required": ["algorithm"],
                },
                "then": {"$ref": f"#/$defs/{cls.__name__}"},
            }
            for name, cls in classes.items()
        ],
    }
    return {"$schema": DIALECT, **schema, "$defs": definitions}
