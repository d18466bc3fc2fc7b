"""`rl ctl`: requests to a run, and the output for its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_distributed.access.key_file import KeyFile
from rl_distributed.runs.control_address import ControlAddress
from rl_distributed.runs.control_config import ControlConfig
from rl_distributed.runs.requests import RunRequest, RunRequests

UPDATE = {"number": 1, "step": 7, "moment": "step_begin", "by": "me", "time": "now",
          "changes": {"policy.optimizer.kwargs.lr": 5e-6},
          "before": {"policy.optimizer.kwargs.lr": 1e-5}}  # fmt: skip


class Reader(threading.Thread):
    """A run between two steps that answers every request."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._requests = RunRequests(folder)
        self._ended = threading.Event()
        self.seen: list[RunRequest] = []
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            for request in self._requests.take():
                self.seen.append(request)
                saves = request.kind in ("checkpoint", "stop")
                kept = {"checkpoint": "checkpoints/step_7"} if saves else {}
                is_update = request.kind == "update"
                request.answer(UPDATE if is_update else {"step": 7, **kept})

    def close(self) -> None:
        self._ended.set()
        self.join()
        self._requests.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "run").mkdir()
    found = Reader(tmp_path / "run")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("action", "out", "err"),
    [
        ("pause", "", "paused, after step 7\n"),
        ("resume", "", "resumed, after step 7\n"),
        ("checkpoint", "checkpoints/step_7\n", "saved, after step 7\n"),
        ("stop", "checkpoints/step_7\n", "stopped, after step 7\n"),
    ],
)
def test_what_is_asked_and_said(
    reader: Reader,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    action: str,
    out: str,
    err: str,
) -> None:
    run = str(tmp_path / "run")
    assert _run(["ctl", action, run, "--by", "alice"], False) == 0
    assert tuple(capsys.readouterr()) == (out, err)
    (request,) = reader.seen
    assert (request.kind, request.body, request.by) == (action, {}, "alice")
    assert _run(["ctl", action, run, "--json"], False) == 0
    assert json.loads(capsys.readouterr().out) == {
        "action": action, "run": run, "step": 7, "checkpoint": out.strip() or None,
    }  # fmt: skip
    assert "@" in reader.seen[1].by


