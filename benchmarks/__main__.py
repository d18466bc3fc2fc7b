"""`python -m benchmarks [NAME ...]`: one JSON line per measurement.

Both sides run in one process tree on the same machine and take turns step by step, with
the same number of cores: TRL once with one thread and once with as many as there are
cores, of which the faster counts; ours with one worker per core and one thread each
(fewer with `--workers 1`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.alternate import Baton, summary
from benchmarks.workload import EXAMPLES, WORKLOADS, Workload

WARMUP_STEPS = 3
COPY_STEPS = 200


def main() -> None:
    """Run the named benchmarks, each in its own process."""
    names = [*WORKLOADS, *EXAMPLES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=15, help="measured steps per side")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, help="of TRL; default: the faster")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {names}")
    for name in options.names:
        if options.threads is None:
            run_both(name, options.steps, options.workers)
        else:
            with tempfile.TemporaryDirectory() as folder:
                line = measure(name, options, Path(folder))
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def run_both(name: str, steps: int, workers: int) -> None:
    """Measure with both thread counts of the peer; print both and the verdict."""
    lines = []
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        command = [sys.executable, "-m", "benchmarks", name, "--steps", str(steps)]
        command += ["--workers", str(workers), "--threads", str(threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines.append(json.loads(done.stdout.strip().splitlines()[-1]))
        sys.stdout.write(json.dumps(lines[-1]) + "\n")
        sys.stdout.flush()
    fastest = min(lines, key=lambda line: line["peer"]["median_s"])
    verdict = {
        "bench": name,
        "verdict": "reached" if fastest["ratio"] >= fastest["target"] else "missed",
        "ratio": fastest["ratio"],
        "target": fastest["target"],
        "peer_threads": fastest["peer"]["threads"],
    }
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one benchmark with one thread count of the peer."""
    from benchmarks import ours, trl_peer
    from rl_distributed import init_ray

    init_ray(num_cpus=max(options.workers, 2))
    steps = options.steps + WARMUP_STEPS
    baton = Baton((ours.SIDE, trl_peer.SIDE))
    measured = grpo if name in WORKLOADS else examples
    more = measured(name, steps, options, baton, folder)
    times = {side: summary(t, WARMUP_STEPS) for side, t in baton.times_s.items()}
    work = WORKLOADS.get(name) or EXAMPLES[name]
    return {
        "bench": name,
        "ours": {**times[ours.SIDE], "workers": options.workers, "threads_each": 1},
        "peer": {
            "name": f"trl {version('trl')}",
            **times[trl_peer.SIDE],
            "threads": options.threads,
        },
        "ratio": round(times["trl"]["median_s"] / times["ours"]["median_s"], 3),
        "target": work.target,
        **more,
    }


def grpo(
    name: str, steps: int, options: argparse.Namespace, baton: Baton, folder: Path
) -> dict[str, Any]:
    """Train both sides with GRPO; return the lengths of their answers."""
    from benchmarks import ours, trl_peer

    work = WORKLOADS[name]
    model = work.model(folder)
    rows = work.prompts(work.num_prompts * steps)
    if not work.fixed:
        model = copying_model(work, model, options.workers, folder)
    details: dict[str, Any] = {}
    arguments = (work, model, rows, steps)
    peer = _thread(
        lambda: details.update(
            trl_peer.grpo(*arguments, options.threads, baton, folder)
        )
    )
    mine = ours.grpo(*arguments, options.workers, baton, folder)
    peer.join(timeout=600)
    return {
        "answer_tokens_ours": mine.get("train:mean_gen_tokens_per_sample"),
        "answer_tokens_peer": details.get("completions/mean_length"),
    }


def examples(
    name: str, steps: int, options: argparse.Namespace, baton: Baton, folder: Path
) -> dict[str, Any]:
    """Train both sides with SFT or DPO; return the tokens of a step."""
    from benchmarks import ours, trl_peer

    work = EXAMPLES[name]
    rows = work.rows(work.batch_size * steps)
    arguments = (work.model(folder), rows, work.batch_size, steps)
    ours_of, peer_of = {
        "sft": (ours.sft, trl_peer.sft),
        "dpo": (ours.dpo, trl_peer.dpo),
    }[work.algorithm]
    peer = _thread(lambda: peer_of(*arguments, options.threads, baton, folder))
    ours_of(*arguments, options.workers, baton, folder)
    peer.join(timeout=600)
    # A pair contains its prompt twice; every answer ends with one more token.
    answers = [column for column in rows[0] if column != "prompt"]
    tokens = sum(len(row["prompt"]) + len(row[a]) + 1 for row in rows for a in answers)
    return {"tokens_per_step": round(tokens / steps)}


def copying_model(work: Workload, model: Path, workers: int, folder: Path) -> Path:
    """Teach the model to copy the prompt, so that answers are as long as prompts."""
    from benchmarks import ours

    rows = work.prompts(COPY_STEPS * 8)
    trained = ours.sft(model, rows, 64, COPY_STEPS, workers, None, folder, lr=3e-3)
    assert trained is not None
    return trained


def _thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    main()
