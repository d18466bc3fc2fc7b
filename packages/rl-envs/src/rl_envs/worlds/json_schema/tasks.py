"""JSON tasks: facts and a schema, answered by an object."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_range

__all__ = ["JsonSchemaTasks"]

_KINDS = ("integer", "number", "string", "enum", "boolean", "array")
_NAMES = (
    "amount", "author", "city", "code", "colour", "count", "country", "depth", "height",
    "label", "length", "level", "limit", "name", "owner", "price", "rank", "score",
    "size", "speed", "status", "tag", "title", "weight", "width", "year",
)  # fmt: skip
_WORDS = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory",
    "jade", "koala", "lemon", "maple", "north", "olive", "pearl", "quartz", "river",
    "slate", "tulip", "umber", "violet", "willow", "yarrow", "zephyr",
)  # fmt: skip
_OPTIONS = 3


@register_task_source("json_schema")
class JsonSchemaTasks(TaskSource):
    """Generates the schema of an object and the value to write.

    Values are bounded integers, numbers with one decimal, words, enumerations, booleans
    and lists of words; with `depth`, objects of these. All properties are required and
    no others are allowed. The split depends on the value.

    Args:
        num_fields: Number of properties of each object, 1 to 12.
        depth: Nesting depth, 0 to 4; each object above the innermost contains another.
        kinds: Some of `integer`, `number`, `string`, `enum`, `boolean` and `array`,
            separated by commas.
        show_schema: Include the schema in the prompt; False: it must be guessed from
            the values, which do not change.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A size or a kind is invalid.
    """

    def __init__(
        self,
        num_fields: int = 3,
        *,
        depth: int = 0,
        kinds: str = "integer,string,enum,boolean",
        show_schema: bool = True,
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("json_schema", seed=seed, held_out_fraction=held_out_fraction)
        self.kinds = tuple(kind.strip() for kind in kinds.split(","))
        check_range("num_fields", num_fields, 1, 12)
        check_range("depth", depth, 0, 4)
        if not set(self.kinds) <= set(_KINDS):
            raise TaskError(f"kinds must be some of {', '.join(_KINDS)}: got {kinds!r}")
        self.num_fields, self.depth, self.show_schema = num_fields, depth, show_schema

    def propose(self, rng: random.Random) -> Task:
        """Draw names of properties, and a schema and a value for each."""
        schema, value, facts = self._object(rng, self.depth)
        said = "\n".join(f"- {path} is {shown}" for path, shown in facts.items())
        prompt = f"Write one JSON object with these values:\n{said}\n"
        if self.show_schema:
            prompt += f"It must satisfy this schema:\n{json.dumps(schema)}\n"
        return Task(
            prompt=prompt + "Write nothing but the JSON.",
            answer=json.dumps(value),
            # As texts: data sets need one type per column, and schemas differ.
            metadata={"schema": json.dumps(schema), "value": json.dumps(value)},
        )

    def _object(
        self, rng: random.Random, depth: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        """Return a schema, a value, and the prompt's facts about it by path."""
        properties: dict[str, Any] = {}
        value: dict[str, Any] = {}
        facts: dict[str, str] = {}
        for name in rng.sample(_NAMES, self.num_fields):
            properties[name], value[name] = _field(rng, rng.choice(self.kinds))
            facts[name] = json.dumps(value[name])
        if depth:
            inner = f"{rng.choice(_WORDS)}_part"
            properties[inner], value[inner], said = self._object(rng, depth - 1)
            facts |= {f"{inner}.{path}": shown for path, shown in said.items()}
        schema = {
            "type": "object",
            "properties": properties,
            "required": sorted(properties),
            "additionalProperties": False,
        }
        return schema, value, facts

    def key(self, task: Task) -> str:
        """Return the value, with properties in the order of their names."""
        value: Mapping[str, Any] = json.loads(task.metadata["value"])
        return json.dumps(value, sort_keys=True)


def _field(rng: random.Random, kind: str) -> tuple[dict[str, Any], Any]:
    """Return the schema of a property and a value for it."""
    if kind == "integer":
        low = rng.randrange(0, 900, 10)
        bounds = {"type": "integer", "minimum": low, "maximum": low + 99}
        return bounds, rng.randint(low, low + 99)
    if kind == "number":
        return {"type": "number"}, rng.randint(1, 999) + rng.randint(1, 9) / 10
    if kind == "string":
        word = f"{rng.choice(_WORDS)}-{rng.randint(10, 99)}"
        return {"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"}, word
    if kind == "enum":
        options = sorted(rng.sample(_WORDS, _OPTIONS))
        return {"enum": options}, rng.choice(options)
    if kind == "boolean":
        return {"type": "boolean"}, rng.random() < 0.5
    words = rng.sample(_WORDS, rng.randint(1, 4))
    items = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    return items, words
