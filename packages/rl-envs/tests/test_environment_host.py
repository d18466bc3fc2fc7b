from __future__ import annotations

import subprocess
import sys

import torch
from ray import cloudpickle

from rl_envs.environment_host import EnvironmentHost
from rl_envs.registry import EnvironmentSpec
from rl_envs.rewards.functional import FunctionalRewardWrapper

LOG = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "four"}]
PROGRAM = """
import pickle, sys
from rl_envs.registry import EnvironmentSpec
from rl_envs.environment_host import EnvironmentHost

print("torch" in sys.modules)
EnvironmentHost(pickle.dumps(EnvironmentSpec.of("sorting")))
print("torch" in sys.modules)
"""


def test_torch_is_there_before_the_first_step():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["False", "True"]


PROGRAM_OF_A_FUNCTION = """
import pickle, sys
from rl_envs.registry import EnvironmentSpec
from rl_envs.environment_host import EnvironmentHost

def reward(prompt, response):
    return {"long": float(len(response)), "even": None}

host = EnvironmentHost(pickle.dumps(EnvironmentSpec.of(reward)))
abilities = host.abilities()
log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "four"}]
answer = host.step([log], [None]).value
print(abilities.is_function, "torch" in sys.modules)
print({name: str(column) for name, column in answer.rewards.items()})
print(answer.terminateds, type(answer.terminateds).__module__)
"""


def test_a_reward_function_is_called_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_OF_A_FUNCTION],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "True False",
        "{'reward/long': '[4.]', 'reward/even': '[nan]'}",
        "[ True] numpy",
    ]


def test_a_subclass_of_the_wrapper_keeps_its_tensors():
    class Clamped(FunctionalRewardWrapper):
        def step(self, message_log_batch, metadata):
            answer = super().step(message_log_batch, metadata)
            return answer._replace(rewards=answer.rewards.clamp(max=1.0))

    spec = EnvironmentSpec.of(Clamped(lambda prompt, response: 5.0))
    host = EnvironmentHost(cloudpickle.dumps(spec))
    assert not host.abilities().is_function
    answer = host.step([LOG], [None]).value
    assert torch.equal(answer.rewards, torch.tensor([1.0]))
