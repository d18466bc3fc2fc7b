"""`python -m benchmarks.startup [NAME ...] [--rounds N]`: how long a start takes.

Everything that a user waits for is measured from the start of its process, and compared
with `python -c "import torch, ray"`, which every round runs as well: the ratio means
more than seconds, which depend on the machine and its load. All take turns; medians are
compared. One JSON line per figure:

- `ratio`: wall time in units of the imports; `cpu_ratio` the same for user and system
  time, which other programs affect less; only for single-process commands;
- `target`: the highest acceptable ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_S = 600.0
POLL_S = 0.02
REFERENCE = "import torch, ray"
AT_ONCE, GENERATE, FIRST_STEP = 0.5, 1.6, 2.9
PROGRAM = """
import sys
import rl_algorithms as rl

model, folder = sys.argv[1:]
rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(16)]
rl.train(
    model, rows, lambda prompt, response: float(len(response)), output_dir=folder,
    max_num_steps=1, num_prompts_per_step=4, num_generations_per_prompt=4,
    max_new_tokens=6, max_total_sequence_length=64, progress=False,
)
"""


@dataclass
class Figure:
    """One thing that a user waits for."""

    command: Callable[[Path], Sequence[str]]
    """Arguments of Python, given an empty folder."""
    target: float
    is_training: bool = False
    """Whether it ends with its first step, not with its process."""
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        command = [sys.executable, "-c", BUILD, str(model)]
        subprocess.run(command, check=True)
        known = figures(str(model))
        unknown = set(options.names) - set(known)
        if unknown:
            parser.error(
                f"no figure {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            )
        chosen = {name: known[name] for name in options.names or known}
        imports = Figure(lambda place: ["-c", REFERENCE], 1.0)
        for number in range(options.rounds):
            for name, figure in {"imports": imports, **chosen}.items():
                place = Path(folder) / f"{name}-{number}".replace(" ", "-")
                place.mkdir()
                measure(figure, place)
    for name, figure in chosen.items():
        sys.stdout.write(json.dumps(line_of(name, figure, imports)) + "\n")


BUILD = """
import sys
from rl_models import ModelBuildConfig, build_model

build_model(ModelBuildConfig(hidden_size=32, num_hidden_layers=2), sys.argv[1])
"""


def figures(model: str) -> dict[str, Figure]:
    """Return all measurements, by name."""
    rl = ["-m", "rl_cli"]
    policy = f"policy.model_name={model}"
    told = {
        "misspelled key": ["train", "quickstart", "sede=3"],
        "missing file": ["train", "sft", policy, "data.train=none.jsonl"],
        "missing model": ["generate", "./none", "1+1="],
        "config show": ["config", "show", "quickstart"],
        "config validate": ["config", "validate", "quickstart"],
        "config explain": ["config", "explain", "grpo"],
        "doctor without ray": ["doctor", "--no-ray"],
    }
    found = {
        name: Figure(lambda place, words=words: [*rl, *words], AT_ONCE)  # type: ignore[misc]
        for name, words in told.items()
    }
    sample = [*rl, "generate", model, "1+2=", "--max-new-tokens", "6"]
    found["generate"] = Figure(lambda place: sample, GENERATE)
    found["first step of rl train"] = Figure(
        lambda place: [*rl, *_train(place, policy)], FIRST_STEP, is_training=True
    )
    found["first step of rl.train()"] = Figure(
        lambda place: ["-c", PROGRAM, model, str(place / "run")],
        FIRST_STEP,
        is_training=True,
    )
    return found


def _train(place: Path, policy: str) -> list[str]:
    """Return the arguments of a training run of one step on rows of a file."""
    file = place / "rows.jsonl"
    rows = [{"prompt": f"{n}=", "response": str(n)} for n in range(32)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("train", "sft", policy, f"data.train={file}", "sft.max_num_steps=1"),
        *(f"output_dir={place / 'run'}", "data.input_key=prompt"),
        *("data.output_key=response", "policy.max_total_sequence_length=64"),
    ]


def measure(figure: Figure, place: Path) -> None:
    """Run it once, and record its duration."""
    command = [sys.executable, *figure.command(place)]
    before = _children_s()
    began_s = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            if figure.is_training:
                _wait_for_a_step(process, place)
                figure.wall_s.append(time.perf_counter() - began_s)
                process.wait(DEADLINE_S)
            else:
                process.wait(DEADLINE_S)
                figure.wall_s.append(time.perf_counter() - began_s)
                figure.cpu_s.append(_children_s() - before)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _wait_for_a_step(process: subprocess.Popen[bytes], place: Path) -> None:
    """Wait until the metrics of a step are written."""
    end = time.monotonic() + DEADLINE_S
    while not any('"step":1,' in f.read_text() for f in place.rglob("metrics.jsonl")):
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended without a step")
        if time.monotonic() > end:
            raise TimeoutError(f"{process.args!r} did no step in {DEADLINE_S:g} s")
        time.sleep(POLL_S)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def line_of(name: str, figure: Figure, imports: Figure) -> dict[str, object]:
    """Return the line of a figure."""
    wall_s, reference_s = (statistics.median(f.wall_s) for f in (figure, imports))
    line: dict[str, object] = {
        "bench": "startup",
        "figure": name,
        "median_s": round(wall_s, 2),
        "imports_s": round(reference_s, 2),
        "ratio": round(wall_s / reference_s, 2),
        "target": figure.target,
        "verdict": "reached" if wall_s <= figure.target * reference_s else "missed",
    }
    if figure.cpu_s:
        of_imports_s = statistics.median(imports.cpu_s)
        line["cpu_ratio"] = round(statistics.median(figure.cpu_s) / of_imports_s, 2)
    return line


if __name__ == "__main__":
    main()
