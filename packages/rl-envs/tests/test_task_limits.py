"""Per-task limits."""

from __future__ import annotations

import pickle

import pytest

from rl_envs.environment_host import EnvironmentHost
from rl_envs.errors import TaskError
from rl_envs.registry import EnvironmentSpec
from rl_envs.task_limits import TaskLimits, limits_of, wrong_limits
from rl_envs.worlds.countdown import CountdownEnvironment


def test_limits_override_each_other_one_by_one() -> None:
    run = TaskLimits(turns=3, seconds=5.0)
    assert limits_of({}, run) is run
    assert limits_of(None, run) is run
    own = limits_of({"task_limits": {"turns": 1, "tokens": 9}}, run)
    assert own == TaskLimits(turns=1, tokens=9, seconds=5.0)
    # Columns of tables hold every key, null where a row has no such limit.
    assert limits_of({"task_limits": {"turns": None}}, run) == run
    assert limits_of({"task_limits": TaskLimits(turns=2)}, run).turns == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "must be a mapping of turns, tokens, seconds, memory_mib: got int 3"),
        ({"turn": 3}, "turns"),
        ({"seconds": 0}, "seconds"),
        ({"turns": "many"}, "turns"),
    ],
)
def test_wrong_limits_are_named(given: object, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        limits_of({"task_limits": given})
    assert said in (wrong_limits({"task_limits": given}) or "")


class _Limited(CountdownEnvironment):
    task_limits = TaskLimits(turns=2)


def test_a_worker_tells_the_limits_of_its_environment() -> None:
    spec = EnvironmentSpec.of(_Limited())
    host = EnvironmentHost(pickle.dumps(spec))
    assert host.abilities().task_limits == TaskLimits(turns=2)
