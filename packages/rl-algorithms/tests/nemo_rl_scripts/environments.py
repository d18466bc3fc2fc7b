"""A script written for NeMo RL: environments as actors, and multi-turn rollouts."""

import json
import os
import sys

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_actor_environment_registry import (
    ACTOR_ENVIRONMENT_REGISTRY,
    get_actor_python_env,
)
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, init_ray
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.utils import create_env, register_env

GUESS = "environment_module.GuessEnvironment"
MATH = "nemo_rl.environments.math_environment.MathEnvironment"
ACTOR_ENVIRONMENT_REGISTRY[GUESS] = PY_EXECUTABLES.SYSTEM
register_env("guess", GUESS)

env_configs = {
    "math": {"num_workers": 1, "math_verify_impl": "hf_math_verify"},
    "guess": {"max_turns": 3},
}


def setup_envs():
    math_env = MathEnvironment.options(
        runtime_env={
            "py_executable": get_actor_python_env(MATH),
            "env_vars": {"FROM_OPTIONS": "1"},
        }
    ).remote(env_configs["math"])
    return {"math": math_env, "guess": create_env("guess", env_configs["guess"])}


def rollout(env, guesses):
    """Play a scripted policy against the environment until every row has ended."""
    logs = [[{"role": "user", "content": "Guess 0 to 9."}] for _ in guesses]
    metadata = [{"secret": 7, "turn": 0} for _ in guesses]
    total = torch.zeros(len(guesses))
    active = list(range(len(guesses)))
    for turn in range(3):
        for row in active:
            logs[row].append({"role": "assistant", "content": guesses[row][turn]})
        result: EnvironmentReturn = ray.get(
            env.step.remote(
                [logs[row] for row in active], [metadata[row] for row in active], True
            )
        )
        ended = []
        for place, row in enumerate(active):
            total[row] += result.rewards[place]
            metadata[row] = result.metadata[place]
            logs[row].append(result.observations[place])
            assert result.answers[place] == guesses[row][turn]
            assert result.next_stop_strings[place] == ["\n"]
            if result.terminateds[place]:
                ended.append(row)
        active = [row for row in active if row not in ended]
        if not active:
            break
    return logs, metadata, total


def main(folder):
    init_ray()
    task_to_env = setup_envs()
    solutions = [
        "\\boxed{1/2}",
        "The answer is \\boxed{0.25}.",
        "no idea",
        "\\boxed{3}",
    ]
    logs = [
        [
            {"role": "user", "content": "Compute."},
            {"role": "assistant", "content": solution},
        ]
        for solution in solutions
    ]
    truths = ["0.5", "1/4", "5", "4"]
    math = ray.get(
        task_to_env["math"].step.remote(logs, [{"ground_truth": t} for t in truths])
    )
    guesses = [["7"], ["3", "9", "7"], ["1", "2", "3"]]
    played, metadata, total = rollout(task_to_env["guess"], guesses)
    batch = BatchedDataDict(
        {
            "text": torch.tensor([[0], [0], [1]]),
            "total_reward": total,
            "message_log": played,
        }
    )
    batch, metrics = ray.get(
        task_to_env["guess"].global_post_process_and_metrics.remote(batch)
    )
    found = {
        "math": math.rewards.tolist(),
        "math_ends": math.terminateds.tolist(),
        "math_says": [message["content"] for message in math.observations],
        "math_answers": math.answers,
        "said": [
            [m["content"] for m in log if m["role"] == "environment"] for log in played
        ],
        "turns": [row["turn"] for row in metadata],
        "total": total.tolist(),
        "metrics": metrics,
        "is_batch": isinstance(batch, BatchedDataDict),
        "shut": [ray.get(env.shutdown.remote()) for env in task_to_env.values()],
        "driver": os.getpid(),
    }
    for env in task_to_env.values():
        ray.kill(env)
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
