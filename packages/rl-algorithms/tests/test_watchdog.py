"""Hanging runs: what is reported and saved, and how they end."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

import rl_algorithms as rl
from rl_algorithms.errors import StalledError
from rl_algorithms.trainers.run.signals import Interrupted, SignalGuard
from rl_distributed.process.stall_watch import StallWatch

ROWS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
GRPO = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 2,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 8,
    "lr": 3e-3,
    "max_num_steps": 5,
    "save_period": 100,
    "val_period": 0,
    "fault_tolerance.stall_limit_s": 3.0,
}
DEADLINE_S = 120.0


def length(prompt, response):
    return 0.1 * len(response)


class WaitsForEver(rl.Callback):
    """Blocks in the third step, like a callback waiting for a service."""

    def __init__(self, moment):
        self.moment = moment

    def on_phase(self, trainer, steps_done, phase, step, total):
        if (step, phase) == (3, self.moment):
            threading.Event().wait(DEADLINE_S)


def stall(model, folder, pool, *callbacks, reward_fn=length, **settings):
    settings = {**GRPO, "output_dir": str(folder), **settings}
    made = rl.get_algorithm("grpo").from_pretrained(model, **settings)
    trainer = type(made)(made.config, pool=pool)
    with pytest.raises(StalledError) as caught:
        trainer.fit(ROWS, reward_fn=reward_fn, callbacks=callbacks)
    return str(caught.value), (folder / "stall.txt").read_text()


@pytest.mark.timeout(DEADLINE_S)
def test_a_callback_that_blocks_between_steps_costs_no_step(
    tiny_model, tmp_path, pool, caplog
):
    folder = tmp_path / "run"
    message, report = stall(tiny_model, folder, pool, WaitsForEver("generation"))
    assert "made no progress for 3 s (fault_tolerance.stall_limit_s)" in message
    assert "in step 3: generation" in message
    assert f"checkpoint: the newest is {folder / 'checkpoints' / 'step_2'}" in message
    assert (folder / "checkpoints" / "step_2" / "policy" / "weights").is_dir()
    # Once, and identical in log and file.
    logged = [r.getMessage() for r in caplog.records if "Who waits" in r.getMessage()]
    assert logged == [report]
    assert "in on_phase" in report.partition("Stacks of the workers")[0]
    for group in ("policy", "generation"):
        assert re.search(
            rf"worker 0 of group '{group}' \(node \S+, pid \d+\): waits for a call",
            report,
        )


@pytest.mark.timeout(DEADLINE_S)
def test_half_changed_weights_are_not_saved(tiny_model, tmp_path, pool):
    folder = tmp_path / "run"
    # In a protected phase, where a first signal is only recorded.
    message, _ = stall(tiny_model, folder, pool, WaitsForEver("policy_training"))
    assert "no checkpoint was made, because the weights were being changed" in message
    assert not list(folder.glob("checkpoints/step_*"))


@pytest.mark.timeout(DEADLINE_S)
def test_an_environment_that_blocks_is_shown_with_its_stack(tiny_model, tmp_path, pool):
    driver = os.getpid()

    def judge_that_waits(prompt, response):
        if os.getpid() != driver:  # where it is tried before the run
            threading.Event().wait(DEADLINE_S)
        return 0.0

    message, report = stall(
        tiny_model, tmp_path / "run", pool, reward_fn=judge_that_waits
    )
    assert "in step 1: generation" in message
    workers = report.partition("Stacks of the workers")[2]
    assert "in judge_that_waits" in workers
    assert re.search(r"group 'environment\S*' .* in method '\w+' for \d", report)
    (deadline,) = re.findall(
        r"'step'.*: whoever waits for it gives up in (\d+) s", report
    )
    assert 0 < int(deadline) < 3_600


class StopsWorker(rl.Callback):
    """Suspends the training worker's process with SIGSTOP in the third step."""

    def on_phase(self, trainer, steps_done, phase, step, total):
        if (step, phase) == (3, "policy_training"):
            (worker,) = trainer.components.policy.group.health()
            self.process = psutil.Process(worker.pid)
            self.process.suspend()


@pytest.mark.timeout(DEADLINE_S)
def test_a_stopped_worker_is_named_and_leaves_with_the_run(
    tiny_model, tmp_path, ray_cluster
):
    stops = StopsWorker()
    message, report = stall(tiny_model, tmp_path / "run", None, stops)
    assert "in step 3: policy training" in message
    assert "no checkpoint was made" in message
    doing = r"group 'policy' .*: no sign of life for \d.*; its process is stopped"
    assert re.search(doing, report)
    assert re.search(r"'train'.*: whoever waits for it gives up in \d+ s", report)
    assert "it gives no answer" in report
    with contextlib.suppress(psutil.TimeoutExpired):
        stops.process.wait(10.0)
    assert not stops.process.is_running()


@pytest.mark.timeout(DEADLINE_S)
def test_an_asynchronous_run_says_what_its_schedule_waits_for(
    tiny_model, tmp_path, pool
):
    driver = os.getpid()

    def never(prompt, response):
        if os.getpid() != driver:  # where it is tried before the run
            threading.Event().wait(DEADLINE_S)
        return 0.0

    _, report = stall(
        tiny_model,
        tmp_path / "run",
        pool,
        reward_fn=never,
        **{"grpo.asynchronous": {"max_staleness": 0}},
    )
    assert re.search(r"schedule: .*prompt 0 has 2 scoring", report)
    assert "thread ahead-controller" in report


def test_progress_and_a_stopped_process_are_no_stall():
    stalled = threading.Event()
    watch = StallWatch(0.4, stalled.set)
    try:
        for _ in range(30):
            watch.note()
            assert not stalled.wait(0.05)
        assert stalled.wait(DEADLINE_S)
    finally:
        watch.close()


KILLED = """
    import ctypes, sys
    from pathlib import Path
    from rl_algorithms.trainers.run.signals import SignalGuard
    from rl_algorithms.trainers.run.watchdog import RunView, Watchdog

    folder = Path(sys.argv[1])
    view = RunView(lambda: "in step 7: policy training", list, lambda: folder)
    with SignalGuard() as signals, Watchdog(0.5, signals, view) as watchdog:
        watchdog.begin()
        libc = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # a deadlock that no signal ends
"""


@pytest.mark.timeout(DEADLINE_S)
def test_native_code_that_never_returns_is_killed(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(textwrap.dedent(KILLED))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "the process is killed" in done.stderr
    report = (tmp_path / "stall.txt").read_text()
    assert "in step 7: policy training" in report
    assert "pthread_mutex_lock(mutex)" in report
    ending = (tmp_path / ".run.ended").read_text()
    assert '"state": "failed"' in ending
    assert "StalledError" in ending


@pytest.mark.parametrize("held", [False, True])
def test_a_signal_of_the_watchdog_ends_a_protected_phase(held):
    with SignalGuard() as signals:
        if held:
            signals.hold()
        with pytest.raises(Interrupted):
            signals.interrupt(at_once=True)
        assert signals.held == held
        signals.acknowledge()
        signals.check()
