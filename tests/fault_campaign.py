"""Random faults in whole runs: any process, at any moment, killed, stopped or slowed.

    python -m tests.fault_campaign --faults 200 --seed 1

```
round: a run (synchronous or asynchronous) in a session of its own
       -> up to three faults, at random moments: one of its processes, one action
       -> its end: all steps, or an error that names the cause and the way on
       -> the way on (`rl train --resume`), until all steps are done
```
What must hold, whatever happens:

- The run ends by itself before its deadline, and no process and no shared memory of it
  is left.
- A synchronous run ends with bitwise the weights of a run that nothing happened to.
- An error says what is lost, and the command it names finishes the run.

The seed decides which faults come when; what they hit depends on the machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).parent))

from processes import is_running, kill_session, session_processes
from small_run import recipe, write_recipe

NUM_STEPS = 24
DEADLINE_S = 420.0
# Ray's agents look for its head for a minute before they end.
END_S = 120.0
SHARED_MEMORY = Path("/dev/shm")
WORKERS = ("policy", "generation", "environment")
# The driver and Ray's own processes more rarely: they end the run.
ROLES = (*WORKERS * 3, "driver", "raylet", "gcs_server")
CAUSES = {
    "policy": r"group 'policy'",
    "generation": r"generation",
    "environment": r"environment",
    "raylet": r"the Ray cluster is lost: .*raylet",
    "gcs_server": r"the Ray cluster is lost: .*gcs_server",
}
LONGEST_STOP_S = 5.0


class CampaignError(Exception):
    """One of the things that must hold does not."""


@dataclass
class Fault:
    """What was done to a process of a run."""

    role: str
    action: str
    at_step: int
    at: float
    """`time.monotonic()`."""

    def __str__(self) -> str:
        return f"{self.action} {self.role} at step {self.at_step}"


@dataclass
class Results:
    """What the faults of a campaign led to."""

    counts: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)
    """From the kill of a training worker to the end of the next step."""
    failures: list[str] = field(default_factory=list)
    """The rounds in which something did not hold, and their consoles."""

    @property
    def num_faults(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith("fault: "))


class Run:
    """A command of `rl`, in a session of its own."""

    def __init__(self, arguments: list[str], folder: Path, out: Path) -> None:
        self.out = out
        self._console = folder / "console"
        with self._console.open("w") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_cli", *arguments],
                stdout=console,
                stderr=console,
                cwd=folder,
                start_new_session=True,
                text=True,
            )

    @property
    def console(self) -> str:
        return self._console.read_text()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        """The last step that its metrics name; -1 before there are any."""
        path = self.out / "stages" / "grpo" / "metrics.jsonl"
        last = -1
        with suppress(FileNotFoundError):
            for line in path.read_text().splitlines():
                # The last line may be half written.
                with suppress(ValueError):
                    last = json.loads(line).get("step", last)
        return last

    def processes(self, role: str) -> list[psutil.Process]:
        """Its processes of a role."""
        return [p for p in session_processes(self.process) if self._role(p) == role]

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "driver"
        with suppress(psutil.Error, OSError):
            if process.name() in ("raylet", "gcs_server"):
                return process.name()
            if " ".join(process.cmdline()).startswith("ray::WorkerHost"):
                # A worker's standard error is its log, which begins with its identity.
                log = Path(f"/proc/{process.pid}/fd/2").read_text(errors="replace")
                found = re.search(r"of group '(\w+)", log)
                return found[1] if found else ""
        return ""


def new_recipe(kind: str, folder: Path) -> str:
    """Write the recipe of a run of one kind; return its path."""
    data = recipe()
    del data["stages"]["warmup"]
    stage = data["stages"]["grpo"]
    stage["grpo"] |= {"max_num_steps": NUM_STEPS, "max_num_epochs": None}
    stage["checkpointing"] = {"save_period": 4, "keep_latest_k": 2}
    if kind == "asynchronous":
        stage["grpo"]["asynchronous"] = {"max_staleness": 1}
        stage["loss_fn"] = {"use_importance_sampling_correction": True}
    return write_recipe(folder, data)


def faults_of(run: Run, chance: random.Random, wanted: int) -> Iterator[Fault]:
    """Do bad things to a run, and yield each, until it ends."""
    pause = threading.Event()
    for _ in range(wanted):
        at_step = run.step + chance.randint(0, 6)
        while run.step < min(at_step, NUM_STEPS - 2) and not run.is_over:
            pause.wait(0.02)
        # Anywhere in a step.
        pause.wait(chance.uniform(0.0, 0.5))
        role = chance.choice(ROLES)
        victims = run.processes(role)
        if run.is_over or not victims:
            continue
        victim = chance.choice(victims)
        actions = ["kill", "pause", "slow"]
        if role == "generation":
            # Noticed after 6 s; others are given two minutes.
            actions.append("stop")
        fault = Fault(role, chance.choice(actions), run.step, time.monotonic())
        act(victim, fault.action, chance.uniform(0.1, LONGEST_STOP_S))
        yield fault


def act(victim: psutil.Process, action: str, long_s: float) -> None:
    """Kill, stop or slow a process."""
    pause = threading.Event()
    with suppress(psutil.Error):
        if action == "kill":
            victim.kill()
        elif action == "stop":
            victim.suspend()
        elif action == "pause":
            victim.suspend()
            pause.wait(long_s)
            victim.resume()
        else:
            end = time.monotonic() + long_s
            while time.monotonic() < end:
                victim.suspend()
                pause.wait(0.08)
                victim.resume()
                pause.wait(0.02)


def await_end(run: Run, seen: list[Fault], results: Results) -> None:
    """Wait until a run ends; note how soon steps follow a training worker's death."""
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not run.is_over:
        if time.monotonic() > end:
            raise CampaignError(f"did not end within {DEADLINE_S:g} s")
        if seen and seen[-1].role == "policy" and seen[-1].action == "kill":
            note_recovery(run, seen[-1], results)
        pause.wait(0.05)
    left_until = time.monotonic() + END_S
    while left := [p for p in session_processes(run.process) if is_running(p)]:
        if time.monotonic() > left_until:
            raise CampaignError(f"left processes: {left}")
        pause.wait(0.1)