def test_keys_are_typed_as_overrides_are(
    reader: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["lr=5e-6", "grpo.max_num_steps=400", "logger.level=info", "early_stop=null"]
    assert _run(["ctl", "set", str(tmp_path / "run"), *keys], False) == 0
    assert reader.seen[0].body["changes"] == {
        "lr": 5e-6, "grpo.max_num_steps": 400, "logger.level": "info",
        "early_stop": None,
    }  # fmt: skip
    assert tuple(capsys.readouterr()) == (
        "policy.optimizer.kwargs.lr: 1e-05 -> 5e-06\n",
        "from step 8 on\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pause", "gone"], "there is no run in gone"),
        (["pause", "."], "no process carries out the run in . now"),
        (["pause", "run", "--timeout", "0"], "must be a number greater than 0"),
        (["set", "run"], "Missing argument 'KEY=VALUE...'"),
        (["set", "run", "lr"], "has no '='"),
        (["set", "run", "+lr=1"], "got '+lr=1'; give lr=VALUE"),
        (["set", "run", "~lr"], "got '~lr'; give lr=VALUE"),
        (["set", "run", "lr=1", "lr=2"], "lr is given twice"),
    ],
)
def test_wrong_input(
    reader: Reader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(["ctl", *arguments], False) == 2
    assert message in capsys.readouterr().err
    assert reader.seen == []


def test_a_run_that_does_not_answer_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunRequests(tmp_path):
        assert _run(["ctl", "stop", str(tmp_path), "--timeout", "0.05"], False) == 1
    said = capsys.readouterr().err
    assert "the run did not answer within 0.05 s (it was taken back" in said
    assert "--timeout SECONDS" in said


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFile:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("RL_KEYS_FILE", raising=False)
    return KeyFile(tmp_path / "config" / "rl" / "keys.json")


@pytest.fixture
def address(reader: Reader, tmp_path: Path, keys: KeyFile) -> Iterator[str]:
    keys.create("admin", "admin")
    status = {"state": "running", "step": 7, "total_steps": 9, "metrics": {"loss": 0.5}}
    found = ControlAddress(tmp_path / "run", ControlConfig(), lambda: status)
    yield found.url
    found.close()


def test_a_run_is_asked_at_its_address(
    reader: Reader,
    address: str,
    keys: KeyFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored, key = keys.create("olga", "operator")
    monkeypatch.setenv("RL_KEY", key)
    assert _run(["ctl", "checkpoint", address], False) == 0
    said = tuple(capsys.readouterr())
    assert said == ("checkpoints/step_7\n", "saved, after step 7\n")
    assert _run(["ctl", "set", address, "lr=5e-6"], False) == 0
    assert "1e-05 -> 5e-06" in capsys.readouterr().out
    assert _run(["ctl", "status", address], False) == 0
    assert capsys.readouterr().out == "running, step 7 of 9\nloss: 0.5\n"
    assert {request.by for request in reader.seen} == {f"olga (key {stored.id})"}
    assert _run(["ctl", "pause", address, "--by", "somebody else"], False) == 2
    keys.revoke("olga")
    assert _run(["ctl", "pause", address], False) == 2
    assert "The key was revoked" in capsys.readouterr().err
    assert len(reader.seen) == 2


def test_the_status_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "stages" / "second").mkdir(parents=True)
    (run / "stages" / "first").mkdir()
    (run / "run.json").write_text('{"config": {"stages": {"first": {}, "second": {}}}}')
    assert _run(["ctl", "status", str(run), "--json"], False) == 0
    nothing = {"step": 0, "total_steps": None, "metrics": {}}
    assert nothing.items() <= json.loads(capsys.readouterr().out).items()
    metrics = run / "stages" / "second" / "metrics.jsonl"
    lines = [
        {
            "hyperparams": {
                "policy": {"max_num_steps": "x"},
                "sft": {"max_num_steps": 9},
            }
        },
        {
            "step": 1,
            "time": 1.0,
            "metrics": {"train/loss": 2.0, "validation/accuracy": 0.25},
        },
        {"step": 2, "time": 2.0, "metrics": {"train/loss": 0.5}},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _run(["ctl", "status", str(run)], False) == 0
    state, *shown = capsys.readouterr().out.splitlines()
    assert state.endswith(", step 2 of 9")
    assert shown == ["train:loss: 0.5", "val:accuracy: 0.25"]
    # As changed by `rl ctl set`.
    update = {"number": 1, "changes": {"sft.max_num_steps": 12}}
    (metrics.parent / "updates.jsonl").write_text(json.dumps(update) + "\n")
    assert _run(["ctl", "status", str(run)], False) == 0
    assert ", step 2 of 12\n" in capsys.readouterr().out
    assert _run(["ctl", "status", str(tmp_path)], False) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://10.0.0.1:9500", "k", "would send the key in the clear"),
        ("http://127.0.0.1:1", "", "set RL_KEY"),
        ("http://127.0.0.1:1", "k\n", "set RL_KEY"),
        ("http://127.0.0.1:1", "k", "no run or server of rl answers"),
        ("http://127.0.0.1:99999", "k", "is not an address"),
        ("https://", "k", "must be like https://HOST:PORT"),
    ],
)
def test_wrong_addresses(
    url: str,
    key: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RL_KEY", key)
    assert _run(["ctl", "pause", url], False) == 2
    assert message in capsys.readouterr().err


def test_an_admin_makes_keys_at_an_address(
    address: str,
    keys: KeyFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RL_KEY", keys.create("root", "admin")[1])
    made = ["--name", "bob", "--role", "user", "--expires", "1d", "--url", address]
    assert _run(["keys", "create", *made, "--json"], False) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["key"].startswith(f"rlk_{found['id']}_")
    assert _run(["keys", "list", "--url", address, "--json"], False) == 0
    assert [k["name"] for k in json.loads(capsys.readouterr().out)] == [
        "admin", "root", "bob",
    ]  # fmt: skip
    assert _run(["keys", "revoke", "bob", "--url", address], False) == 0
    assert [k.state() for k in keys.read()] == ["valid", "valid", "revoked"]
