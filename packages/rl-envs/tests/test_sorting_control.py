from __future__ import annotations

from rl_envs import SortingEnvironment, SortingTasks, check_environment
from rl_envs.worlds.sorting import SortingConfig


def test_random_rewards_say_nothing_about_what_is_right() -> None:
    env = SortingEnvironment(SortingConfig(credit="random"))
    rows = SortingTasks(5).train(400)
    logs = []
    for index, row in enumerate(rows):
        answer = row["answer"] if index % 2 else row["answer"][::-1]
        logs.append(
            [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": answer},
            ]
        )
    result = env.step(logs, rows)
    right = [bool(row["correct"]) for row in result.metadata]
    rewards = result.rewards.tolist()
    rate = {
        kind: sum(r for r, c in zip(rewards, right, strict=True) if c is kind)
        / sum(c is kind for c in right)
        for kind in (True, False)
    }
    assert abs(rate[True] - 0.3) < 0.1
    assert abs(rate[False] - 0.3) < 0.1
    batch = {"rewards": result.rewards, "metadata": result.metadata}
    _, metrics = env.global_post_process_and_metrics(batch)
    assert metrics["accuracy"] == sum(right) / len(right)
    check_environment(env, logs[:4], rows[:4])
