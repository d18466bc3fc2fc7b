"""Keys of a configuration that may change while a program runs."""

from __future__ import annotations

from typing import Any, Self

import pytest
from pydantic import Field, model_validator

from rl_distributed.config import (
    Config,
    change_config,
    changeable,
    changeable_keys,
    explain_config,
)
from rl_distributed.config.changes import flatten_changes, value_at
from rl_distributed.errors import ConfigError


class Loop(Config):
    period: int = Field(5, gt=0, json_schema_extra=changeable())
    limit: int | None = Field(None, json_schema_extra=changeable())
    size: int = 3

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.limit is not None and self.limit < self.period:
            raise ValueError(
                f"limit must be at least period ({self.period}): got {self.limit}"
            )
        return self


class Motor(Config):
    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {"speed": 1.0, "gear": 2},
        json_schema_extra=changeable("speed"),
    )
    kind: str = "plain"


class Program(Config):
    loop: Loop = Field(default_factory=Loop)
    motor: Motor = Field(default_factory=lambda: Motor(kind="special"))
    spare: Loop | None = None
    seed: int = 0


KEYS = [
    "loop.period",
    "loop.limit",
    "motor.kwargs.speed",
    "spare.period",
    "spare.limit",
]


def test_the_keys():
    assert changeable_keys(Program) == KEYS
    rows = {row.path: row.changes for row in explain_config(Program)}
    assert rows["loop.period"] == "yes"
    assert rows["motor.kwargs"] == "speed"
    assert rows["loop.size"] == rows["seed"] == ""


def test_other_values_and_defaults_stay():
    program = Program(loop={"size": 7}, seed=3)
    changes = {"loop": {"period": 2}, "motor.kwargs.speed": 0.5}
    changed = change_config(program, changes, by="me")
    assert changed == Program(
        loop={"size": 7, "period": 2},
        motor={"kind": "special", "kwargs": {"speed": 0.5, "gear": 2}},
        seed=3,
    )
    assert program.loop.period == 5
    assert "spare" not in changed.model_fields_set


def test_a_section_that_is_null_is_made():
    changed = change_config(Program(), {"spare.period": 2}, by="me")
    assert changed.spare == Loop(period=2)
    assert value_at(Program(), "spare.period") is None
    assert value_at(changed, "spare.period") == 2
    assert value_at(changed, "motor.kwargs.gear") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, f"seed cannot change while the run goes on; what can: {KEYS[0]}"),
        ({"motor": {"kwargs": {"gear": 1}}}, "motor.kwargs.gear cannot change"),
        ({"loop.perod": 1}, "did you mean 'loop.period'"),
        ({"loop.period": 0}, "loop.period must be greater than 0: got 0"),
        ({"loop.limit": 2}, "loop.limit must be at least period (5): got 2"),
        ({"loop.period": 9, "loop.limit": 8}, "limit must be at least period (9)"),
        ({}, "the update by me changes nothing"),
        ({"loop": {}}, "changes nothing"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(ConfigError) as error:
        change_config(Program(), changes, by="the update by me")
    assert words in str(error.value)


def test_all_problems_are_named():
    with pytest.raises(ConfigError) as error:
        change_config(Program(), {"seed": 1, "loop.size": 2}, by="the update")
    assert "2 problems in the update" in str(error.value)


def test_a_program_may_take_fewer():
    changes = {"loop.period": 2}
    with pytest.raises(ConfigError, match=r"what can: loop\.limit \("):
        change_config(Program(), changes, by="me", allowed=["loop.limit"])


def test_changes_by_sections_are_those_of_keys():
    nested = {"loop": {"period": 2}, "motor": {"kwargs": {"speed": 1}}, "seed": 1}
    assert flatten_changes(Program, nested) == {
        "loop.period": 2,
        "motor.kwargs.speed": 1,
        "seed": 1,
    }