def note_recovery(run: Run, fault: Fault, results: Results) -> None:
    """Note the time from a fault to the next step, once."""
    if run.step > fault.at_step and fault.at:
        results.recoveries_s.append(time.monotonic() - fault.at)
        fault.at = 0.0


def way_on(run: Run, faults: list[Fault]) -> list[str]:
    """Return the command that continues a run; check that its error says enough."""
    if any(f.role == "driver" and f.action == "kill" for f in faults):
        return []
    roles = {fault.role for fault in faults}
    if not any(re.search(CAUSES[r], run.console) for r in roles if r in CAUSES):
        raise CampaignError("its error does not name the cause")
    lines = run.console.splitlines()
    command = next((line for line in lines if "Continue with: " in line), None)
    if command is None:
        raise CampaignError("its error does not name the way on")
    return shlex.split(command.partition("Continue with: ")[2])[1:]


def check_weights(run: Run, expected: dict[str, Any]) -> None:
    """Check that the last checkpoint has bitwise the expected weights."""
    found = final_weights(run.out)
    names = [
        name
        for name in sorted(set(expected) | set(found))
        if name not in found
        or name not in expected
        or expected[name].tobytes() != found[name].tobytes()
    ]
    if names:
        raise CampaignError(f"other weights than undisturbed: {', '.join(names)}")


def final_weights(out: Path) -> dict[str, Any]:
    """Return the weights of the last checkpoint."""
    folder = out / "stages" / "grpo" / "checkpoints" / f"step_{NUM_STEPS}"
    weights: dict[str, Any] = load_file(
        folder / "policy" / "weights" / "model.safetensors"
    )
    return weights


