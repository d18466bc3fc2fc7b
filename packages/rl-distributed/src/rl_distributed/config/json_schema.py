"""JSON Schema of configuration files, for editors that complete and check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rl_distributed.config.key_docs import field_docs
from rl_distributed.config.load import PARENTS_KEY
from rl_distributed.config.schema import SchemaNode

__all__ = ["DIALECT", "PARENTS_SCHEMA", "config_json_schema", "json_schemas"]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PARENTS_SCHEMA = {
    "description": "Files that this one is merged over, relative to it.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
_INTERPOLATED = {"type": "string", "pattern": r"\$\{.+\}"}


def config_json_schema(cls: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of files that hold a `cls`.

    Nothing is required, as overrides may set what a file leaves out, and any value may
    be an interpolation (`${seed}`).
    """
    definitions = json_schemas([cls])
    schema = definitions.pop(cls.__name__)
    schema["properties"][PARENTS_KEY] = PARENTS_SCHEMA
    return {"$schema": DIALECT, **schema, "$defs": definitions}


def json_schemas(classes: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the schemas of classes, and of their sections, by the names of classes."""
    places, combined = models_json_schema([(cls, "validation") for cls in classes])
    definitions: dict[str, Any] = combined["$defs"]
    for cls in classes:
        reference = places[cls, "validation"].get("$ref", "").rpartition("/")[2]
        # pydantic gives classes that share a name longer ones; here each
        # has its own name.
        definitions[cls.__name__] = definitions[reference]
    for model in _models(classes):
        _complete(definitions.get(model.__name__, {}), field_docs(model))
    return definitions


def _models(classes: Sequence[type[BaseModel]]) -> list[type[BaseModel]]:
    found = dict.fromkeys(classes)
    for cls in classes:
        for _, node in SchemaNode.of(cls).walk():
            found |= dict.fromkeys(node.models)
    return list(found)


def _complete(schema: dict[str, Any], docs: dict[str, str]) -> None:
    """Add the documentation of fields; let values be interpolations."""
    # Overrides may supply what a file leaves out.
    schema.pop("required", None)
    properties = schema.get("properties", {})
    for name, place in properties.items():
        described = {key: place[key] for key in ("default",) if key in place}
        rest = {k: v for k, v in place.items() if k not in ("title", "default")}
        # Any value may be an interpolation, which is a string until it is resolved.
        if not _takes_texts(rest):
            rest = {"anyOf": [*rest.get("anyOf", [rest]), _INTERPOLATED]}
        doc = {"description": docs[name]} if name in docs else {}
        properties[name] = {**rest, **described, **doc}


def _takes_texts(place: dict[str, Any]) -> bool:
    kinds = [place, *place.get("anyOf", [])]
    return (
        any(kind.get("type") == "string" and "pattern" not in kind for kind in kinds)
        or not place
    )
