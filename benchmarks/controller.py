"""`python -m benchmarks.controller`: what a step costs the controller, by its size.

The replicas of a `GenerationPolicy` and the environment are plain objects, so that
neither Ray nor a model is measured: only the controller's own work on the rows of a
step. Each row has 32 tokens of prompt and 32 of its answer, 8 rows per prompt. A part
ends at a time, in any order, which makes the controller look at the others most often.

One JSON line per size, with the CPU seconds (median of the rounds) of

- `generate`: checks, parts, choice of replicas, calls, joined outputs,
- `rollout`: seeds, texts of the answers, verdicts, rows of the result, metrics,
- `advantages`: of GRPO,

and for asynchronous runs `schedule`: decisions on the same number of answers, two
events each, at `--events`. The last lines have the exponent with which cost grows: 1 if
linear.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rl_algorithms.advantages.estimators import GRPOAdvantageEstimator
from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.settings import ScheduleSettings
from rl_algorithms.asynchronous.workers import TRAINER
from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.process.gc_pause import gc_frozen
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.replicas.load import ReplicaLoad

TARGET_S = 1.0
GROUP = 8
TOKENS = 32
SIZES = ((64, 4_096), (256, 16_384), (1_024, 65_536), (1_024, 4_096), (64, 65_536))
GROWING = 3
"""The first so many sizes grow together."""


class Excluded:
    """The CPU time of what stands for another process."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.process_time()

    def __exit__(self, *exception: object) -> None:
        self.spent_s += time.process_time() - self._began_s


