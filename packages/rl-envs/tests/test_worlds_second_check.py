"""The environment `second_check`: what is checked, rejected and counted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rl_distributed.errors import ConfigError, WorkerError
from rl_envs.errors import EnvironmentContractError, MessageLogError
from rl_envs.interfaces import EnvironmentReturn
from rl_envs.outcomes import second_check_of
from rl_envs.testing import assert_passed, examine_environment
from rl_envs.worlds.arithmetic import ArithmeticEnvironment, ArithmeticTasks
from rl_envs.worlds.code import CodeEnvironment
from rl_envs.worlds.nim import NimEnvironment
from rl_envs.worlds.second_check import (
    MathFormatEnvironment,
    SecondCheckEnvironment,
)


def log_of(response: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": response},
    ]


def verdicts(env: SecondCheckEnvironment, responses: list[str], row: Any) -> list[Any]:
    found = env.step([log_of(r) for r in responses], [row] * len(responses))
    return [second_check_of(columns) for columns in found.metadata]


def lenient(response: str) -> float:
    return 0.5 if response == "half" else float("good" in response)


def strict(response: str) -> float | None:
    return None if "odd" in response else float(response == "good")


def test_high_scores_are_checked_and_rewards_remain() -> None:
    env = SecondCheckEnvironment(environment=lenient, check=strict)
    responses = ["good", "too good", "odd good", "half", "bad"]
    found = env.step([log_of(r) for r in responses], [None] * 5)
    assert [float(r) for r in found.rewards] == [1.0, 1.0, 1.0, 0.5, 0.0]
    checked = [second_check_of(row) for row in found.metadata]
    assert checked == [True, False, None, None, None]
    batch = {"rewards": found.rewards, "metadata": found.metadata}
    metrics = env.global_post_process_and_metrics(batch)[1]
    assert metrics["second_check_rate"] == 0.4
    assert metrics["second_check_rejected_rate"] == 0.5
    low = SecondCheckEnvironment({"min_reward": 0.5}, environment=lenient, check=strict)
    assert verdicts(low, ["half"], None) == [False]


def test_the_same_answers_are_drawn_in_any_batch() -> None:
    env = SecondCheckEnvironment(
        {"sample_rate": 0.5}, environment=lenient, check=strict
    )
    responses = [f"good {n}" for n in range(200)]
    together = verdicts(env, responses, None)
    assert 60 < together.count(False) < 140
    assert [verdicts(env, [r], None)[0] for r in reversed(responses)][::-1] == together


def test_hidden_tests_reject_programs_that_know_the_tests() -> None:
    env = SecondCheckEnvironment(
        {
            "environment": {"name": "code", "settings": {"num_workers": 1}},
            "check": {
                "name": "code",
                "settings": {"num_workers": 1, "credit": "share"},
                "columns": {"test_list": "hidden_tests"},
            },
            "accept_reward": 0.9,
        }
    )
    row = {
        "test_list": ["assert f(2) == 4"],
        "hidden_tests": ["assert f(3) == 9", "assert f(2) == 4"],
    }
    try:
        found = verdicts(
            env, ["def f(x): return x * x", "def f(x): return 4", "def f(x):"], row
        )
        assert found == [True, False, None]
        [reason] = env.unusable_rows([{"test_list": row["test_list"]}]).values()
        assert reason.startswith("second check: ")
    finally:
        env.shutdown()


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"So it is $\boxed{\frac{1}{2}}$.", 1.0),
        (r"\boxed{4} it is, so \boxed{ 4 }", 1.0),
        (r"\boxed{4}, or else \boxed{5}", 0.0),
        (r"\boxed{4 or 5}", 0.0),
        (r"\boxed{4?}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{4", 0.0),
        ("4", 0.0),
        (r"\boxed{" + "1+" * 50 + "1}", 0.0),
        (r"\boxed{4} but then " + "maybe 5, " * 20, 0.0),
    ],
)
def test_math_format_wants_one_answer(response: str, score: float) -> None:
    result = MathFormatEnvironment().step([log_of(response)], [{}])
    assert float(result.rewards[0]) == score


class Broken(ArithmeticEnvironment):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        if self._error is not None:
            raise self._error
        found = super().step(message_log_batch, metadata)
        return found._replace(
            terminateds=[False] * len(metadata),
            observations=[{"role": "user", "content": "go on"}] * len(metadata),
        )


def test_a_check_that_fails_leaves_answers_unchecked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = SecondCheckEnvironment(environment=lenient, check=Broken(WorkerError("died")))
    with caplog.at_level(logging.WARNING):
        assert verdicts(env, ["good"], {}) == [None]
    assert "1 answers were not checked a second time: WorkerError: died" in caplog.text
    env = SecondCheckEnvironment(environment=lenient, check=ArithmeticEnvironment())
    with pytest.raises(MessageLogError):
        verdicts(env, ["good"], {})
    env = SecondCheckEnvironment(environment=lenient, check=Broken(None))
    with pytest.raises(EnvironmentContractError, match="must end each conversation"):
        verdicts(env, ["good"], {"answer": 3})


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'check' either .* got neither"):
        SecondCheckEnvironment(environment=lenient)
    with pytest.raises(ConfigError, match=r"'check' either .* got both"):
        SecondCheckEnvironment(
            {"check": {"name": "code"}}, environment=lenient, check=strict
        )
    with pytest.raises(ConfigError, match="NimEnvironment has many turns"):
        SecondCheckEnvironment(environment=lenient, check=NimEnvironment())


def test_it_fulfils_the_contract() -> None:
    env = SecondCheckEnvironment(
        environment=ArithmeticEnvironment(), check=ArithmeticEnvironment()
    )
    assert_passed(examine_environment(env, ArithmeticTasks().held_out(8)))
    assert CodeEnvironment.many_turns is False
