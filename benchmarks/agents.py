"""`python -m benchmarks.agents`: the cost of serving agents, without a model.

`--tasks` agents (1,000) are in flight at the same time. Each asks the policy
`--turns` times with its whole history and uses a tool that takes 1 s after each answer.
They run in a process of their own, like an environment's worker. The generator is a
fake: it takes `--answer-s` per call (2), returns `--tokens` random tokens per row (64),
and handles 16 calls at a time. One JSON line: the driver's CPU seconds by kind of
thread, their share of one core, and the driver's memory.

The client's own time is not the run's and is reported separately (`agents_share`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import string
import threading
import time
from collections import Counter
from typing import Any

import torch

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.agents.environment import AgentEnvironment
from rl_envs.agents.tasks import AgentLimits, AgentPoll
from rl_envs.interfaces import EnvironmentInterface
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

TOOL_S = 1.0
TEMPLATE = (
    "{% for m in messages %}|{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}|assistant:{% endif %}"
)
TICKS = os.sysconf("SC_CLK_TCK")


async def agent(task: Any, client: Any) -> float:
    """Ask, and use a tool after each answer."""
    import asyncio

    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(int(task["turns"])):
        answer = await client.chat.completions.create(
            model=task.model, messages=messages
        )
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(TOOL_S)
        messages.append({"role": "user", "content": "the result of the tool"})
    return 1.0


def host(connection: Any, count: int) -> None:
    """Run the agents as the process of an environment's worker."""
    environment = AgentEnvironment(agent, max_at_once=count)
    while (request := connection.recv()) is not None:
        connection.send(environment.poll_agents(*request))
    times = resource.getrusage(resource.RUSAGE_SELF)
    environment.shutdown()
    connection.send(times.ru_utime + times.ru_stime)


class Apart(EnvironmentInterface[Any]):
    """The agents of another process."""

    num_agent_workers = 1

    def __init__(self, count: int) -> None:
        self.agent_limits = AgentLimits("policy", 1000, 600.0, None, count)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=host, args=(theirs, count), daemon=True)
        self._process.start()

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        """Raise an error."""
        raise NotImplementedError

    def poll_agents(
        self, begin: Any, cancel: Any, wait_s: float, worker: int = 0
    ) -> AgentPoll:
        """Forward it."""
        self._connection.send((begin, cancel, wait_s))
        poll: AgentPoll = self._connection.recv()
        return poll

    def end(self) -> float:
        """Stop the process; return the CPU seconds that it took."""
        self._connection.send(None)
        spent: float = self._connection.recv()
        self._process.join(10.0)
        return spent


class Fake:
    """Answers each call after a delay."""

    weight_version = 0
    calls_at_once = 16

    def __init__(self, answer_s: float, num_tokens: int, vocab_size: int) -> None:
        self._answer_s, self._num_tokens = answer_s, num_tokens
        self._vocab_size = vocab_size
        self.num_calls = self.num_rows = 0

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False, *, sampling: Any = None
    ) -> BatchedDataDict[Any]:
        """Return random tokens."""
        time.sleep(self._answer_s)
        self.num_calls += 1
        self.num_rows += data.size
        lengths = data["input_lengths"]
        total = lengths + self._num_tokens
        width = int(total.max())
        ids = torch.randint(3, self._vocab_size, (data.size, width))
        ids[:, : data["input_ids"].shape[1]] = data["input_ids"]
        return BatchedDataDict(
            {
                "output_ids": ids,
                "generation_lengths": torch.full((data.size,), self._num_tokens),
                "unpadded_sequence_lengths": total,
                "logprobs": torch.full((data.size, width), -1.0),
                "truncated": torch.zeros(data.size, dtype=torch.bool),
                "weight_version": torch.zeros(data.size, dtype=torch.int64),
            }
        )


def spent_by_thread() -> Counter[str]:
    """Return the CPU seconds of this process's threads, by kind."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        path = f"/proc/self/task/{thread.native_id}/stat"
        try:
            with open(path) as file:
                fields = file.read().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        kind = thread.name.rstrip("0123456789-").lower()
        found[kind] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


class Watch(threading.Thread):
    """Keeps the latest figures of the threads, which may end before they are read."""

    def __init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self.before = spent_by_thread()
        self.newest: Counter[str] = Counter()
        self.is_over = threading.Event()

    def run(self) -> None:
        """Sample twice a second."""
        while not self.is_over.wait(0.5):
            self.newest |= spent_by_thread()


def rss_mib() -> float:
    """Return the memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--answer-s", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(
        TokenizerBuildConfig(
            kind="vocabulary",
            vocabulary=[*string.ascii_letters, *string.digits, *" |:.,\n"],
            chat_template=TEMPLATE,
        )
    )
    fake = Fake(options.answer_s, options.tokens, len(tokenizer))
    apart = Apart(options.tasks)
    engine = RolloutEngine(fake, apart, tokenizer, RolloutConfig())  # type: ignore[arg-type]
    rows = [
        {"prompt": f"task {n}", "turns": options.turns} for n in range(options.tasks)
    ]
    batch = rl_collate_fn(
        process_prompts(rows, tokenizer)[:], pad_token_id=tokenizer.pad_token_id
    )
    watch = Watch()
    watch.start()
    began_s, began_cpu_s, memory = time.monotonic(), time.process_time(), [rss_mib()]
    for step in range(options.rounds):
        result = engine.run(batch, step=step)
        memory.append(rss_mib())
    wall_s = time.monotonic() - began_s
    cpu_s = time.process_time() - began_cpu_s
    watch.is_over.set()
    engine.close()
    agents_s = apart.end()
    threads = watch.newest - watch.before
    assert int(result.rows["num_turns"].sum()) == options.tasks * options.turns
    print(
        json.dumps(
            {
                "bench": "agents",
                "tasks_in_flight": options.tasks,
                "turns_per_s": round(fake.num_rows / wall_s, 1),
                "rows_per_call": round(fake.num_rows / fake.num_calls, 1),
                "wall_s": round(wall_s, 1),
                "driver_share": round(cpu_s / wall_s, 3),
                "driver_ms_per_turn": round(1000 * cpu_s / fake.num_rows, 2),
                "threads_s": {n: round(s, 1) for n, s in threads.most_common(6)},
                "agents_share": round(agents_s / wall_s, 3),
                "memory_mib": [round(one) for one in memory],
            }
        )
    )


if __name__ == "__main__":
    main()
