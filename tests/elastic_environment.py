"""An environment loses the node of one of its workers; prints what its calls return."""

from __future__ import annotations

import json
import os
import signal
import sys

# First: it sets what Ray reads when it is imported.
from elastic_run import NODE, QUICK, simulated_nodes, wait_until  # isort: skip

import ray

from rl_distributed import init_ray
from rl_envs import RemoteEnvironment


def answer_length(prompts: list[str], responses: list[str], **_: object) -> list[float]:
    """Reward an answer by its length."""
    return [float(len(response)) for response in responses]


def main() -> None:
    cluster, nodes = simulated_nodes({**NODE, "_system_config": QUICK}, NODE)
    found: dict[str, object] = {}
    try:
        init_ray(address=cluster.address, deadline_s=60)
        own = ray.get_runtime_context().get_node_id()
        remote = RemoteEnvironment(answer_length, num_workers=2, num_cpus=1)
        messages = [
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
            for text in ("a", "bb", "ccc", "dddd")
        ]

        def rewards() -> list[float]:
            result = remote.step(messages, [{} for _ in messages])
            return [float(value) for value in result.rewards]

        group = remote._workers._group
        found["before"] = rewards()
        (far,) = [node for node in nodes if node.node_id != own]
        os.kill(far.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        found["after"] = rewards()
        wait_until(lambda: len(group.live_ranks) == 1, "the loss of a worker")
        found["without"] = [rewards(), len(group.live_ranks)]
        cluster.add_node(**NODE)
        wait_until(
            lambda: rewards() and len(group.live_ranks) == 2, "the worker to come back"
        )
        found["back"] = rewards()
        remote.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
