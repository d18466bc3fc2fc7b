"""The json_schema environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError
from rl_envs.limited_calls import Server
from rl_envs.registry import register_env
from rl_envs.worlds.limited_verdict import LimitedConfig, LimitedVerdictEnvironment
from rl_envs.worlds.verdict import Columns, Given, Verdict, last_tagged

__all__ = ["JsonSchemaConfig", "JsonSchemaEnvironment", "JsonSchemaRow"]

_SERVER = Server(
    Path(__file__).with_name("schema_process.py"),
    "checks JSON",
    "environment 'json_schema' needs jsonschema, which is not installed",
    "install rl-envs[json-schema]",
)
# A single fenced block, the usual form of JSON from chat models.
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_GRADED = {"none": 0.0, "json": 0.1, "schema": 0.5, "value": 1.0}


class JsonSchemaConfig(LimitedConfig):
    """Settings of the json_schema environment."""

    credit: Literal["exact", "graded"] = "exact"
    """Scoring. `exact`: reward 1 for JSON that satisfies the schema and equals the
    expected value, if the row has one; else 0. `graded`: 0.1 for any JSON, 0.5 for JSON
    that satisfies the schema but differs from the expected value."""
    schema_file: str | None = None
    """JSON file with the schema of rows without a column `schema`."""


@dataclass(frozen=True, slots=True)
class JsonSchemaRow:
    """Requirements of a row, as JSON texts."""

    schema: str
    value: str | None = None
    """Expected value; None: any that satisfies the schema."""


@register_env("json_schema")
class JsonSchemaEnvironment(LimitedVerdictEnvironment[JsonSchemaRow]):
    """Checks that a response is JSON that satisfies the schema of its row.

    A row has the column `schema`, a JSON schema as a mapping or a text, and optionally
    `value`, a JSON text that the answer must equal. The answer is the content of the
    last `<answer>` tag or, without one, the response; it must be a single JSON value,
    optionally fenced, and nothing else. Duplicate keys and NaN are rejected. Formats
    known to the package jsonschema are checked; references to other documents are not
    downloaded and make the row unusable.

    Args:
        config: The settings.

    Raises:
        ConfigError: `schema_file` cannot be read.
    """

    config_class = JsonSchemaConfig

    def __init__(self, config: JsonSchemaConfig | None = None) -> None:
        settings = config or JsonSchemaConfig()
        super().__init__(settings, _SERVER)
        self._is_graded = settings.credit == "graded"
        self._schema = _read_file(settings.schema_file)

    def read_row(self, columns: Columns, row: int) -> JsonSchemaRow:
        """Return the schema and the expected value.

        Raises:
            MessageLogError: They are missing, or have a wrong type.
        """
        given = columns if isinstance(columns, Mapping) else {}
        schema, value = given.get("schema"), given.get("value")
        # A row's own schema comes first.
        if schema is None and self._schema is not None:
            schema = self._schema
        if isinstance(schema, Mapping):
            # As text: the checking process parses each different one once.
            schema = _as_text(schema, row)
        if not isinstance(schema, str) or not (value is None or isinstance(value, str)):
            raise MessageLogError(
                f"metadata[{row}] must have the column 'schema', a JSON schema as a "
                "mapping or a text (or set schema_file), and may have 'value', a JSON "
                f"text: got {schema!r:.80} and {value!r:.80}"
            )
        return JsonSchemaRow(schema, value)

    def request(self, given: Given[JsonSchemaRow]) -> Mapping[str, Any]:
        """Return the request to check a response."""
        text = _answer_in(given.response)
        return {**_row_request(given.task), "text": text}

    def row_request(self, task: JsonSchemaRow) -> Mapping[str, Any] | None:
        """Return the request to read the schema."""
        return _row_request(task)

    def verdict(self, given: Given[JsonSchemaRow], reply: Mapping[str, Any]) -> Verdict:
        """Score the last stage that the response passed."""
        stage, answer = reply["stage"], _answer_in(given.response)
        if stage == "value":
            return Verdict(1.0, "correct", answer)
        score = _GRADED[stage] if self._is_graded else 0.0
        return Verdict(score, f"incorrect: {reply['reason']}", answer)


def _row_request(task: JsonSchemaRow) -> dict[str, Any]:
    value = {} if task.value is None else {"value": task.value}
    return {"schema": task.schema, **value}


def _answer_in(response: str) -> str:
    tagged = last_tagged(response)
    text = (response if tagged is None else tagged).strip()
    fenced = _FENCED.fullmatch(text)
    return text if fenced is None else fenced.group(1).strip()


def _as_text(schema: Mapping[str, Any], row: int) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise MessageLogError(
            f"metadata[{row}]['schema'] must hold JSON values only: {error}"
        ) from None


def _read_file(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"schema_file must be a JSON file with a schema: {path!r} cannot be read: "
            f"{error}"
        ) from error