class Ticket:
    """A call of a replica."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Replicas:
    """Replicas that end their calls one by one, in any order."""

    def __init__(self, count: int, excluded: Excluded) -> None:
        self.num_replicas = self.num_calls = count
        self.live = self.serving = list(range(count))
        self.num_away = 0
        self._excluded = excluded
        self._order = random.Random(0)
        self._running: list[Ticket] = []

    def call(self, method: str, replica: int, *, data: Any, **kwargs: Any) -> Ticket:
        """Answer with tokens of the vocabulary."""
        with self._excluded:
            width = data["input_ids"].shape[1] + TOKENS
            ids = torch.full((data.size, width), 5)
            ids[:, :-TOKENS] = data["input_ids"]
            lengths = data["input_lengths"] + TOKENS
            output = BatchedDataDict(
                {
                    "output_ids": ids,
                    "generation_lengths": torch.full((data.size,), TOKENS),
                    "unpadded_sequence_lengths": lengths,
                    "logprobs": torch.full((data.size, width), -1.0),
                    "truncated": torch.zeros(data.size, dtype=torch.bool),
                    "weight_version": torch.zeros(data.size, dtype=torch.int64),
                }
            )
            self._running.append(Ticket(output))
            return self._running[-1]

    def finished(self, tickets: Any, timeout_s: float) -> list[Ticket]:
        """Return one of the calls."""
        with self._excluded:
            place = self._order.randrange(len(self._running))
            running = self._running
            running[place], running[-1] = running[-1], running[place]
            return [running.pop()]

    def results(self, ticket: Ticket, timeout_s: float) -> list[Any]:
        """Return its rows."""
        return [ticket.output]


class FakePolicy(GenerationPolicy):
    """A generation policy whose replicas are plain objects."""

    def __init__(self, replicas: Replicas) -> None:
        self._fleet = SimpleNamespace(  # type: ignore[assignment]
            config=GenerationConfig(max_new_tokens=TOKENS),
            workers=replicas,
            replicas=replicas,
            load=ReplicaLoad(replicas.num_replicas),
            hosting=SimpleNamespace(calls_at_once=1, updates_in_flight=False),
            uses=SimpleNamespace(one=nullcontext),
            pad_token_id=0,
        )
        self._served = SimpleNamespace(  # type: ignore[assignment]
            refusal="", version=0
        )
        self._following = None
        self._num_calls = 0


class Judge(EnvironmentInterface[Any]):
    """Ends each conversation, with a reward that is ready."""

    def __init__(self, excluded: Excluded) -> None:
        self._excluded = excluded

    def step(
        self, message_log_batch: Any, metadata: Any
    ) -> EnvironmentReturn[Mapping[str, Any]]:
        """Return a verdict on each row."""
        with self._excluded:
            count = len(metadata)
            return EnvironmentReturn(
                [], list(metadata), [None] * count, torch.arange(count) % 2.0,
                torch.ones(count, dtype=torch.bool), None,
            )  # fmt: skip


def timed(work: Callable[[], Any], excluded: Excluded) -> tuple[Any, float]:
    """Return a result, and the CPU seconds without what is excluded."""
    before_s = excluded.spent_s
    began_s = time.process_time()
    result = work()
    return result, time.process_time() - began_s - (excluded.spent_s - before_s)


def step(num_replicas: int, num_rows: int, rounds: int) -> dict[str, Any]:
    """Measure the parts of a step."""
    excluded = Excluded()
    tokenizer = build_tokenizer(
        TokenizerBuildConfig(
            kind="vocabulary", vocabulary=[*string.ascii_letters, *string.digits]
        )
    )
    policy = FakePolicy(Replicas(num_replicas, excluded))
    engine = RolloutEngine(policy, Judge(excluded), tokenizer, RolloutConfig())
    generator = random.Random(0)
    texts = [
        "".join(generator.choices(string.ascii_letters, k=TOKENS))
        for _ in range(num_rows // GROUP)
    ]
    batch = rl_collate_fn(
        process_prompts([{"prompt": text} for text in texts], tokenizer)[:],
        pad_token_id=tokenizer.pad_token_id,
    )
    rows = torch.arange(len(texts)).repeat_interleave(GROUP)
    asked = BatchedDataDict(
        {name: batch[name][rows] for name in ("input_ids", "input_lengths")}
    )
    estimator = GRPOAdvantageEstimator()
    found: dict[str, list[float]] = {"generate": [], "rollout": [], "advantages": []}
    for number in range(rounds + 1):
        _, generate_s = timed(lambda: policy.generate(asked), excluded)
        result, run_s = timed(
            lambda: engine.run(batch, num_generations=GROUP), excluded
        )
        columns = [
            result.rows[name] for name in ("rewards", "group_index", "sample_mask")
        ]
        _, advantages_s = timed(
            functools.partial(estimator.compute_advantage, *columns), excluded
        )
        if number:
            found["generate"].append(generate_s)
            found["rollout"].append(run_s - generate_s)
            found["advantages"].append(advantages_s)
    parts = {name: round(statistics.median(s), 3) for name, s in found.items()}
    total_s = round(sum(parts.values()), 3)
    return {
        "bench": "controller_step",
        "replicas": num_replicas,
        "rows": num_rows,
        "cpu_s": {**parts, "all": total_s},
        "us_per_row": round(total_s / num_rows * 1e6, 1),
        "target_s": TARGET_S,
        "verdict": "reached" if total_s < TARGET_S else "missed",
    }


def schedule(num_rows: int, steps: int = 2) -> dict[str, Any]:
    """Measure the decisions on answers in flight: sampled, scored, trained on."""
    made = Schedule(
        ScheduleSettings(
            num_prompts_per_step=num_rows // GROUP // 2,
            num_generations_per_prompt=GROUP,
            prompts_per_epoch=num_rows * 4,
            max_staleness=1,
            answers_per_generator=num_rows,
            answers_per_environment=num_rows,
        )
    )
    now_s, spent_s, num_events, num_steps, most = 0.0, 0.0, 0, 0, 0
    asked: list[act.Action] = list(made.on(ev.Begin(now_s)))
    while num_steps < steps:
        most = max(most, sum(isinstance(action, act.Sample) for action in asked))
        # What workers would report is made beforehand, and its cost is not counted.
        events = []
        for action in asked:
            event = _answer(action, now_s)
            if event is not None:
                now_s += 1e-6
                events.append(event)
        num_events += len(events)
        num_steps += sum(isinstance(event, ev.StepTrained) for event in events)
        began_s = time.process_time()
        asked = [action for event in events for action in made.on(event)]
        spent_s += time.process_time() - began_s
    return {
        "bench": "controller_schedule",
        "rows_in_flight": most,
        "events": num_events,
        "us_per_event": round(spent_s / num_events * 1e6, 1),
        "cpu_s_per_step": round(spent_s / num_steps, 2),
    }


def _answer(action: act.Action, now_s: float) -> ev.Event | None:
    """Return what a worker that never fails reports."""
    match action:
        case act.StartWorker(worker=worker) if worker == TRAINER:
            return ev.TrainerReady(now_s, 0)
        case act.StartWorker(worker=worker, incarnation=incarnation):
            return ev.WorkerReady(now_s, worker, incarnation)
        case act.LoadWeights(worker, incarnation, trainer, version):
            return ev.WeightsLoaded(now_s, worker, incarnation, trainer, version)
        case act.Sample(worker=worker, incarnation=incarnation, task=task):
            version = action.version
            return ev.Answered(
                now_s, worker, incarnation, task, version, version, TOKENS
            )
        case act.Score(worker=worker, incarnation=incarnation, task=task):
            return ev.Scored(now_s, worker, incarnation, task, 1.0)
        case act.Train(incarnation=incarnation, step=number):
            return ev.StepTrained(now_s, incarnation, number)
        case act.SaveCheckpoint(incarnation=incarnation, step=number):
            return ev.CheckpointSaved(now_s, incarnation, number)
    return None


def growth(sizes: list[int], seconds: list[float]) -> float:
    """Return the exponent of the cost's growth."""
    return round(float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]), 2)


def show(line: dict[str, Any]) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measured per size")
    parser.add_argument("--events", action="store_true", help="the schedule as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spent = []
    for num_replicas, num_rows in SIZES:
        line = step(num_replicas, num_rows, options.rounds)
        show(line)
        spent.append(line["cpu_s"]["all"])
    sizes = [num_rows for _, num_rows in SIZES[:GROWING]]
    show(
        {
            "bench": "controller_growth",
            "growth_exponent": growth(sizes, spent[:GROWING]),
        }
    )
    if options.events:
        # As in a training run: the collector need not look at what existed before.
        with gc_frozen():
            lines = [schedule(num_rows) for num_rows in sizes]
        for line in lines:
            show(line)
        costs = [line["us_per_event"] for line in lines]
        show(
            {
                "bench": "controller_schedule_growth",
                "growth_exponent": 1 + growth(sizes, costs),
            }
        )


if __name__ == "__main__":
    main()
