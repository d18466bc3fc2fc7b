"""Requests to a run from other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from rl_distributed.errors import ConfigError, DeadlineExceededError, LockHeldError
from rl_distributed.failures.lock_owner import LockOwner
from rl_distributed.runs.folder import own_run_folder
from rl_distributed.runs.requests import REQUESTS, RunRequests, send_request

DEADLINE_S = 60.0


class Sender(threading.Thread):
    """Sends one request and keeps its result."""

    def __init__(self, folder, body, by=None, deadline_s=DEADLINE_S):
        super().__init__(daemon=True)
        self._ask = lambda: send_request(
            folder, "update", body, by=by, deadline_s=deadline_s
        )
        self.answer = self.error = None
        self.start()

    def run(self):
        try:
            self.answer = self._ask()
        except Exception as error:
            self.error = error


def take(requests, count=1):
    found = []
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        found += requests.take()
        if len(found) >= count:
            return found
        pause.wait(0.01)
    raise AssertionError(f"{len(found)} requests came")


def test_an_answer_and_a_refusal(tmp_path):
    with RunRequests(tmp_path) as requests:
        sender = Sender(tmp_path, {"a": 1}, by="alice")
        (request,) = take(requests)
        assert (request.kind, request.body, request.by) == ("update", {"a": 1}, "alice")
        request.answer({"step": 3})
        sender.join(DEADLINE_S)
        assert sender.answer == {"step": 3}

        sender = Sender(tmp_path, {"a": 2})
        (request,) = take(requests)
        assert "@" in request.by
        request.refuse("a must be 1: got 2")
        sender.join(DEADLINE_S)
        assert isinstance(sender.error, ConfigError)
        assert str(sender.error) == "a must be 1: got 2"
        names = {path.name for path in (tmp_path / REQUESTS).iterdir()}
        assert names == {".reader.lock"}


def test_only_the_owner_can_look_in(tmp_path):
    with RunRequests(tmp_path):
        assert (tmp_path / REQUESTS).stat().st_mode & 0o077 == 0


def test_the_older_comes_first_and_each_once(tmp_path):
    with RunRequests(tmp_path) as requests:
        senders = []
        folder = tmp_path / REQUESTS
        pause = threading.Event()
        for number in range(3):
            senders.append(Sender(tmp_path, {"number": number}))
            for _ in range(int(DEADLINE_S / 0.01)):
                if len([*folder.glob("*.request.json")]) > number:
                    break
                pause.wait(0.01)
        found = requests.take()
        assert [request.body["number"] for request in found] == [0, 1, 2]
        assert requests.take() == []
        for request in found:
            request.answer({})
        for sender in senders:
            sender.join(DEADLINE_S)
            assert sender.answer == {}


def test_a_deadline_takes_the_request_back(tmp_path):
    with RunRequests(tmp_path) as requests:
        with pytest.raises(DeadlineExceededError, match="taken back"):
            send_request(tmp_path, "update", {}, deadline_s=0.0)
        assert requests.take() == []


def test_a_deadline_that_passes_while_the_run_sees_to_it(tmp_path):
    with RunRequests(tmp_path) as requests:
        sender = Sender(tmp_path, {}, deadline_s=1.0)
        take(requests)
        sender.join(DEADLINE_S)
        assert isinstance(sender.error, DeadlineExceededError)
        assert "may still do it" in str(sender.error)


def test_nobody_reads(tmp_path):
    with pytest.raises(ConfigError, match="no process carries out the run"):
        send_request(tmp_path, "update", {})
    with pytest.raises(ConfigError, match="there is no run in"):
        send_request(tmp_path / "none", "update", {})
    RunRequests(tmp_path).close()
    with pytest.raises(ConfigError, match="no process carries out the run"):
        send_request(tmp_path, "update", {})


def test_the_advice_depends_on_the_state(tmp_path):
    with (
        own_run_folder(tmp_path),
        pytest.raises(ConfigError, match="it is starting, between"),
    ):
        send_request(tmp_path, "pause", {})
    with pytest.raises(ConfigError, match="it is interrupted: resume it first"):
        send_request(tmp_path, "pause", {})
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is finished: it has reached its end"):
        send_request(tmp_path, "pause", {})


def test_of_a_run_of_several_stages_the_one_that_runs_is_asked(tmp_path):
    for name in ("first", "second"):
        (tmp_path / "stages" / name).mkdir(parents=True)
    RunRequests(tmp_path / "stages" / "first").close()
    with RunRequests(tmp_path / "stages" / "second") as requests:
        sender = Sender(tmp_path, {"a": 1})
        (request,) = take(requests)
        request.answer({"stage": "second"})
        sender.join(DEADLINE_S)
    assert sender.answer == {"stage": "second"}
    with pytest.raises(ConfigError, match="no process carries out the run"):
        send_request(tmp_path, "update", {})


def test_the_end_of_the_run_answers_what_is_left(tmp_path):
    requests = RunRequests(tmp_path)
    sender = Sender(tmp_path, {})
    folder, pause = tmp_path / REQUESTS, threading.Event()
    while not [*folder.glob("*.request.json")] and sender.is_alive():
        pause.wait(0.01)
    requests.close()
    sender.join(DEADLINE_S)
    assert str(sender.error) == "the run has ended"


READER = """
import sys, time
from pathlib import Path
from rl_distributed.runs.requests import RunRequests
requests = RunRequests(Path(sys.argv[1]))
print("reads", flush=True)
while not requests.take():
    time.sleep(0.01)
