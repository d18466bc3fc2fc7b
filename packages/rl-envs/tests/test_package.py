from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys

import pytest
import torch

import rl_envs
from rl_distributed.errors import UserError
from rl_envs import errors
from rl_envs.interfaces import prompt_text, scored_mask, total_reward
from rl_envs.mathematics.values import Unreadable
from rl_envs.metrics import calculate_pass_rate_per_prompt, reward_metrics
from rl_envs.tools.functions import ToolArgumentError


def test_every_public_name_exists_and_others_do_not() -> None:
    for name in rl_envs.__all__:
        assert getattr(rl_envs, name) is not None
        assert name in dir(rl_envs)
    with pytest.raises(AttributeError, match=r"rl_envs.*nothing"):
        rl_envs.nothing  # noqa: B018


def test_the_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, rl_envs; "
        "print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_errors_are_user_errors_and_cross_processes() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)("text")
        assert isinstance(error, UserError) == (
            name not in ("EnvsError", "AgentError", "ToolUnavailableError")
        )
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == "text"


def test_every_error_of_the_package_has_one_root() -> None:
    found: set[type] = set()
    for module in pkgutil.walk_packages(rl_envs.__path__, "rl_envs."):
        found |= {
            error
            for error in vars(importlib.import_module(module.name)).values()
            if isinstance(error, type)
            and issubclass(error, BaseException)
            and error.__module__.startswith("rl_envs.")
        }
    assert {errors.RewardError, ToolArgumentError, Unreadable} < found
    assert [e for e in found if not issubclass(e, errors.EnvsError)] == []


def test_errors_keep_the_builtins_that_users_catch() -> None:
    assert issubclass(errors.RewardSignatureError, TypeError)
    assert issubclass(errors.RewardCallError, RuntimeError)
    assert issubclass(errors.ToolUnavailableError, RuntimeError)
    for name in ("EnvironmentContract", "MessageLog", "Reward", "Solution", "Task"):
        assert issubclass(getattr(errors, f"{name}Error"), ValueError)
    assert issubclass(errors.ToolError, ValueError)
    assert issubclass(Unreadable, ValueError)


def test_the_fields_of_a_return_stand_in_their_order() -> None:
    assert rl_envs.EnvironmentReturn._fields == (
        "observations",
        "metadata",
        "next_stop_strings",
        "rewards",
        "terminateds",
        "answers",
    )


def test_rewards_add_up_and_nan_means_not_scored() -> None:
    nan = float("nan")
    rewards = {
        "reward/a": torch.tensor([1.0, 2.0, nan]),
        "reward/b": torch.tensor([0.5, nan, nan]),
    }
    assert total_reward(rewards).tolist()[:2] == [1.5, 2.0]
    assert scored_mask(rewards).tolist() == [True, True, False]
    assert scored_mask(torch.tensor([1.0, nan])).tolist() == [True, False]


def test_the_prompt_of_a_conversation() -> None:
    user, reply = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "r"},
    )
    assert prompt_text([user, reply]) == "q"
    assert prompt_text([user, reply, user, reply]) == "q\nr\nq"
    assert prompt_text([user]) == "q"
    assert prompt_text([reply]) == ""


def test_pass_rate() -> None:
    correct = torch.tensor([True, False, False, False])
    assert calculate_pass_rate_per_prompt(["a", "a", "b", "b"], correct) == 0.5
    assert calculate_pass_rate_per_prompt(torch.tensor([0, 0, 1, 1]), correct) == 0.5
    tokens = torch.tensor([[1, 2], [1, 2], [1, 3], [1, 3]])
    assert calculate_pass_rate_per_prompt(tokens, correct) == 0.5
    assert calculate_pass_rate_per_prompt([], torch.tensor([])) == 0.0
    with pytest.raises(ValueError, match="one prompt per response: got 1 for 4"):
        calculate_pass_rate_per_prompt(["a"], correct)


def test_reward_metrics() -> None:
    metrics = reward_metrics({"rewards": torch.tensor([0.0, 1.0, float("nan")])})
    assert metrics["reward_mean"] == 0.5
    assert metrics["unscored_fraction"] == pytest.approx(1 / 3)
    assert reward_metrics({}) == {}
    assert reward_metrics({"total_reward": [2.0]})["reward_max"] == 2.0
