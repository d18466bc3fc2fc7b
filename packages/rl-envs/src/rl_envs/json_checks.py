"""Strict checks of JSON texts against a schema.

`worlds.json_schema` runs them in a separate process, as a schema may take forever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rl_envs.errors import EnvsError

__all__ = ["NotJsonError", "UnusableSchemaError", "check_json", "equal", "read_json"]

_REASON_CHARACTERS = 160


class NotJsonError(EnvsError, ValueError):
    """A text is not one JSON value."""


def check_json(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the last stage of checks that a text passed.

    Args:
        request: `schema`, a JSON text; optionally `value`, the JSON text of the
            expected value; and optionally `text`, the text to check.

    Returns:
        `unreadable`, the reason, if the schema or value is invalid; otherwise `stage`
        (`none`, `json`, `schema` or `value`) and `reason`, why it failed the next one.
    """
    try:
        validator = _validator(request["schema"])
        wanted = _wanted(validator, request.get("value"))
    except UnusableSchemaError as error:
        return {"unreadable": str(error)}
    if "text" not in request:
        return {"stage": "none", "reason": ""}
    try:
        found = read_json(request["text"])
    except NotJsonError as error:
        return {"stage": "none", "reason": str(error)}
    reason = _violation(validator, found)
    if reason is not None:
        return {"stage": "json", "reason": reason}
    if wanted and not equal(found, wanted[0]):
        return {"stage": "schema", "reason": "it differs from the expected value"}
    return {"stage": "value", "reason": ""}


class UnusableSchemaError(EnvsError, ValueError):
    """A schema, or the expected value, is invalid."""


@lru_cache(maxsize=64)
def _validator(schema_text: str) -> Any:
    # An optional dependency, imported only in the process that checks.
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    try:
        schema = read_json(schema_text)
    except NotJsonError as error:
        raise UnusableSchemaError(f"the schema is not JSON: {error}") from None
    made = validator_for(schema)
    try:
        made.check_schema(schema)
    except SchemaError as error:
        raise UnusableSchemaError(
            f"the schema is not a JSON schema: {_shown(error)}"
        ) from None
    # An empty registry: the default one downloads the documents that a schema names.
    return made(schema, registry=Registry(), format_checker=made.FORMAT_CHECKER)


def _wanted(validator: Any, value_text: str | None) -> list[Any]:
    """Return a list of the expected value, empty if there is none."""
    if value_text is None:
        return []
    try:
        value = read_json(value_text)
    except NotJsonError as error:
        raise UnusableSchemaError(f"the expected value is not JSON: {error}") from None
    reason = _violation(validator, value)
    if reason is not None:
        raise UnusableSchemaError(
            f"the expected value does not satisfy its schema: {reason}"
        )
    return [value]


def _violation(validator: Any, value: Any) -> str | None:
    """Return the most relevant violation; None: the value satisfies the schema."""
    from jsonschema.exceptions import best_match  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415

    try:
        error = best_match(validator.iter_errors(value))
    except Unresolvable as unresolvable:
        said = f"{unresolvable}"[:_REASON_CHARACTERS]
        raise UnusableSchemaError(
            f"the schema has a reference that it does not contain: {said}"
        ) from None
    return None if error is None else _shown(error)


def _shown(error: Any) -> str:
    message = str(error.message)
    if len(message) > _REASON_CHARACTERS:
        message = message[:_REASON_CHARACTERS] + "..."
    return f"{message} (at {error.json_path})"


def read_json(text: str) -> Any:
    """Read one JSON value, strictly: no NaN, and no key twice.

    Raises:
        NotJsonError: The text is anything else.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except NotJsonError:
        raise
    except RecursionError:
        raise NotJsonError("it is nested too deeply") from None
    except ValueError as error:
        raise NotJsonError(f"it is not one JSON value: {error}") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # Parsers disagree on which one counts, so one value could hide another.
        raise NotJsonError("an object has a key twice")
    return found


def _no_constant(name: str) -> Any:
    raise NotJsonError(f"JSON has no {name}")


def equal(a: Any, b: Any) -> bool:
    """Return True if two JSON values are equal; true is not 1, but 1.0 is 1."""
    # In Python True == 1, in JSON they are different types.
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