def shared_memory() -> set[str]:
    """Return the names of shared memory that is there now."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _is_in_use(name: str) -> bool:
    """Return whether a link belongs to a process that runs, so to another program."""
    kind, _, owner = name.partition("transfer-")
    return kind == "rl-" and psutil.pid_exists(int(owner.split("-")[1]))


def check_shared_memory(before: set[str]) -> None:
    """Check that no shared memory is left that was not there before."""
    pause = threading.Event()
    # That of other programs comes and goes.
    left_until = time.monotonic() + END_S
    while left := {name for name in shared_memory() - before if not _is_in_use(name)}:
        if time.monotonic() > left_until:
            raise CampaignError(f"left shared memory: {sorted(left)}")
        pause.wait(0.5)


def undisturbed(folder: Path) -> dict[str, Any]:
    """Return the final weights of a synchronous run that nothing happens to."""
    folder.mkdir()
    path = new_recipe("synchronous", folder)
    run = Run(["train", path, f"output_dir={folder / 'out'}"], folder, folder / "out")
    await_end(run, [], Results())
    if run.process.returncode:
        raise CampaignError(f"the undisturbed run failed:\n{run.console}")
    return final_weights(folder / "out")


def play(
    folder: Path,
    chance: random.Random,
    kind: str,
    expected: dict[str, Any],
    results: Results,
) -> None:
    """One round: a run of a kind, its faults, and what must hold after them."""
    folder.mkdir()
    before = shared_memory()
    path, out = new_recipe(kind, folder), folder / "out"
    start = ["train", path, f"output_dir={out}"]
    arguments = start
    seen: list[Fault] = []
    wanted = chance.randint(1, 3)
    run: Run | None = None
    try:
        while arguments:
            run = Run(arguments, folder, out)
            now: list[Fault] = []
            for fault in faults_of(run, chance, wanted - len(seen)):
                now.append(fault)
                seen.append(fault)
                results.counts[f"fault: {fault.action} {fault.role}"] += 1
            await_end(run, now, results)
            if run.process.returncode == 0:
                break
            if not now:
                raise CampaignError(f"failed by itself ({run.process.returncode})")
            results.counts["ended early, and was resumed"] += 1
            # A driver that is killed says nothing, and may have begun nothing.
            has_begun = (out / "run.json").exists()
            resume = ["train", path, "--resume", str(out)]
            arguments = way_on(run, now) or (resume if has_begun else start)
        assert run is not None
        if run.step != NUM_STEPS:
            raise CampaignError(f"ended at step {run.step} of {NUM_STEPS}")
        if kind == "synchronous":
            check_weights(run, expected)
        check_shared_memory(before)
    except CampaignError as error:
        story = "; ".join(map(str, seen)) or "no fault"
        console = run.console if run is not None else ""
        raise CampaignError(f"{kind} run, {story}: {error}\n{console}") from None
    finally:
        if run is not None:
            kill_session(run.process)
    results.counts[f"round: {kind}"] += 1


def campaign(num_faults: int, seed: int, minutes: float) -> Results:
    """Play rounds until there were that many faults, or the time is over."""
    chance = random.Random(seed)
    results = Results()
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="rl-faults-") as base:
        expected = undisturbed(Path(base) / "undisturbed")
        number = 0
        while results.num_faults < num_faults and time.monotonic() < end:
            kind = ("synchronous", "asynchronous")[number % 2]
            try:
                play(Path(base) / f"round-{number}", chance, kind, expected, results)
            except CampaignError as error:
                # The other rounds may find something else.
                results.failures.append(str(error))
                sys.stderr.write(f"round {number + 1}: {error}\n")
            number += 1
            sys.stderr.write(f"round {number}: {results.num_faults} faults so far\n")
    return results


def main() -> None:
    """Run a campaign and print what its faults led to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # A pipe that is closed by a reader must not end a run.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    results = campaign(options.faults, options.seed, options.minutes)
    for name, count in sorted(results.counts.items()):
        sys.stdout.write(f"{count:5d}  {name}\n")
    if found := sorted(results.recoveries_s):
        sys.stdout.write(
            f"a training worker's death to the next step: median "
            f"{statistics.median(found):.1f} s, longest {found[-1]:.1f} s "
            f"({len(found)} times)\n"
        )
    if results.failures:
        sys.exit(f"{len(results.failures)} rounds failed")


if __name__ == "__main__":
    main()
