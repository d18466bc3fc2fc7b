from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_envs import (
    EnvironmentContractError,
    EnvironmentInterface,
    EnvironmentReturn,
    FunctionalRewardWrapper,
    check_environment,
)

Change = Callable[["Scripted", list[Any], list[Any], dict[str, Any]], None]


class Scripted(EnvironmentInterface[Any]):
    """A correct environment with one change."""

    def __init__(self, change: Change | None = None) -> None:
        self.change = change
        self.calls = 0

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        self.calls += 1
        size = len(message_log_batch)
        fields: dict[str, Any] = {
            "observations": [{"role": "environment", "content": "x"}] * size,
            "metadata": list(metadata),
            "next_stop_strings": [["\n"]] * size,
            "rewards": torch.zeros(size),
            "terminateds": torch.ones(size, dtype=torch.bool),
            "answers": ["a"] * size,
        }
        if self.change is not None:
            self.change(self, message_log_batch, metadata, fields)
        if "result" in fields:
            result: EnvironmentReturn[Any] = fields["result"]
            return result
        return EnvironmentReturn(**fields)


def put(**changes: Any) -> Change:
    """Replace fields; functions are called with the number of rows."""

    def change(env: Any, logs: Any, metadata: Any, fields: dict[str, Any]) -> None:
        for name, value in changes.items():
            fields[name] = value(len(logs)) if callable(value) else value

    return change


