"""`python -m benchmarks.asynchronous`: steps per hour, asynchronous and synchronous.

GRPO with `--prompts` (8) x 8 answers per step. A reward takes 0.2 s, and 5 s for one
answer in `--slow-one-in`, by a hash of prompt and answer, on `--workers` that only
wait. The same run is made synchronously and with each `--staleness`, one after the
other on the same worker processes. One JSON line per run; `ratio` is its steps per hour
over the synchronous run's, and `cpu_s_per_step` the CPU seconds of all processes.
`busy` is the share of the time in which generator and trainer had a call, and
`neither` that in which none of the two had one. `--quick`
rewards without waiting, on the one process that a run has by default: then the only
gain is the overlap of sampling and training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import rl_algorithms as rl
from rl_distributed import init_ray
from rl_distributed.timing.timeline_file import TIMELINE, read_timeline
from rl_models import ModelBuildConfig, build_model

WARMUP_STEPS = 2
TARGET = 1.8
REWARD = """
import hashlib
import time

def reward(prompt, response):
    digest = hashlib.sha256(f"{{prompt}}|{{response}}".encode()).digest()
    is_slow = int.from_bytes(digest[:4], "big") % {slow} == 0
    time.sleep({wait} * (25 if is_slow else 1))
    return float(response[:1].isdigit())
"""


class Clock(rl.Callback):
    """Records when steps end, and the age of their training data."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.cpu_s: list[float] = []
        self.ages: list[float] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        """Record it."""
        self.ends_s.append(time.perf_counter())
        self.cpu_s.append(_cpu_s())
        self.ages.append(metrics.get("train:asynchronous/staleness_mean", 0.0))

    def steps_per_hour(self) -> float:
        """Return the rate after the warm-up."""
        kept = self.ends_s[WARMUP_STEPS - 1 :]
        return 3600.0 * (len(kept) - 1) / (kept[-1] - kept[0])

    def cpu_s_per_step(self) -> float:
        """Return the CPU seconds of a step after the warm-up, in all processes."""
        kept = self.cpu_s[WARMUP_STEPS - 1 :]
        return (kept[-1] - kept[0]) / (len(kept) - 1)


def _cpu_s() -> float:
    """Return the CPU seconds so far of this process and those that it has started."""
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def busy(timeline: Path) -> dict[str, float]:
    """Return the share of the time in which worker 0 of each group had a call.

    `neither` is the share in which none had one.

    Args:
        timeline: File of a run.
    """
    found, _ = read_timeline(timeline, num_first=1_000_000, num_newest=0)
    lines = [line for line in found if line["step"] > WARMUP_STEPS]
    calls: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for row in line["rows"]:
            for _, start_us, duration_us in row["calls"]:
                begin_s = line["start_s"] + start_us / 1e6
                end_s = begin_s + duration_us / 1e6
                calls.setdefault(row["name"], []).append((begin_s, end_s))
    begin_s = lines[0]["start_s"]
    end_s = lines[-1]["start_s"] + lines[-1]["seconds"]
    groups = {name: calls.get(f"{name}[0]", []) for name in ("generation", "policy")}
    both = [call for found in groups.values() for call in found]
    shares = {}
    for name, found in {**groups, "any": both}.items():
        total_s, until_s = 0.0, begin_s
        # Calls overlap, and one that is not over at the end of a line comes twice.
        for first_s, last_s in sorted(found):
            total_s += max(0.0, min(last_s, end_s) - max(first_s, until_s))
            until_s = max(until_s, last_s)
        shares[name] = round(total_s / (end_s - begin_s), 3)
    shares["neither"] = round(1.0 - shares.pop("any"), 3)
    return shares


def run(
    options: argparse.Namespace, folder: Path, staleness: int | None, pool: Any
) -> dict[str, Any]:
    """Make one run and return its line."""
    asynchronous = None
    if staleness is not None:
        asynchronous = {
            "max_staleness": staleness,
            "weight_updates": options.weight_updates,
        }
    name = "turns" if staleness is None else f"staleness-{staleness}"
    trainer = rl.GRPOTrainer.from_pretrained(
        folder / "model",
        output_dir=str(folder / name),
        max_num_steps=options.steps + WARMUP_STEPS,
        max_num_epochs=1000,
        num_prompts_per_step=options.prompts,
        num_generations_per_prompt=8,
        max_new_tokens=options.new_tokens,
        max_total_sequence_length=16 + options.new_tokens,
        reference_policy_kl_penalty=0.0,
        **{
            "env.name": "reward",
            "env.settings": {"file": str(folder / "reward.py")},
            "env.num_workers": options.workers,
            "loss_fn.use_importance_sampling_correction": True,
            "grpo.asynchronous": asynchronous,
            "policy.train_micro_batch_size": options.micro_batch_size,
            "checkpointing.enabled": False,
        },
    )
    clock = Clock()
    rows = [{"prompt": f"{a}+{b}="} for a in range(16) for b in range(16)]
    rl.GRPOTrainer(trainer.config, pool=pool).fit(
        rows, callbacks=[clock], progress=False
    )
    return {
        "bench": "asynchronous",
        "run": name,
        "steps_per_hour": round(clock.steps_per_hour(), 1),
        "cpu_s_per_step": round(clock.cpu_s_per_step(), 3),
        "staleness": round(sum(clock.ages) / len(clock.ages), 2),
        "steps": options.steps,
        "busy": busy(folder / name / TIMELINE),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="measured steps per run")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--slow-one-in", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--workers",
        type=int,
        help="processes of the environment; default 16, and 1 for --quick",
    )
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument(
        "--new-tokens", type=int, default=16, help="at most, per answer"
    )
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--weight-updates", default="between_answers")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    wait_s = 0.0 if options.quick else 0.2
    options.workers = options.workers or (1 if options.quick else 16)
    init_ray(num_cpus=4)
    with tempfile.TemporaryDirectory() as made, rl.KeptWorkers() as pool:
        folder = Path(made)
        build_model(
            ModelBuildConfig(
                hidden_size=options.hidden_size, num_hidden_layers=options.layers
            ),
            folder / "model",
        )
        source = REWARD.format(wait=wait_s, slow=options.slow_one_in)
        (folder / "reward.py").write_text(source)
        turns = 0.0
        for staleness in (None, *options.staleness):
            line = run(options, folder, staleness, pool)
            turns = turns or line["steps_per_hour"]
            line["ratio"] = round(line["steps_per_hour"] / turns, 2)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
