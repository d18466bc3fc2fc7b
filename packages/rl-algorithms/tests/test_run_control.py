"""Pause, resume, checkpoint and stop requests from other processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from rl_algorithms import Interrupted, control_run, update_run
from rl_distributed.access.client import ListenerClient
from rl_distributed.access.key_file import KeyFile, default_key_file
from rl_distributed.errors import ConfigError, DeadlineExceededError, SecurityError
from rl_distributed.runs.control_address import ADDRESS
from rl_distributed.runs.ending import note_pause, run_state
from rl_distributed.runs.requests import send_request
from rl_distributed.security.audit import disable_audit, enable_audit

HERE = Path(__file__).parent
DEADLINE_S = 120.0


def _load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


_load("toy_trainer")
live = _load("live_toy")


def fit(trainer, *callbacks, **arguments):
    return trainer.fit(live.ROWS, callbacks=callbacks, progress=False, **arguments)


class Asker(threading.Thread):
    """Sends requests in its own thread; `result` raises what it raised."""

    def __init__(self, ask):
        super().__init__(daemon=True)
        self._ask, self._answer, self._error = ask, None, None

    def run(self):
        try:
            self._answer = self._ask()
        except BaseException as error:
            self._error = error

    def result(self):
        self.join(DEADLINE_S)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._answer


def asked(run, ask, step=2, hook="on_step_end"):
    """Return the requester, and the callback that waits until its request arrives."""
    asker = Asker(ask)

    def start(trainer):
        asker.start()
        pause = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if any((run / "requests").glob("*.request.json")):
                return
            pause.wait(0.01)
        raise AssertionError("no request came")

    return asker, live.At(step, start, hook)


def ask(run, action, **arguments):
    return control_run(run, action, deadline_s=DEADLINE_S, **arguments)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def audited(tmp_path):
    log = tmp_path / "audit.jsonl"
    enable_audit(log)
    yield lambda: [json.loads(line) for line in log.open()]
    disable_audit()


@pytest.mark.parametrize("hook", ["on_step_end", "on_step_begin"])
def test_a_checkpoint(run, audited, hook):
    asker, callback = asked(run, lambda: ask(run, "checkpoint", by="alice"), 2, hook)
    assert fit(live.make(run), callback).steps == 40
    answer = asker.result()
    assert answer.step == 2
    assert answer.checkpoint == run / "checkpoints" / "step_2"
    (entry,) = [e for e in audited() if e["action"] == "run.checkpoint"]
    assert (entry["outcome"], entry["by"], entry["step"]) == ("ok", "alice", 2)
    # The time of a checkpoint counts only in its own step.
    lines = map(json.loads, (run / "metrics.jsonl").open())
    steps = [
        line["step"]
        for line in lines
        if "timing:checkpointing" in line.get("metrics", {})
    ]
    assert steps == [2, *range(4, 41, 4)]


def test_a_checkpoint_that_is_there_already(run):
    asker, callback = asked(run, lambda: ask(run, "checkpoint"), 4)
    fit(live.make(run), callback)
    assert asker.result().checkpoint == run / "checkpoints" / "step_4"


def test_a_run_without_checkpoints_refuses_one(run):
    asker, callback = asked(run, lambda: ask(run, "checkpoint"))
    fit(live.make(run, checkpointing={"enabled": False}), callback)
    with pytest.raises(ConfigError, match=r"started with checkpointing\.enabled=false"):
        asker.result()


def test_a_checkpoint_that_fails_does_not_end_the_run(run):
    asker, callback = asked(run, lambda: ask(run, "checkpoint"))
    policy = live.LivePolicy()
    save, calls = policy.save_checkpoint, []

    def fail_first(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no space left")
        return save(*arguments, **options)

    policy.save_checkpoint = fail_first
    assert fit(live.make(run, policy), callback).steps == 40
    with pytest.raises(ConfigError, match="no space left"):
        asker.result()


@pytest.mark.parametrize("hook", ["on_step_end", "on_step_begin"])
def test_a_paused_run_answers_and_goes_on_as_it_was(run, audited, hook):
    def talk():
        assert ask(run, "pause", by="alice").step == 2
        with pytest.raises(ConfigError, match="paused already, by alice"):
            ask(run, "pause")
        assert ask(run, "checkpoint").checkpoint.name == "step_2"
        update = update_run(run, {"lr": 2e-5}, deadline_s=DEADLINE_S)
        assert (update.step, update.moment) == (2, "step_begin")
        with pytest.raises(ConfigError, match="seed cannot change"):
            update_run(run, {"seed": 1}, deadline_s=DEADLINE_S)
        with pytest.raises(ConfigError, match="accepts update, pause, resume"):
            send_request(run, "dance", {}, deadline_s=DEADLINE_S)
        assert ask(run, "resume").step == 2

    policy = live.LivePolicy()
    asker, callback = asked(run, talk, 2, hook)
    assert fit(live.make(run, policy), callback).steps == 40
    asker.result()
    assert policy.rates == [1e-5] * 2 + [2e-5] * 38
    outcomes = [(e["action"], e["outcome"]) for e in audited()]
    assert [o for o in outcomes if "checkpoint." not in o[0]] == [
        ("run.pause", "ok"),
        ("run.pause", "refused"),
        ("run.checkpoint", "ok"),
        ("run.update", "ok"),
        ("run.update", "refused"),
        ("run.resume", "ok"),
    ]


def test_only_a_paused_run_can_be_resumed(run):
    asker, callback = asked(run, lambda: ask(run, "resume"))
    fit(live.make(run), callback)
    with pytest.raises(ConfigError, match="the run is not paused"):
        asker.result()


def test_a_pause_that_comes_too_late(run):
    asker, callback = asked(run, lambda: ask(run, "pause"), 40)
    assert fit(live.make(run), callback).steps == 40
    with pytest.raises(ConfigError, match="the run ended before it served the request"):
        asker.result()


@pytest.mark.parametrize("hook", ["on_step_end", "on_step_begin"])
@pytest.mark.parametrize("paused", [False, True])
def test_a_stopped_run_is_saved_and_can_go_on(run, audited, hook, paused):
    def stop():
        if paused:
            ask(run, "pause")
        return ask(run, "stop", by="alice")

    asker, callback = asked(run, stop, 2, hook)
    result = fit(live.make(run), callback)
    answer = asker.result()
    assert (answer.step, answer.checkpoint) == (2, run / "checkpoints" / "step_2")
    assert (result.steps, result.stopped_by) == (2, "alice")
    assert result.stop_reason == "stopped by alice"
    record = json.loads((run / "result.json").read_text())
    assert record["stopped_by"] == "alice"
    assert ("run.stop", "ok") in [(e["action"], e["outcome"]) for e in audited()]
    result = fit(live.make(run), resume="auto")
    assert (result.steps, result.stopped_by) == (40, None)


def test_a_signal_ends_a_pause(run):
    def interrupt():
        assert ask(run, "pause").step == 2
        os.kill(os.getpid(), signal.SIGTERM)

    asker, callback = asked(run, interrupt)
    with pytest.raises(Interrupted) as error:
        fit(live.make(run), callback)
    asker.result()
    assert error.value.checkpoint_path == run / "checkpoints" / "step_2"


def test_a_paused_run_is_saved_in_time(run):
    def pause():
        ask(run, "pause")
        changes = {"checkpoint_must_save_by": "00:00:00:00"}
        update_run(run, changes, deadline_s=DEADLINE_S)
        # The run saves before it checks again.
        with pytest.raises(ConfigError, match="paused already"):
            ask(run, "pause")
        saved = (run / "checkpoints" / "step_2").is_dir()
        ask(run, "resume")
        return saved

    asker, callback = asked(run, pause)
    fit(live.make(run), callback)
    assert asker.result()


def test_a_deadline_that_passes(run):
    def late(trainer):
        # The run is inside this very hook and cannot answer.
        with pytest.raises(DeadlineExceededError, match="taken back"):
            control_run(run, "stop", deadline_s=0.05)

    assert fit(live.make(run), live.At(2, late)).steps == 40


def test_no_run_and_one_that_has_ended(run):
    with pytest.raises(ConfigError, match="there is no run in"):
        control_run(run, "pause")
    fit(live.make(run, toy={"max_num_steps": 2}))
    with pytest.raises(ConfigError, match="no process carries out the run"):
        control_run(run, "pause")


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("RL_KEY", "RL_CA_FILE", "RL_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    return KeyFile(default_key_file())


@pytest.mark.parametrize("tls", [False, True])
def test_a_run_is_controlled_at_its_address_by_keys(run, audited, keys, tls):
    operator = keys.create("olga", "operator")[1]
    viewer = keys.create("victor", "viewer")[1]

    def talk():
        url = json.loads((run / ADDRESS).read_text())["url"]
        assert url.startswith("https://127." if tls else "http://127.")
        olga = ListenerClient(url, key=operator)
        post = {"deadline_s": DEADLINE_S}
        assert olga.ask("POST", "/rl/run/pause", post)["step"] == 2
        assert run_state(run) == "paused"
        found = ListenerClient(url, key=viewer).ask("GET", "/rl/run")
        assert (found["state"], found["step"], found["total_steps"]) == (
            "paused",
            2,
            40,
        )
        for action in ("pause", "resume", "checkpoint", "stop", "update"):
            with pytest.raises(SecurityError, match="'operate', which the role viewer"):
                ListenerClient(url, key=viewer).ask("POST", f"/rl/run/{action}", post)
        with pytest.raises(ConfigError, match="paused already, by olga"):
            olga.ask("POST", "/rl/run/pause", post)
        with pytest.raises(ConfigError, match="seed cannot change"):
            olga.ask("POST", "/rl/run/update", {**post, "changes": {"seed": 1}})
        changes = {**post, "changes": {"lr": 2e-5}}
        assert olga.ask("POST", "/rl/run/update", changes)["step"] == 2
        kept = olga.ask("POST", "/rl/run/checkpoint", post)["checkpoint"]
        assert kept.endswith("step_2")
        assert olga.ask("POST", "/rl/run/resume", post)["step"] == 2
        # Within the answer: the run may end afterwards.
        stopped = olga.ask("POST", "/rl/run/stop", post)
        assert stopped["step"] >= 2

    policy = live.LivePolicy()
    asker = Asker(talk)

    def start(trainer):
        asker.start()
        pause = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if any((run / "requests").glob("*.request.json")):
                return
            assert asker.is_alive() or asker.result()
            pause.wait(0.01)

    control = {"tls": tls}
    fit(live.make(run, policy, control=control), live.At(2, start))
    asker.result()
    assert policy.rates[2] == 2e-5
    assert not (run / ADDRESS).exists()
    assert not [t for t in threading.enumerate() if t.name == "http run"]
    done = [(e["action"], e["outcome"], e.get("by", e.get("key"))) for e in audited()]
    olga, victor = (f"{k.name} (key {k.id})" for k in keys.read())
    told = [entry for entry in done if entry[0].startswith(("run.", "access."))]
    refused = ("access.refused", "refused", " ".join(victor[:-1].split(" (key ")[::-1]))
    assert told == [
        ("run.pause", "ok", olga),
        *[refused] * 5,
        ("run.pause", "refused", olga),
        ("run.update", "refused", olga),
        ("run.update", "ok", olga),
        ("run.checkpoint", "ok", olga),
        ("run.resume", "ok", olga),
        ("run.stop", "ok", olga),
    ]


def test_an_address_needs_a_file_of_keys(run, keys):
    with pytest.raises(SecurityError, match="rl keys create"):
        fit(live.make(run, control={}))
    assert not (run / ADDRESS).exists()


def test_an_address_for_others_needs_tls(run):
    with pytest.raises(ConfigError, match=r"tls must be set.*got host '0\.0\.0\.0'"):
        live.make(run, control={"host": "0.0.0.0"})


def test_a_pause_that_a_killed_process_left_is_forgotten(run):
    run.mkdir()
    note_pause(run, "somebody")
    states = []
    fit(live.make(run), live.At(2, lambda trainer: states.append(run_state(run))))
    assert states == ["running"]
