"""Kills, signals and full disks in complete runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shlex
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import is_running, kill_session, session_processes
from safetensors.torch import load_file
from small_run import long_grpo, write_recipe

DEADLINE_S = 280.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with its name if it never holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)  # a poll, not the condition


def model_weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "stages" / "grpo" / "checkpoints" / f"step_{step}"
    return load_file(folder / "policy" / "weights" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed_equals_never_killed_bitwise(
    start: Callable[..., subprocess.Popen[str]],
    rl: Callable[..., Any],
    whole_run: Any,
    tmp_path: Path,
) -> None:
    path = write_recipe(tmp_path, long_grpo())
    whole, broken = Path(whole_run.json["run_dir"]), tmp_path / "broken"
    process = start("train", path, f"output_dir={broken}")
    first = broken / "stages" / "grpo" / "checkpoints" / "step_2"
    wait_until(lambda: first.exists() or process.poll() is not None, "step 2")
    # While it lives, its folder belongs to it. It makes no progress meanwhile.
    process.send_signal(signal.SIGSTOP)
    refused = rl("train", path, "--resume", str(broken))
    assert refused.code == 2
    assert f"is held by process {process.pid} on" in refused.err
    kill_session(process)
    process.wait(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    last = broken / "stages" / "grpo" / "checkpoints" / "step_6"
    assert not last.exists()

    done = rl("train", path, "--resume", str(broken))
    assert done.code == 0, done.err
    expected, found = model_weights(whole, 6), model_weights(broken, 6)
    assert set(expected) == set(found)
    different = [n for n in expected if not torch.equal(expected[n], found[n])]
    assert different == []
    # The same holds for everything that the folders record, as the command sees it.
    compared = rl("diff", str(whole), str(broken), "--json")
    assert compared.code == 0, compared.out
    parts = json.loads(compared.out)["parts"]
    same = {part["name"] for part in parts if part["verdict"] == "same"}
    assert {"configuration", "data", "answers", "metrics", "checkpoints"} <= same


def has_loaded(process: subprocess.Popen[str], library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


def has_started(process: subprocess.Popen[str], name: str) -> bool:
    for other in session_processes(process):
        with contextlib.suppress(psutil.Error):
            if name in other.name():
                return True
    return False


def has_checkpoint(out: Path, stage: str) -> bool:
    # Any: the first ones are removed soon.
    return any((out / "stages" / stage / "checkpoints").glob("step_*"))


# When Ctrl-C is pressed, and the stage that has a checkpoint by then.
MOMENTS: dict[str, tuple[Callable[[Path, subprocess.Popen[str]], bool], str]] = {
    "start": (lambda out, process: (out / "run.json").exists(), ""),
    "imports": (lambda out, process: has_loaded(process, "libtorch"), ""),
    "Ray": (lambda out, process: has_started(process, "raylet"), ""),
    "warm-up": (lambda out, process: has_checkpoint(out, "warmup"), "warmup"),
    "GRPO": (lambda out, process: has_checkpoint(out, "grpo"), "grpo"),
}


def train_for_long(
    moment: str, start: Callable[..., subprocess.Popen[str]], folder: Path
) -> subprocess.Popen[str]:
    """Start a run that is still in the moment's stage when it comes."""
    folder.mkdir()
    data = long_grpo(max_num_steps=4000)
    steps = 4 if moment == "GRPO" else 4000
    data["stages"]["warmup"]["sft"]["max_num_steps"] = steps
    path = write_recipe(folder, data)
    return start("train", path, f"output_dir={folder / 'out'}", env=os.environ)


def check_interrupted(moment: str, process: subprocess.Popen[str], out: Path) -> None:
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, f"{moment}: {err}"
    assert "nterrupted" in err, moment
    assert "Traceback" not in err, moment
    stage = MOMENTS[moment][1]
    if stage:
        assert "step_" in err, moment
        assert (out / "stages" / stage / "checkpoints").is_dir()
    wait_until(
        lambda: not any(map(is_running, session_processes(process))),
        f"the last process to end ({moment})",
    )