def mutate(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    for log in logs:
        log.append({"role": "environment", "content": "x"})


def mutate_metadata(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    for columns in metadata:
        columns["seen"] = True


def count(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    fields["rewards"] = torch.full((len(logs),), float(env.calls))


def normalise(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    lengths = torch.tensor([float(row) for row in range(len(logs))])
    fields["rewards"] = lengths


def fail_on_empty(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    logs[0]


def unpicklable(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    fields["metadata"] = [lambda: None for _ in logs]


def raise_always(env: Any, logs: Any, metadata: Any, fields: Any) -> None:
    raise RuntimeError("no")


WRONG: dict[str, tuple[Change, str]] = {
    "tuple": (put(result=(1, 2)), "must return an EnvironmentReturn: got tuple"),
    "observations": (
        put(observations=lambda n: [{"role": "user", "content": "x"}] * (n + 1)),
        "observations must have one entry per row",
    ),
    "message": (
        put(observations=lambda n: ["x"] * n),
        "must be a message or a list of messages: got str",
    ),
    "content": (
        put(observations=lambda n: [{"role": "user", "content": 1}] * n),
        r"observations\[0\]\['content'\] must be text",
    ),
    "metadata": (put(metadata=()), "metadata must be a list: got tuple"),
    "stop string": (
        put(next_stop_strings=lambda n: ["\n"] * n),
        r"next_stop_strings\[0\] must be None or a list",
    ),
    "rewards text": (
        put(rewards=lambda n: "0" * n),
        "rewards must be a tensor, a numpy array or a list: got str",
    ),
    "rewards texts": (
        put(rewards=lambda n: ["good"] * n),
        "rewards must be real numbers: got <U4",
    ),
    "rewards ragged": (
        put(rewards=lambda n: [[0.0], *[0.0] * (n - 1)]),
        "rewards must h",
    ),
    "rewards [B,1] array": (
        put(rewards=lambda n: np.zeros((n, 1))),
        r"rewards must have shape \[3\]: got \[3, 1\]",
    ),
    "terminateds of numbers": (
        put(terminateds=lambda n: [1] * n),
        "terminateds must be bool: got int64",
    ),
    "rewards float64": (
        put(rewards=lambda n: torch.zeros(n, dtype=torch.float64)),
        r"rewards must be torch\.float32: got torch\.float64",
    ),
    "rewards [B,1]": (
        put(rewards=lambda n: torch.zeros(n, 1)),
        r"must have shape \[3\]: got \[3, 1\]",
    ),
    "rewards nan": (
        put(rewards=lambda n: torch.full((n,), float("nan"))),
        "is NaN, which means not scored",
    ),
    "rewards inf": (
        put(rewards=lambda n: torch.full((n,), float("inf"))),
        "must be finite",
    ),
    "rewards grad": (
        put(rewards=lambda n: torch.zeros(n, requires_grad=True)),
        "must not require a gradient",
    ),
    "reward names": (
        put(rewards=lambda n: {"a": torch.zeros(n)}),
        "must begin with 'reward/'",
    ),
    "no rewards": (put(rewards={}), "empty mapping"),
    "terminateds": (
        put(terminateds=lambda n: torch.ones(n)),
        r"terminateds must be torch\.bool",
    ),
    "answers": (put(answers=lambda n: [3] * n), r"answers\[0\] must be text or None"),
    "mutation": (mutate, "changed its argument message_log_batch"),
    "metadata mutation": (mutate_metadata, "changed its argument metadata"),
    "chance": (count, "two equal calls must have equal results: rewards differ"),
    "neighbours": (normalise, "rows must be independent: rewards of row 1 differ"),
    "empty": (fail_on_empty, "step with an empty batch raised IndexError"),
    "pickle": (unpicklable, "pickling the result"),
    "exception": (raise_always, "step raised RuntimeError: no"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_every_breach_is_named(kind: str) -> None:
    change, message = WRONG[kind]
    with pytest.raises(EnvironmentContractError, match=message):
        check_environment(Scripted(change))


def test_a_right_environment_passes() -> None:
    check_environment(Scripted())
    check_environment(Scripted(count), deterministic=False)
    nan = put(rewards=lambda n: torch.full((n,), float("nan")))
    check_environment(Scripted(nan), allow_unscored=True)
    check_environment(Scripted(put(rewards=lambda n: {"reward/a": torch.zeros(n)})))


class BadEnd(Scripted):
    shut = 0

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {"x": torch.zeros(1)}

    def shutdown(self) -> None:
        self.shut += 1
        if self.shut == 2:
            raise RuntimeError("twice")


def test_metrics_and_shutdown_are_checked_and_everything_is_listed() -> None:
    with pytest.raises(EnvironmentContractError) as caught:
        check_environment(BadEnd())
    assert "metric 'x' must be a plain number" in str(caught.value)
    assert "shutdown raised RuntimeError: twice" in str(caught.value)


def test_other_things_are_refused() -> None:
    with pytest.raises(
        EnvironmentContractError, match="must be an EnvironmentInterface"
    ):
        check_environment(lambda prompt, response: 0)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentContractError, match="at least one conversation"):
        check_environment(FunctionalRewardWrapper(lambda r: 0), [], [])


def test_groups_and_tools_are_checked() -> None:
    class Odd(Scripted):
        def score_groups(self, message_logs: Any, metadata: Any) -> Any:
            return [torch.zeros(2) for _ in message_logs]

        def tool_schemas(self) -> Any:
            return ["search"]

        def unusable_rows(self, metadata: Any) -> Any:
            return {0: "never"}

    with pytest.raises(EnvironmentContractError) as caught:
        check_environment(Odd())
    assert "rewards must have shape [1]: got [2]" in str(caught.value)
    assert "tool_schemas must return a list of mappings" in str(caught.value)
    assert "unusable_rows must return an empty dict" in str(caught.value)


class Begins(Scripted):
    """Begins and ends conversations as requested, or incorrectly."""

    wrong = ""

    def reset(self, metadata: Any, seeds: Any) -> Any:
        if self.wrong == "argument":
            mutate_metadata(self, None, metadata, None)
        begun = [
            {**row, "seed": seed} for row, seed in zip(metadata, seeds, strict=True)
        ]
        if self.wrong == "random":
            begun = [{**row, "seed": object()} for row in begun]
        return begun[1:] if self.wrong == "short" else begun

    def close(self, metadata: Any) -> None:
        assert all("seed" in row for row in metadata), "it has not begun"
        if self.wrong == "once":
            self.wrong = "closed"
        elif self.wrong == "closed":
            raise RuntimeError("closed before")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("argument", "reset changed its argument metadata"),
        ("short", "reset must return a list with the metadata of each"),
        ("random", "reset must return the same for equal rows and seeds"),
        ("once", "close raised RuntimeError: closed before"),
    ],
)
def test_reset_and_close_belong_to_the_contract(wrong: str, said: str) -> None:
    check_environment(Begins())
    environment = Begins()
    environment.wrong = wrong
    with pytest.raises(EnvironmentContractError, match=said):
        check_environment(environment)