print("taken", flush=True)
time.sleep(600)
"""


def test_a_reader_that_is_killed_is_noticed(tmp_path):
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "reads\n"
        sender = Sender(tmp_path, {})
        assert reader.stdout.readline() == "taken\n"
        reader.send_signal(signal.SIGKILL)
        sender.join(DEADLINE_S)
    assert isinstance(sender.error, ConfigError)
    assert "no process carries out the run" in str(sender.error)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '"text"', "x" * 70_000, json.dumps({"kind": 3, "body": []})),
        '{"kind": "update", "body": ' + "[" * 30_000 + "]" * 30_000 + "}",
    ],
)
def test_what_is_no_request_is_left_out(tmp_path, text):
    with RunRequests(tmp_path) as requests:
        (tmp_path / REQUESTS / "1.request.json").write_text(text)
        assert requests.take() == []
        assert not [*(tmp_path / REQUESTS).glob("*.request.json")]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "other").write_text(json.dumps({"kind": "update", "body": {}}))
    with RunRequests(tmp_path) as requests:
        os.symlink(tmp_path / "other", tmp_path / REQUESTS / "1.request.json")
        assert requests.take() == []
    assert (tmp_path / "other").exists()


def test_what_cannot_be_sent(tmp_path):
    with RunRequests(tmp_path):
        with pytest.raises(ConfigError, match="must consist of JSON values"):
            send_request(tmp_path, "update", {"a": object()})
        with pytest.raises(ConfigError, match="at most 65536 bytes"):
            send_request(tmp_path, "update", {"a": "x" * 70_000})


def test_requests_to_an_earlier_process_are_gone(tmp_path):
    RunRequests(tmp_path).close()
    (tmp_path / REQUESTS / "1.request.json").write_text(
        json.dumps({"kind": "update", "body": {}, "by": "x"})
    )
    with RunRequests(tmp_path) as requests:
        assert requests.take() == []


def test_what_a_reader_on_another_machine_has_left_is_not_waited_for(tmp_path):
    RunRequests(tmp_path).close()
    lock = tmp_path / REQUESTS / ".reader.lock"
    left = LockOwner(7, machine="another", lease_s=3600.0)
    with lock.open("r+b") as file:
        left.write(file.fileno())
    with RunRequests(tmp_path) as requests:
        assert requests.take() == []


def test_there_is_one_reader(tmp_path):
    with RunRequests(tmp_path), pytest.raises(LockHeldError):
        RunRequests(tmp_path)


ASKER = """
import os, sys
from rl_distributed.errors import ConfigError
from rl_distributed.runs.requests import send_request
os.setgid(65534)
os.setuid(65534)
try:
    send_request(sys.argv[1], "pause", {}, deadline_s=5.0)
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_of_another_user(mode):
    # Not in a pytest folder: those are closed to other users.
    with tempfile.TemporaryDirectory() as run, RunRequests(Path(run)) as requests:
        Path(run).chmod(mode)
        command = [sys.executable, "-c", ASKER, run]
        said = subprocess.check_output(command, text=True, timeout=DEADLINE_S)
        assert "only the owner of a run may ask something of it" in said
        assert requests.take() == []
