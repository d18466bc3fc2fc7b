"""`python -m benchmarks.conversations`: the cost of many conversations in flight.

`--conversations` (1,000) of an asynchronous run are in flight at the same time, each of
`--turns` turns. After each answer a tool of an environment's worker waits for
`--tool-s` (1 s). The generator is a fake, which takes `--answer-s` per call (2) and
returns `--tokens` random tokens per row (64), `--calls` at a time (64); with `--real`
it is the Hugging Face backend with a tiny random model. Training takes no time.

One JSON line: the turns per second and the share of what is possible without any
overhead; the CPU seconds of this process (the controller) per second, also by kind of
thread, and those of the environment's workers; the controller's threads; and its memory
at first and at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import string
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.agents import TEMPLATE, TICKS, Fake, Watch, rss_mib
from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.sampler import AheadSampler
from rl_algorithms.trainers.ahead.scoring import calls_of
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig
from rl_distributed import RayVirtualCluster, init_ray
from rl_envs import RemoteEnvironment
from rl_envs.tools.calls import ToolCall
from rl_envs.tools.environment import ToolEnvironment, ToolLimits
from rl_models import ModelBuildConfig, build_model
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.tokens.tokenizer import load_tokenizer

GROUP = 4
TARGET = 0.2


class Sync:
    """Publishes and loads numbers, as if no weights had changed."""

    def __init__(self, generation: Any) -> None:
        self.generation = generation

    def publish(self, number: int) -> list[int]:
        """Return what is to be loaded."""
        return [number]

    def load(self, published: list[int]) -> None:
        """Load it."""


class Peaks(threading.Thread):
    """Watches threads and memory of this process."""

    def __init__(self) -> None:
        super().__init__(name="peaks", daemon=True)
        self.first_mib = self.most_mib = rss_mib()
        self.most_threads = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        """Sample five times a second."""
        while not self.is_over.wait(0.2):
            self.most_mib = max(self.most_mib, rss_mib())
            self.most_threads = max(self.most_threads, threading.active_count())


def workers_cpu_s(workers: RemoteEnvironment) -> float:
    """Return the CPU seconds of the environment's workers so far."""
    spent = 0.0
    for health in workers._workers.health():
        fields = Path(f"/proc/{health.pid}/stat").read_text().rpartition(")")[2]
        spent += sum(map(int, fields.split()[11:13])) / TICKS
    return spent


def environment(options: argparse.Namespace) -> RemoteEnvironment:
    """Return workers whose tool waits after each response."""
    wait_s = options.tool_s

    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(wait_s)
        return "it waited"

    made = ToolEnvironment(
        [wait],
        lambda prompt, response: 1.0,
        parser=lambda response: [ToolCall("wait")],
        limits=ToolLimits(
            max_conversations=-(-options.conversations // options.workers)
        ),
    )
    return RemoteEnvironment(made, num_workers=options.workers)


def generator(options: argparse.Namespace, folder: Path) -> tuple[Any, Any]:
    """Return a generator and its tokenizer."""
    vocabulary = [*string.ascii_letters, *string.digits, *" |:.,_\n"]
    config = TokenizerBuildConfig(
        kind="vocabulary", vocabulary=vocabulary, chat_template=TEMPLATE
    )
    if not options.real:
        tokenizer = build_tokenizer(config)
        made = Fake(options.answer_s, options.tokens, len(tokenizer))
        made.calls_at_once = options.calls
        return made, tokenizer
    build_model(
        ModelBuildConfig(
            architecture="llama",
            hidden_size=32,
            num_hidden_layers=1,
            max_position_embeddings=2048,
            tokenizer=config,
        ),
        folder / "model",
    )
    cluster = RayVirtualCluster([1], use_gpus=False)
    policy = GenerationPolicy(
        cluster,
        GenerationConfig(max_new_tokens=options.tokens, stop_token_ids=[]),
        model_name=folder / "model",
    )
    return policy, load_tokenizer(folder / "model")


def sampler(
    options: argparse.Namespace, generation: Any, tokenizer: Any, folder: Path
) -> tuple[AheadSampler, RemoteEnvironment]:
    """Return a sampler that keeps the conversations in flight."""
    num_prompts = options.conversations // GROUP // 2
    count = num_prompts * (options.steps + 2)
    rows = process_prompts([{"prompt": f"task {n}"} for n in range(count)], tokenizer)
    loader = BatchedDataLoader(
        rows,
        num_prompts,
        collate_fn=lambda batch: rl_collate_fn(
            batch, pad_token_id=tokenizer.pad_token_id
        ),
        drop_last=True,
    )
    workers = environment(options)
    made = AheadSampler(
        AsynchronousConfig(max_staleness=1),
        RunShape(
            num_prompts=num_prompts,
            num_generations=GROUP,
            max_num_steps=options.steps,
            max_num_epochs=None,
            first_step=0,
            max_turns=options.turns,
            max_attempts=1,
            seed=0,
        ),
        PromptSource(loader, GROUP),
        RolloutEngine(
            generation, workers, tokenizer, RolloutConfig(max_turns=options.turns)
        ),
        generation,
        Sync(generation),  # type: ignore[arg-type]
        calls_at_once=calls_of(workers),
        pad_token_id=tokenizer.pad_token_id,
        check=lambda: None,
        saved=None,
        log_folder=folder,
    )
    return made, workers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=4, help="of half of them each")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--tool-s", type=float, default=1.0)
    parser.add_argument("--answer-s", type=float, default=2.0)
    parser.add_argument("--calls", type=int, default=64, help="of the fake generator")
    parser.add_argument("--workers", type=int, default=2, help="of the environment")
    parser.add_argument("--real", action="store_true", help="with a tiny model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_ray(num_cpus=4)
    with tempfile.TemporaryDirectory() as made:
        generation, tokenizer = generator(options, Path(made))
        watch, peaks = Watch(), Peaks()
        ahead, workers = sampler(options, generation, tokenizer, Path(made))
        watch.start()
        peaks.start()
        before_s = workers_cpu_s(workers)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        turns = tokens = 0
        for _ in range(options.steps):
            result, _ = ahead.next_step()
            assert result is not None
            turns += int(result.rows["num_turns"].sum())
            tokens += int(result.rows["generation_lengths"].sum())
            ahead.end_step(0)
        wall_s = time.monotonic() - began_s
        cpu_s = time.process_time() - began_cpu_s
        workers_s = workers_cpu_s(workers) - before_s
        watch.is_over.set()
        peaks.is_over.set()
        ahead.close()
        workers.shutdown()
        if options.real:
            generation.shutdown()
    threads = watch.newest - watch.before
    line = {
        "bench": "conversations",
        "generator": "huggingface" if options.real else "fake",
        "in_flight": options.conversations,
        "turns_per_s": round(turns / wall_s, 1),
        "driver_share": round(cpu_s / wall_s, 3),
        "driver_ms_per_turn": round(1000 * cpu_s / turns, 2),
        "threads_s": {n: round(s, 1) for n, s in threads.most_common(8)},
        "workers_share": round(workers_s / wall_s, 3),
        "threads": peaks.most_threads,
        "memory_mib": [round(peaks.first_mib), round(peaks.most_mib)],
        "tokens_per_s": round(tokens / wall_s),
        "wall_s": round(wall_s, 1),
        "target": TARGET,
        "verdict": "reached" if cpu_s / wall_s < TARGET else "missed",
    }
    if not options.real:
        # Each turn needs an answer and the tool, one after the other.
        ideal = options.conversations / (options.answer_s + options.tool_s)
        line["of_ideal"] = round(turns / wall_s / ideal, 3)
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
