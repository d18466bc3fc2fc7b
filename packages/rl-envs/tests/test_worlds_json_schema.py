"""The world `json_schema`: valid JSON, and near misses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from jsonschema import validate

from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError, SolutionError, TaskError
from rl_envs.interfaces import total_reward
from rl_envs.registry import env_registry, task_registry
from rl_envs.testing import assert_passed, examine_environment, examine_tasks
from rl_envs.worlds.json_schema import (
    JsonSchemaConfig,
    JsonSchemaEnvironment,
    JsonSchemaTasks,
)

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}, "s": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def environment() -> Iterator[JsonSchemaEnvironment]:
    made = JsonSchemaEnvironment(JsonSchemaConfig(credit="graded", timeout_s=5.0))
    yield made
    made.shutdown()


def said_of(observation: Any) -> str:
    return str(observation["content"])


def judge(
    env: JsonSchemaEnvironment, response: str, row: dict[str, Any]
) -> tuple[float, str]:
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}]
    found = env.step([log], [row])
    return float(total_reward(found.rewards)[0]), said_of(found.observations[0])


@given(
    num_fields=st.integers(1, 8),
    depth=st.integers(0, 3),
    kinds=st.sampled_from(["integer", "number, array", "string,enum,boolean"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_every_gold_answer_satisfies_its_schema(
    num_fields: int, depth: int, kinds: str, seed: int
) -> None:
    tasks = JsonSchemaTasks(num_fields, depth=depth, kinds=kinds, seed=seed)
    for row in tasks.train(3, unique=False):
        value = json.loads(row["answer"])
        validate(value, json.loads(row["schema"]))
        assert value == json.loads(row["value"])
        assert len(value) == num_fields + (depth > 0)
        levels = 0
        while inner := [v for v in value.values() if isinstance(v, dict)]:
            value, levels = inner[0], levels + 1
        assert levels == depth


@pytest.mark.parametrize(
    "source",
    [{}, {"num_fields": 6, "depth": 2, "kinds": "number,array,enum"}],
    ids=["default", "deep"],
)
def test_right_and_wrong_answers(source: dict[str, Any]) -> None:
    def make(seed: int) -> JsonSchemaTasks:
        return JsonSchemaTasks(**source, seed=seed)

    assert_passed(examine_tasks(make, 16))
    assert_passed(examine_environment("json_schema", make(0).train(16)))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"n": 3}', 1.0),
        (' {"s": "x", "n": 3}\n', 1.0),
        ('```json\n{"n": 3}\n```', 1.0),
        ('I think. <answer>{"n": 3}</answer>', 1.0),
        ('{"n": 3.0}', 1.0),  # a whole number by JSON schema
        ('{"n": 0}', 0.1),
        ('{"n": true}', 0.1),
        ('{"n": 3, "x": 1}', 0.1),
        ("3", 0.1),
        ("[]", 0.1),
        ('{"n": 3} {"n": 3}', 0.0),
        ('{"n": 3}\n{"n": 3}', 0.0),
        ('```json\n{"n": 3}\n```\n```json\n{"n": 3}\n```', 0.0),
        ('Here it is: {"n": 3}', 0.0),
        ('{"n": 0, "n": 3}', 0.0),  # parsers differ in which they take
        ('{"n": 3, "s": "\u200b"}\u200b', 0.0),
        ('{"n": 3} // hidden', 0.0),
        ("{'n': 3}", 0.0),
        ('{"n": 3', 0.0),
        ('{"n": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ('{"n": ' + "9" * 10_000 + "}", 0.0),
        ("", 0.0),
    ],
)
def test_what_counts_as_json(
    environment: JsonSchemaEnvironment, response: str, reward: float
) -> None:
    assert judge(environment, response, {"schema": SCHEMA})[0] == pytest.approx(reward)


def test_an_expected_value_is_compared_as_json(
    environment: JsonSchemaEnvironment,
) -> None:
    row = {"schema": {}, "value": '{"a": [1, true, null], "b": 1.5}'}
    assert judge(environment, '{"b": 1.5, "a": [1.0, true, null]}', row)[0] == 1.0
    for other in (
        '{"a": [1, 1, null], "b": 1.5}',
        '{"a": [true, true, null], "b": 1.5}',
        '{"a": [1, true], "b": 1.5}',
        '{"a": [1, true, null], "b": 1.5, "c": 0}',
        '{"a": [1, true, null], "b": "1.5"}',
    ):
        score, said = judge(environment, other, row)
        assert (score, said) == (0.5, "incorrect: it differs from the expected value")


def test_without_credit_there_is_nothing_for_an_attempt() -> None:
    env = JsonSchemaEnvironment()
    assert judge(env, '{"n": 0}', {"schema": SCHEMA})[0] == 0.0
    assert judge(env, '{"n": 1}', {"schema": SCHEMA}) == (1.0, "correct")
    env.shutdown()


def test_the_reason_names_the_place(environment: JsonSchemaEnvironment) -> None:
    said = judge(environment, '{"n": 0}', {"schema": SCHEMA})[1]
    assert said == "incorrect: 0 is less than the minimum of 1 (at $.n)"


def test_a_hostile_schema_costs_its_own_limit() -> None:
    env = JsonSchemaEnvironment(JsonSchemaConfig(timeout_s=2.0))
    slow = {"type": "string", "pattern": "^(a+)+$"}
    rows = [{"schema": slow}, {"schema": {"type": "string"}}]
    answer = json.dumps("a" * 60 + "!")
    logs = [[{"role": "assistant", "content": answer}] for _ in rows]
    found = env.step(logs, rows)
    env.shutdown()
    assert [float(reward) for reward in found.rewards] == [0.0, 1.0]
    assert [row["verified"] for row in found.metadata] == [False, True]


def test_rows_without_a_meaning_are_named(environment: JsonSchemaEnvironment) -> None:
    rows: list[Any] = [
        {"schema": SCHEMA},
        {"schema": json.dumps(SCHEMA), "value": '{"n": 1}'},
        {"schema": {"type": "nothing"}},
        {"schema": "{"},
        {"schema": SCHEMA, "value": '{"n": 0}'},
        {"schema": SCHEMA, "value": "{"},
        {"schema": SCHEMA, "value": {"n": 1}},
        {"schema": {"a": {1}}},
        {"schema": {"$ref": "http://127.0.0.1:9/schema"}, "value": "1"},
        {},
    ]
    found = environment.unusable_rows(rows)
    assert list(found) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert "not a JSON schema" in found[2]
    assert "does not satisfy its schema" in found[4]
    # It is reported, and not fetched over the network.
    assert "has a reference that it does not contain" in found[8]
    with pytest.raises(SolutionError, match=r"metadata\[0\]: the schema is not JSON"):
        judge(environment, "{}", {"schema": "{"})
    with pytest.raises(MessageLogError, match="or set schema_file"):
        judge(environment, "{}", {})


def test_one_schema_for_all_rows(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    env = JsonSchemaEnvironment(JsonSchemaConfig(schema_file=str(file)))
    assert judge(env, '{"n": 1}', {})[0] == 1.0
    assert judge(env, '{"n": 1}', {"schema": {"type": "array"}})[0] == 0.0
    env.shutdown()
    with pytest.raises(ConfigError, match=r"schema_file must be .* cannot be read"):
        JsonSchemaEnvironment(JsonSchemaConfig(schema_file=str(tmp_path / "none")))


def test_wrong_settings_are_named() -> None:
    for wrong, message in (
        ({"num_fields": 0}, "num_fields must be 1 to 12"),
        ({"depth": 5}, "depth must be 0 to 4"),
        ({"kinds": "integer,date"}, "kinds must be some of"),
    ):
        with pytest.raises(TaskError, match=message):
            JsonSchemaTasks(**wrong)


def test_it_is_registered() -> None:
    assert env_registry.get("json_schema") is JsonSchemaEnvironment
    assert task_registry.get("json_schema") is JsonSchemaTasks
