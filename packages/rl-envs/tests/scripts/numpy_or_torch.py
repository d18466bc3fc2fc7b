"""Check how rl-envs handles rewards, with torch and without.

`test_without_torch.py` blocks torch for it, and `tools/wheels.py` runs it with what the
wheel installs, with torch and without.
"""

from __future__ import annotations

import json
import math
import pkgutil
import sys

import numpy as np

import rl_envs
from rl_distributed.extras import installed_torch
from rl_distributed.testing import local_ray
from rl_envs import (
    CalculatorEnvironment,
    EnvironmentInterface,
    EnvironmentReturn,
    FunctionalRewardWrapper,
    GroupRewardWrapper,
    MathEnvironment,
    RemoteEnvironment,
    SortingEnvironment,
    SortingTasks,
    ToolEnvironment,
    calculate_pass_rate_per_prompt,
    check_environment,
    check_reward_fn,
    exact_match,
    reward_metrics,
    scored_mask,
    total_reward,
)

HAS_TORCH = installed_torch() is not None
KIND = installed_torch().Tensor if HAS_TORCH else np.ndarray


def log(prompt, response):
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": response},
    ]


class Given(EnvironmentInterface):
    """Returns rewards and ends in the requested form."""

    def __init__(self, make, flags):
        self.make, self.flags = make, flags

    def step(self, message_log_batch, metadata):
        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=self.make([0.5] * size),
            terminateds=self.flags([True] * size),
            answers=None,
        )


def check_imports():
    for name in rl_envs.__all__:
        getattr(rl_envs, name)
    for found in pkgutil.walk_packages(rl_envs.__path__, "rl_envs."):
        try:
            __import__(found.name)
        except ModuleNotFoundError as error:
            # Installed by the extra `math`, and by `http` of rl-distributed, which are
            # not always requested.
            if error.name not in ("sympy", "aiohttp"):
                raise


def check_rewards():
    assert check_reward_fn(exact_match, {"prompt": "q", "answer": "4"}) == 1.0
    judge = FunctionalRewardWrapper(lambda response: {"a": len(response), "b": None})
    rewards = judge.step([log("q", "xyz")], [{}]).rewards
    assert type(rewards["reward/a"]) is KIND
    assert str(rewards["reward/a"].dtype).endswith("float32")
    assert total_reward(rewards).tolist() == [3.0]
    assert scored_mask(rewards).tolist() == [True]
    assert scored_mask([1.0, math.nan]).tolist() == [True, False]
    for batch in ([1.0, 0.0], np.array([1.0, 0.0])):
        made = FunctionalRewardWrapper(lambda responses, batch=batch: batch)
        result = made.step([log("q", "a"), log("q", "b")], [{}, {}])
        assert result.rewards.tolist() == [1.0, 0.0]
        assert str(result.terminateds.dtype).endswith("bool")
    assert reward_metrics({"rewards": np.array([0.0, 1.0])})["reward_mean"] == 0.5
    groups = np.array([0, 0, 1, 1])
    assert calculate_pass_rate_per_prompt(groups, [True, False, False, False]) == 0.5


def check_environments():
    check_environment(SortingEnvironment())
    check_environment(CalculatorEnvironment())
    check_environment(MathEnvironment({"verifier_type": "english_multichoice"}),
                      metadata=[{"answer": "A"}])  # fmt: skip
    check_environment(GroupRewardWrapper(lambda responses: [1.0] * len(responses)))
    check_environment(Given(list, list))
    check_environment(Given(np.array, lambda flags: np.array(flags, dtype=bool)))
    check_environment(Given(lambda r: {"reward/a": r}, list))
    row = SortingTasks(num_digits=4, seed=1).train(1)[0]
    metrics = SortingEnvironment().global_post_process_and_metrics(
        {"rewards": np.array([1.0, 0.0])}
    )[1]
    assert metrics["accuracy"] == 0.5
    result = SortingEnvironment().step([log(row["prompt"], row["answer"])], [row])
    assert result.rewards.tolist() == [1.0]


def add(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def check_tools():
    tools = ToolEnvironment([add], Given(list, list))
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    result = tools.step([log("2+3", call), log("2+3", "5")], [{}, {}])
    assert result.observations[0] == [{"role": "tool", "content": "5"}]
    assert result.terminateds.tolist() == [False, True]
    assert result.rewards.tolist() == [0.0, 0.5]


def check_servers():
    """Check rewards and tools in processes of their own."""

    def score(response, answer):
        assert HAS_TORCH or "torch" not in sys.modules
        return float(response == answer)

    logs = [log("q", "1"), log("q", "2"), log("q", "3")]
    rows = [{"answer": "1"}, {"answer": "0"}, {"answer": "3"}]
    with local_ray(num_cpus=2):
        with RemoteEnvironment(score, num_workers=2) as server:
            result = server.step(logs, rows)
            assert result.rewards.tolist() == [1.0, 0.0, 1.0]
            assert type(result.terminateds) is KIND
            assert server.global_post_process_and_metrics({"rewards": result.rewards})[
                1
            ]["reward_mean"] == np.float32(2 / 3)
        with RemoteEnvironment(CalculatorEnvironment) as server:
            call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"'
            said = server.step([log("6*7=", f"{call}}}}}</tool_call>")], rows[:1])
            assert said.observations[0][0]["content"] == "42"


if __name__ == "__main__":
    check_imports()
    check_rewards()
    check_environments()
    check_tools()
    check_servers()
    sys.stdout.write(json.dumps({"torch": "torch" in sys.modules}) + "\n")
