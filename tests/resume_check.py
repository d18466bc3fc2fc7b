"""`python tests/resume_check.py ALGORITHM ...`: is resuming after a kill bitwise exact?

For each algorithm or preset (default: all of both) a small run is made uninterrupted.
Then the same run is killed by SIGKILL, with all its child processes, at five moments
drawn from `--seed`: some time after a phase of a step has begun; with `--phase`, after
this one has (`validation`, or `checkpointing`, while files are written). After each
kill it is resumed. In the end weights, optimizer state and the metrics of all steps
must be bitwise equal. One JSON line is printed per algorithm; the exit code is 1 if any
differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import session_processes

import rl_algorithms as rl
from rl_algorithms.presets import preset_names
from rl_algorithms.registry import algorithm_settings
from rl_models import ModelBuildConfig, build_model

NUM_STEPS, SAVE_PERIOD = 12, 2
DEADLINE_S = 400.0
# What a checkpoint records about its circumstances, not the training.
CIRCUMSTANCES = {"manifest.json", "training_info.json", "config.yaml"}

PROMPTS = [{"prompt": f"{a}+{b}="} for a in range(7) for b in range(3)]
ANSWERS = [{**row, "answer": row["prompt"][0]} for row in PROMPTS]
PAIRS = [{**row, "chosen": row["prompt"][0], "rejected": "99"} for row in PROMPTS]
COMMON: dict[str, Any] = {
    "max_total_sequence_length": 12,
    "lr": 3e-3,
    "save_period": SAVE_PERIOD,
    "keep_latest_k": 2,
    "val_period": 3,
}
SAMPLING: dict[str, Any] = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "max_new_tokens": 4,
    "train_global_batch_size": 8,
}
EXAMPLES: dict[str, Any] = {"train_global_batch_size": 4}


def make_reward() -> Callable[..., Any]:
    """Return a reward function by value: workers cannot import this file."""

    def reward(prompt: str, response: str) -> float:
        return sum(map(int, filter(str.isdigit, response))) / 40

    return reward


def make_rewards() -> Callable[..., Any]:
    """Return a function with two rewards."""

    def rewards(prompt: str, response: str) -> dict[str, float]:
        digits = [int(letter) for letter in response if letter.isdigit()]
        return {"sum": sum(digits) / 40, "varied": len(set(response)) / 4}

    return rewards


@dataclass(frozen=True)
class Case:
    """The small run of an algorithm."""

    rows: list[dict[str, str]]
    settings: dict[str, Any]
    make_reward: Callable[[], Callable[..., Any]] | None = None


CASES = {
    "grpo": Case(
        PROMPTS, {**SAMPLING, "reference_policy_kl_penalty": 0.05}, make_reward
    ),
    **{name: Case(PROMPTS, SAMPLING, make_reward) for name in preset_names()},
    "gdpo": Case(PROMPTS, SAMPLING, make_rewards),
    "reinforce_plus_plus": Case(
        PROMPTS,
        {**SAMPLING, "num_prompts_per_step": 16, "num_generations_per_prompt": 1},
        make_reward,
    ),
    "ppo": Case(PROMPTS, {**SAMPLING, "ppo_epochs": 2}, make_reward),
    "sft": Case(ANSWERS, EXAMPLES),
    "dpo": Case(PAIRS, EXAMPLES),
    "rm": Case(PAIRS, EXAMPLES),
    "distillation": Case(PROMPTS, {**SAMPLING, "topk_logits_k": 8}),
}


def make_model(folder: Path) -> Path:
    """Build the model and, beside it, a teacher; every case fits into their context."""
    config = ModelBuildConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    build_model(config, folder / "teacher", seed=4)
    return Path(build_model(config, folder / "model", seed=3))


def train(
    name: str,
    model: Path,
    folder: Path,
    *,
    num_steps: int = NUM_STEPS,
    resume: Any = False,
    callbacks: Sequence[rl.Callback] = (),
    pool: rl.KeptWorkers | None = None,
) -> rl.TrainResult:
    """Make the small run of an algorithm, or resume it."""
    case = CASES[name]
    settings = {**COMMON, **case.settings}
    if name == "distillation":
        settings["teacher"] = str(model.with_name("teacher"))
    trainer_class = rl.get_algorithm(name)
    config = trainer_class.from_pretrained(
        model,
        config=algorithm_settings(name),
        max_num_steps=num_steps,
        output_dir=str(folder),
        **settings,
    ).config
    return trainer_class(config, pool=pool).fit(
        case.rows,
        val_dataset=case.rows[:4],
        reward_fn=case.make_reward() if case.make_reward else None,
        resume=resume,
        callbacks=callbacks,
    )


def digest(checkpoint: Path) -> dict[str, str]:
    """Return a digest of every checkpoint file that holds training state."""
    return {
        str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name not in CIRCUMSTANCES
    }


def differences(whole: rl.TrainResult, resumed: rl.TrainResult) -> list[str]:
    """Return the differences of two runs that should be equal."""
    assert whole.checkpoint_path is not None
    assert resumed.checkpoint_path is not None
    expected, found = digest(whole.checkpoint_path), digest(resumed.checkpoint_path)
    names = sorted(set(expected) | set(found))
    wrong = [name for name in names if expected.get(name) != found.get(name)]
    for one, other in zip(_learned(whole), _learned(resumed), strict=True):
        for key in sorted(set(one) | set(other)):
            if one.get(key) != other.get(key):
                wrong.append(
                    f"step {one['step']:g} {key}: {one.get(key)} and {other.get(key)}"
                )
    return wrong


def _learned(result: rl.TrainResult) -> list[dict[str, float]]:
    """Return the history without times and rates."""
    return [
        {k: v for k, v in record.items() if k[:6] in ("step", "train:") or "val:" in k}
        for record in result.history
    ]


class Kill(rl.Callback):
    """Kills the process with SIGKILL some time after a phase has begun."""

    def __init__(
        self, step: int, phase: int, delay_s: float, name: str | None = None
    ) -> None:
        self._step, self._phase, self._delay_s = step, phase, delay_s
        self._name = name
        self._seen = 0

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of a command line for the same kill."""
        name = [] if self._name is None else [self._name]
        return [str(self._step), str(self._phase), str(self._delay_s), *name]

    def on_phase(self, trainer: Any, steps_done: int, phase: str, *where: int) -> None:
        """Start the clock when the moment has come."""
        if steps_done < self._step or self._name not in (None, phase):
            return
        self._seen += 1
        if self._seen == self._phase:
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        time.sleep(self._delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def run_and_kill(name: str, model: Path, folder: Path, where: Kill | None) -> bool:
    """Make the run in a process of its own; return whether it finished."""
    command = [sys.executable, __file__, "--child", name, str(model), str(folder)]
    if where is not None:
        command += where.arguments
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        for other in session_processes(process):
            other.send_signal(signal.SIGKILL)
        process.kill()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{name} failed with {process.returncode}:\n{err}")
    return process.returncode == 0


def result_of(folder: Path) -> rl.TrainResult:
    """Return the output of a finished run.

    A run killed before its first checkpoint starts over in a new folder, `<folder>-2`
    and so on.
    """
    newest = f"checkpoints/step_{NUM_STEPS}"
    (done,) = [
        path
        for path in folder.parent.glob(f"{folder.name}*")
        if (path / newest).is_dir()
    ]
    history = rl.History.read(done / "metrics.jsonl", up_to=NUM_STEPS)
    return rl.TrainResult({}, history, done / newest, done, NUM_STEPS, "")


def draw_kills(name: str, num_kills: int, seed: int, phase: str | None) -> list[Kill]:
    """Draw the moments of the kills, in order."""
    random.seed(f"{seed} {name}")
    # The last steps are spared, so that no run finishes before it is killed.
    steps = sorted(random.choices(range(NUM_STEPS - 4), k=num_kills))
    if phase is not None:
        return [Kill(step, 1, random.uniform(0, 0.05), phase) for step in steps]
    return [Kill(step, random.randint(1, 4), random.uniform(0, 0.1)) for step in steps]


def check(
    name: str, kills: Sequence[Kill], model: Path, folder: Path
) -> dict[str, Any]:
    """Compare an uninterrupted run with one that was killed."""
    began_s = time.monotonic()
    whole, broken = folder / "whole", folder / "broken"
    run_and_kill(name, model, whole, None)
    num_kills = 0
    for where in kills:
        num_kills += not run_and_kill(name, model, broken, where)
    run_and_kill(name, model, broken, None)
    wrong = differences(result_of(whole), result_of(broken))
    return {
        "algorithm": name,
        "kills": num_kills,
        "steps": NUM_STEPS,
        "same": not wrong,
        "differences": wrong[:20],
        "wall_s": round(time.monotonic() - began_s, 1),
    }


def main() -> int:
    """Check the named algorithms."""
    if sys.argv[1:2] == ["--child"]:
        name, model, folder, *where = sys.argv[2:]
        callbacks = []
        if where:
            step, phase, delay_s, *in_phase = where
            callbacks = [Kill(int(step), int(phase), float(delay_s), *in_phase)]
        train(name, Path(model), Path(folder), resume="auto", callbacks=callbacks)
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phase", choices=("validation", "checkpointing"))
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(CASES))
    if unknown:
        parser.error(f"no case for {', '.join(unknown)}; there are {', '.join(CASES)}")
    same = True
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder))
            kills = draw_kills(name, options.kills, options.seed, options.phase)
            line = check(name, kills, model, Path(folder))
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        same = same and line["same"]
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
