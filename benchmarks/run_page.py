"""`python -m benchmarks.run_page [NAME ...]`: the cost of viewing a run.

One JSON line per figure, with its target:

- `help`: `rl --help`, wall time and CPU time of the process,
- `report`: `rl report` of a run of 1,000 steps, likewise,
- `long_run`: the page of 10,000 steps and 200,000 stored answers: its size, and the
  time until Chromium shows the first curves, from the start of the navigation,
- `watch`: GRPO steps while `rl watch` follows the run and a client requests the page as
  often as a browser does, against steps while both are suspended by SIGSTOP. Blocks of
  steps alternate; `watch_cpu_share` is the server's CPU time over its running time, in
  units of one core, and `client_cpu_share` the client's.

Runs of the second and third are written here: 80 metrics per step, and answers of 32
tokens with their log-probs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

import rl_algorithms as rl
from benchmarks.workload import WORKLOADS, reward
from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles

sys.path.append(str(Path(__file__).parents[1] / "packages" / "rl-cli" / "tests"))
from rl_cli_chromium import Chromium, chromium_path

DEADLINE_S = 600.0
RL = [sys.executable, "-m", "rl_cli"]
NUM_METRICS = 80
ANSWER_TOKENS = 32
LONG_STEPS, LONG_ANSWERS = 10_000, 200_000
# Short, so that both blocks of a pair see the same machine load, yet longer than the
# interval of a page's requests.
BLOCK_STEPS = 4
MOST_BYTES = 3_000_000


def write_run(folder: Path, num_steps: int, answers_per_step: int) -> Path:
    """Write the files of a finished GRPO run."""
    rng = random.Random(7)
    folder.mkdir(parents=True)
    record = {
        "kind": "algorithm",
        "name": "grpo",
        "config": {"seed": 3},
        "started": "2026-01-02T03:04:05+00:00",
        "command": "rl train grpo seed=3",
    }
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"hyperparams": {"seed": 3}}) + "\n")
        for step in range(1, num_steps + 1):
            line = {"step": step, "time": 1.7e9 + step, "metrics": _metrics(step, rng)}
            file.write(json.dumps(line) + "\n")
    files = RolloutFiles(folder, 1 << 40)
    for step in range(1, num_steps + 1):
        files.add(step, [_answer(step, n, rng) for n in range(answers_per_step)])
    (folder / "result.json").write_text(
        json.dumps({"steps": num_steps, "wall_s": 1.0, "stop_reason": "done"})
    )
    return folder


def _metrics(step: int, rng: random.Random) -> dict[str, float]:
    named = {
        "train:reward": 1 - math.exp(-step / 3000) + rng.gauss(0, 0.05),
        "train:loss": rng.gauss(0, 0.1),
        "train:kl_penalty": abs(rng.gauss(0, 0.01)),
        "train:approx_entropy": 2 * math.exp(-step / 5000),
        "train:grad_norm": abs(rng.gauss(1, 0.2)),
        "timing:total_step_time": rng.uniform(1, 2),
        "timing:generation": rng.uniform(0.5, 1),
        "timing:policy_training": rng.uniform(0.2, 0.5),
    }
    if step % 20 == 0:
        named["val:accuracy"] = 1 - math.exp(-step / 4000)
    rest = NUM_METRICS - len(named)
    return named | {f"train:part/{n}": rng.random() for n in range(rest)}


def _answer(step: int, number: int, rng: random.Random) -> dict[str, Any]:
    tokens = [str(rng.randint(0, 9)) for _ in range(ANSWER_TOKENS)]
    return {
        "reward": round(rng.random(), 4),
        "group": number // 4,
        "prompt": f"{rng.randint(0, 10**12)}=",
        "response": "".join(tokens),
        "outcome": "ok",
        "length": ANSWER_TOKENS,
        "versions": [[step - 1, ANSWER_TOKENS]],
        "advantage": round(rng.gauss(0, 1), 4),
        "tokens": tokens,
        "logprobs": [round(-rng.random(), 4) for _ in tokens],
    }


def _time_command(*arguments: str) -> tuple[float, float]:
    """Return wall time and CPU time of a command, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    subprocess.run(
        [*RL, *arguments], check=True, timeout=DEADLINE_S,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wall_s = time.perf_counter() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _command_line(rounds: int, target_s: float, *arguments: str) -> dict[str, Any]:
    """Return medians of a command's times; the target is for an idle machine."""
    walls_s, cpus_s = zip(
        *(_time_command(*arguments) for _ in range(rounds)), strict=True
    )
    found = {"median_s": statistics.median(walls_s), "cpu_s": statistics.median(cpus_s)}
    return _line(found, {"median_s": target_s})


def measure_help(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time `rl --help`."""
    return _command_line(options.rounds, 0.5, "--help")


def measure_report(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time `rl report` of 1,000 steps with four answers each, as a run keeps."""
    run = write_run(folder / "short", 1000, 4)
    return _command_line(options.rounds, 3.0, "report", str(run))


def measure_long_run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the page of a long run: its size, and the time to its first view."""
    run = write_run(folder / "long", LONG_STEPS, LONG_ANSWERS // LONG_STEPS)
    report_s, cpu_s = _time_command("report", str(run))
    page = run / "report.html"
    num_bytes = page.stat().st_size
    found = {"report_s": report_s, "report_cpu_s": cpu_s, "page_bytes": num_bytes}
    targets = {"page_bytes": float(MOST_BYTES)}
    if chromium_path() is not None:
        views_s = [_first_view_s(page) for _ in range(options.rounds)]
        found["first_view_s"] = statistics.median(views_s)
        targets["first_view_s"] = 2.0
    return _line(found, targets)


def _first_view_s(page: Path) -> float:
    with Chromium() as browser:
        browser.open(page)
        browser.wait("document.querySelector('.chart[data-drawn]') !== null")
        return float(browser.evaluate("performance.now()")) / 1000


class Turns(rl.Callback):
    """Suspends and resumes the watchers block by block, and times the steps.

    Args:
        watchers: Stops the watchers.
        run: Folder of the run.
    """

    def __init__(self, watchers: contextlib.ExitStack, run: Path) -> None:
        self.blocks: dict[bool, list[float]] = {True: [], False: []}
        self.cpu_s, self.on_s = [0.0, 0.0], 0.0
        self._stack, self._run = watchers, run
        self._processes: list[psutil.Process] = []
        self._steps = 0
        self._is_on = False
        self._began_s, self._cpu_began_s = 0.0, [0.0, 0.0]

    def on_step_end(
        self, trainer: Any, step: int, metrics: Mapping[str, float]
    ) -> None:
        """End the block if it is full, and start the next one."""
        if not self._processes:
            # Not before the first step, whose compilation the watchers must not affect.
            self._processes = self._stack.enter_context(watching(self._run))
        elif (step - self._steps) < BLOCK_STEPS:
            return
        else:
            self._end_block()
        self._steps = step
        self._begin_block()

    def _end_block(self) -> None:
        took_s = time.perf_counter() - self._began_s
        self.blocks[self._is_on].append(took_s / BLOCK_STEPS)
        if self._is_on:
            self.on_s += took_s
            pairs = zip(self.cpu_s, self._used_s(), self._cpu_began_s, strict=True)
            self.cpu_s = [before + end - start for before, end, start in pairs]

    def _begin_block(self) -> None:
        self._is_on = len(self.blocks[True]) <= len(self.blocks[False])
        for process in self._processes:
            process.send_signal(signal.SIGCONT if self._is_on else signal.SIGSTOP)
        self._cpu_began_s = self._used_s()
        self._began_s = time.perf_counter()

    def _used_s(self) -> list[float]:
        used = [process.cpu_times() for process in self._processes]
        return [float(times.user + times.system) for times in used]


# Polls like the page: is there a newer version than its own?
CLIENT = """
import json, sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
url, seen = sys.argv[1], 0
place, _, token = url.partition("?")
while True:
    with opener.open(f"{place}data?{token}&seen={seen}", timeout=600) as answer:
        text = answer.read()
    seen = json.loads(text)["version"] if text else seen
    time.sleep(2.0)
"""


@contextlib.contextmanager
def watching(run: Path) -> Iterator[list[psutil.Process]]:
    """Start `rl watch` and a client; yield both processes, the server first."""
    with contextlib.ExitStack() as stack:
        server = subprocess.Popen(
            [*RL, "watch", str(run), "--port", "0", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(_end, server)
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        client = subprocess.Popen([sys.executable, "-c", CLIENT, url])
        stack.callback(_end, client)
        yield [psutil.Process(server.pid), psutil.Process(client.pid)]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(DEADLINE_S)


def measure_watch(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare steps with and without a watcher, in one run."""
    work = WORKLOADS["grpo_small_fixed"]
    steps = 2 * options.blocks * BLOCK_STEPS + 2
    rows = work.prompts(work.num_prompts * 50)
    run = folder / "watched"
    with contextlib.ExitStack() as stack:
        turns = Turns(stack, run)
        rl.train(
            work.model(folder),
            [{"prompt": row["prompt"]} for row in rows],
            lambda prompt, response: reward(response),
            policy={
                "max_total_sequence_length": 24,
                "generation": {"stop_token_ids": []},
            },
            max_new_tokens=12,
            num_prompts_per_step=work.num_prompts,
            num_generations_per_prompt=work.num_generations,
            max_num_steps=steps,
            max_num_epochs=None,
            cluster={"workers_per_node": 1, "use_gpus": False},
            checkpointing={"save_period": 100_000},
            val_period=0,
            progress=False,
            output_dir=str(run),
            callbacks=[turns],
        )
    on, off = turns.blocks[True], turns.blocks[False]
    ratios = [a / b for a, b in zip(on, off, strict=False)]
    added = statistics.median(ratios) - 1
    spread = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return _line(
        {
            "step_s": statistics.median(off),
            "step_watched_s": statistics.median(on),
            "added": added,
            "added_standard_error": spread,
            "blocks": len(ratios),
            "watch_cpu_share": turns.cpu_s[0] / turns.on_s,
            "client_cpu_share": turns.cpu_s[1] / turns.on_s,
        },
        {"added": 0.01, "watch_cpu_share": 0.01},
    )


def _line(found: dict[str, float], targets: dict[str, float]) -> dict[str, Any]:
    reached = all(found[name] < target for name, target in targets.items())
    return {
        **{name: round(value, 5) for name, value in found.items()},
        "targets": targets,
        "verdict": "reached" if reached else "missed",
    }


FIGURES = {
    "help": measure_help,
    "report": measure_report,
    "long_run": measure_long_run,
    "watch": measure_watch,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
    options = parser.parse_args()
    if unknown := set(options.names) - set(FIGURES):
        parser.error(f"no figure {sorted(unknown)}; there are {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        with tempfile.TemporaryDirectory() as folder:
            line = FIGURES[name](Path(folder), options)
        sys.stdout.write(json.dumps({"bench": name, **line}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