# Runs of one group run in parallel to save time; their moments come in this order.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "moments", [("start", "imports", "Ray"), ("warm-up", "GRPO")], ids=", ".join
)
def test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process(
    moments: tuple[str, ...],
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    runs = {m: train_for_long(m, start, tmp_path / m) for m in moments}
    for moment, process in runs.items():
        has_come, out = MOMENTS[moment][0], tmp_path / moment / "out"
        wait_until(
            lambda has_come=has_come, process=process, out=out: (  # type: ignore[misc]
                process.poll() is not None or has_come(out, process)
            ),
            moment,
        )
        assert process.poll() is None, f"{moment}: {process.communicate()[1]}"
        process.send_signal(signal.SIGINT)
    for moment, process in runs.items():
        check_interrupted(moment, process, tmp_path / moment / "out")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_closed_terminal_keeps_a_checkpoint(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, long_grpo(max_num_steps=4000))
    out = tmp_path / "out"
    with terminal() as (side, written):
        process = start(
            "train",
            path,
            f"output_dir={out}",
            stdin=side,
            stdout=side,
            stderr=side,
            # The session that it leads gets the terminal, like a shell's.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        wait_until(
            lambda: process.poll() is not None or has_checkpoint(out, "grpo"), "GRPO"
        )
        assert process.poll() is None, b"".join(written).decode()
    assert process.wait(timeout=DEADLINE_S) == 128 + signal.SIGHUP
    stage = out / "stages" / "grpo"
    saved = max(int(p.name.removeprefix("step_")) for p in stage.glob("*/step_*"))
    lines = (stage / "metrics.jsonl").read_text().splitlines()
    # The step that it had reached, which no period selects.
    assert saved == max(json.loads(line).get("step", 0) for line in lines)
    wait_until(
        lambda: not any(map(is_running, session_processes(process))),
        "the last process to end",
    )


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal closed at the end: the program's side, and its output."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []
    closing = threading.Event()

    def show() -> None:
        while not closing.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                shown.append(os.read(ours, 65_536))

    window = threading.Thread(target=show)
    window.start()
    try:
        yield theirs, shown
    finally:
        closing.set()
        window.join(DEADLINE_S)
        os.close(theirs)
        os.close(ours)


def newest_step(out: Path) -> int:
    steps = (out / "stages" / "grpo").glob("checkpoints/step_*")
    return max((int(path.name.removeprefix("step_")) for path in steps), default=0)


def workers_of(process: subprocess.Popen[str], actor: str) -> list[psutil.Process]:
    """Return the processes of a run that hold actors of a class."""
    found = []
    for other in session_processes(process):
        with contextlib.suppress(psutil.Error):
            # The class name is followed by the running method.
            if " ".join(other.cmdline()).split(".")[0].strip() == f"ray::{actor}":
                found.append(other)
    return found


def environment_and_others(
    process: subprocess.Popen[str],
) -> tuple[psutil.Process, list[psutil.Process]]:
    """Distinguish the environment's worker from the policy's."""
    found: dict[bool, list[psutil.Process]] = {True: [], False: []}
    for worker in workers_of(process, "WorkerHost"):
        # A worker's standard error is its log, which begins with its identity.
        log = Path(f"/proc/{worker.pid}/fd/2").read_text(errors="replace")
        found["of group 'environment-" in log].append(worker)
    (environment,) = found[True]
    return environment, found[False]


def goes_on(process: subprocess.Popen[str], out: Path) -> None:
    """Wait for two further checkpoints."""
    enough = newest_step(out) + 4
    wait_until(
        lambda: process.poll() is not None or newest_step(out) >= enough,
        f"step {enough}",
    )
    assert process.poll() is None, process.communicate()[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_workers_of_every_kind_are_replaced(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, long_grpo(max_num_steps=4000))
    out = tmp_path / "out"
    process = start("train", path, f"output_dir={out}")
    goes_on(process, out)
    environment, _ = environment_and_others(process)
    environment.kill()
    goes_on(process, out)
    replaced, others = environment_and_others(process)
    assert replaced.pid != environment.pid
    # Training and sampling processes at the same time.
    for worker in others:
        worker.kill()
    goes_on(process, out)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "resending its rows (1 of 3)" in err
    assert "and are started again (1 of 3 in a row); the run goes back to" in err


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_restarts_nothing_names_the_way_on(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "with a blank"
    folder.mkdir()
    data = long_grpo(max_num_steps=4000)
    data["stages"]["grpo"]["fault_tolerance"] = {"max_restarts": 0}
    path = write_recipe(folder, data)
    out = folder / "out"
    process = start("train", path, f"output_dir={out}")
    goes_on(process, out)
    _, others = environment_and_others(process)
    for worker in others:
        worker.kill()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, err
    assert "fault_tolerance.max_restarts=0 restarts in a row are used up" in err
    command = next(line for line in err.splitlines() if "Continue with: " in line)
    name, *arguments = shlex.split(command.partition("Continue with: ")[2])
    assert [name, *arguments] == ["rl", "train", path, "--resume", str(out)]
    resumed = start(*arguments)
    goes_on(resumed, out)


def test_every_moment_has_its_turn(request: pytest.FixtureRequest) -> None:
    function = request.module.test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process
    (groups,) = [m.args[1] for m in function.pytestmark if m.name == "parametrize"]
    assert [moment for group in groups for moment in group] == list(MOMENTS)
