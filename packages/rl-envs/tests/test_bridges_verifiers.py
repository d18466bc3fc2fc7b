"""The bridge to verifiers, with the real package in the environment of its extra."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, judge_server

from rl_distributed.errors import ConfigError
from rl_envs import TaskError
from rl_envs.agents.tasks import AgentJob, AgentResult
from rl_envs.bridges.verifiers import (
    VerifiersConfig,
    VerifiersEnvironment,
    VerifiersTasks,
)
from rl_envs.bridges.verifiers.host_process import _read
from rl_envs.errors import AgentError, AgentSetupError
from rl_envs.registry import create_env, create_task_source
from rl_envs.tasks import Split
from rl_envs.testing import assert_passed, examine_environment

FOLDER = str(Path(__file__).parent / "scripts" / "verifiers_environments")
SUMS: dict[str, Any] = {"env": "sums_of_tests", "folder": FOLDER}
DEADLINE_S = 120.0


def right(question: str) -> str:
    first, second = question.rstrip("=").split("+")
    return str(int(first) + int(second))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return VerifiersTasks(**SUMS).train(6)


@pytest.fixture
def policy() -> Iterator[JudgeServer]:
    """Serve answers that a test sets; correct ones by default."""
    with judge_server(right) as server:
        yield server


def run(
    world: VerifiersEnvironment,
    address: str,
    rows: list[dict[str, Any]],
    time_limit_s: float | None = None,
) -> list[AgentResult]:
    """Run a task per row, and return the results in order."""
    jobs = [
        AgentJob(number, [], row, address, f"key-{number}", time_limit_s)
        for number, row in enumerate(rows)
    ]
    found = list(world.poll_agents(jobs, [], 0.0).results)
    until = time.monotonic() + DEADLINE_S
    while len(found) < len(rows) and time.monotonic() < until:
        found += world.poll_agents([], [], 0.2).results
    return sorted(found, key=lambda result: result.number)


@pytest.fixture(scope="module")
def single() -> Iterator[VerifiersEnvironment]:
    """A single-turn environment; loading one takes seconds."""
    world = VerifiersEnvironment(VerifiersConfig(**SUMS, sampling={"max_tokens": 7}))
    yield world
    world.shutdown()
    world.shutdown()


@pytest.fixture(scope="module")
def two_tries() -> Iterator[VerifiersEnvironment]:
    world = VerifiersEnvironment(VerifiersConfig(**SUMS, args={"kind": "two"}))
    yield world
    world.shutdown()


def test_rollouts_are_rewarded_by_the_rubric(
    single: VerifiersEnvironment, policy: JudgeServer, rows: list[dict[str, Any]]
) -> None:
    sums = single
    assert sums.agent_limits.model_name == "policy"
    results = run(sums, policy.address, rows)
    assert [result.ending for result in results] == ["done"] * 6
    for row, result in zip(rows, results, strict=True):
        assert result.reward is not None
        assert result.reward.reward == 1.0
        assert result.reward.parts["right"] == 1.0
        assert result.reward.parts["length"] == len(row["answer"])
    # Each task has its own key, by which the run tells them apart.
    assert sorted(policy.keys) == [f"Bearer key-{number}" for number in range(6)]
    assert {request["model"] for request in policy.requests} == {"policy"}
    assert {
        request.get("max_tokens") or request.get("max_completion_tokens")
        for request in policy.requests
    } == {7}
    for text in ("no", ""):
        policy.reply = lambda question, text=text: text
        [result] = run(sums, policy.address, rows[:1])
        assert (result.error, result.ending) == ("", "done")
        assert result.reward is not None
        assert result.reward.reward == 0.0


def test_it_is_examined_as_any_other(rows: list[dict[str, Any]]) -> None:
    world = VerifiersEnvironment(VerifiersConfig(**SUMS))
    found = examine_environment(world, rows[:3])
    assert_passed(found)
    status = {finding.check: finding.status for finding in found}
    assert status["gold answers earn the full reward"] == "pass"


def test_an_environment_of_several_turns(
    two_tries: VerifiersEnvironment, policy: JudgeServer, rows: list[dict[str, Any]]
) -> None:
    answer = rows[0]["answer"]
    policy.reply = lambda question: answer if question.endswith("again") else "x"
    [result] = run(two_tries, policy.address, rows[:1])
    assert result.reward is not None
    assert result.reward.reward == 1.0
    assert policy.questions[1] == "not x; again"


def test_failures_are_errors_of_their_task(
    two_tries: VerifiersEnvironment, policy: JudgeServer, rows: list[dict[str, Any]]
) -> None:
    """The next task gets a process again."""
    sums = two_tries
    policy.reply = lambda question: "die"
    [dead] = run(sums, policy.address, rows[:1])
    assert (dead.ending, dead.reward) == ("error", None)
    assert "the process of verifiers ended with exit code 5" in dead.error
    policy.reply = lambda question: "raise"
    [broken] = run(sums, policy.address, rows[:1])
    assert broken.ending == "error"
    assert "the environment is broken" in broken.error
    policy.reply = lambda question: rows[0]["answer"]
    [fine] = run(sums, policy.address, rows[:1])
    assert fine.ending == "done"
    [wrong] = run(sums, policy.address, [{"prompt": "?"}])
    assert wrong.ending == "error"
    assert "column 'verifiers_input' must be a JSON object" in wrong.error


def test_a_request_cancelled_as_its_reply_comes_costs_no_other() -> None:
    code = (
        """for id in 1, 2: print('{"id": %d, "result": %d}' % (id, id), flush=True)"""
    )
    futures: dict[int, Future[Any]] = {number: Future() for number in (1, 2, 3, 4)}
    # As where a task meets its limit while the reader has its reply.
    assert futures[1].cancel()
    assert futures[4].cancel()
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        _read(process, dict(futures), log)
    assert futures[2].result(0) == 2
    with pytest.raises(AgentError, match="ended with exit code 0"):
        futures[3].result(0)


def test_a_task_that_hangs_meets_its_limit(
    single: VerifiersEnvironment, policy: JudgeServer, rows: list[dict[str, Any]]
) -> None:
    # Loaded beforehand, so that the limit covers only the rollout.
    run(single, policy.address, rows[:1])
    policy.reply = lambda question: None
    [late] = run(single, policy.address, rows[:1], time_limit_s=1.0)
    assert late.ending == "limit"
    assert not single._host._pending
    policy.reply = right
    [next_one] = run(single, policy.address, rows[:1])
    assert next_one.ending == "done"


def test_tasks_are_the_rows_of_the_data_set(rows: list[dict[str, Any]]) -> None:
    tasks = create_task_source(
        "verifiers", {**SUMS, "args": {"largest": 3}, "held_out_fraction": 0.3}
    )
    again = pickle.loads(pickle.dumps(tasks))
    assert again.train(9) == tasks.train(9)
    train = tasks.sample(Split.TRAIN, 20)
    held_out = tasks.sample(Split.HELD_OUT, 2)
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    for task in train:
        given = json.loads(task.metadata["verifiers_input"])
        assert task.prompt == given["prompt"][-1]["content"]
        assert task.answer == given["answer"] == right(task.prompt)
    with pytest.raises(TaskError, match="has too few different tasks"):
        tasks.sample(Split.TRAIN, 41)
    assert len({row["prompt"] for row in rows}) == 6


def test_rows_that_cannot_be_run_are_named(rows: list[dict[str, Any]]) -> None:
    sums = create_env("verifiers", SUMS)
    found = sums.unusable_rows([rows[0], {"verifiers_input": "{"}, {}, None])
    assert set(found) == {1, 2, 3}
    assert "metadata[1]: column 'verifiers_input' must be a JSON" in found[1]
    assert pickle.loads(pickle.dumps(sums)).unusable_rows(rows) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "no_such_env_xy"}, "'no_such_env_xy' of verifiers cannot be loaded"),
        ({"args": {"kind": "group"}}, "must reward each rollout by itself"),
        ({"python": "/no/python"}, "python must be an interpreter that can be run"),
        ({"start_s": 0.01}, r"was not loaded within 0.01 s \(start_s\)"),
        # This project's Python, which lacks the package.
        ({"python": sys.executable}, "cannot be loaded: .*verifiers"),
    ],
)
def test_environments_that_cannot_be_loaded(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(AgentSetupError, match=message):
        VerifiersTasks(**{**SUMS, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"folder": "/no/folder"}, "must be a folder that exists"),
        ({"env": ""}, "env"),
        ({"start": 3}, "start"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_env("verifiers", {**SUMS, **given})
    with pytest.raises(TaskError, match="dataset must be 'train' or 'eval'"):
        VerifiersTasks(**SUMS, dataset="test")
