"""The watch against real processes, without Ray."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import pytest

from rl_distributed.workers import beat_sender
from rl_distributed.workers.beat_sender import Beat, BeatSender, WatchTarget, proof
from rl_distributed.workers.group_watch import GroupWatch
from rl_distributed.workers.open_calls import CallDeadline

LIMIT_S = 2.0
PROCESS = """
import pickle, sys, threading, time
from rl_distributed.workers.beat_sender import BeatSender
target = pickle.loads(bytes.fromhex(sys.argv[1]))
began = time.monotonic()
print(BeatSender(target, lambda: [("train", began, "id")]).start(), flush=True)
threading.Event().wait(120)
"""


@contextmanager
def watching(limit_s=None):
    events = queue.Queue()
    watch = GroupWatch("test", "127.0.0.1", limit_s, events.put)
    try:
        yield watch, events
    finally:
        watch.close()


def told(events):
    """Return what was told except silence, which a starved process keeps as well."""
    found = [events.get() for _ in range(events.qsize())]
    return [event for event in found if event.kind != "quiet"]


@contextmanager
def sending(target):
    """A process that sends beats."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, pickle.dumps(target).hex()],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "True"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_beats_arrive_and_are_asked_for():
    with watching() as (watch, events), sending(watch.target(3, 0)) as process:
        watch.expect(3, 0, process.pid)
        beat = watch.ask([3], 60)[3]
        assert (beat.method, beat.calls) == ("train", ("id",))
        assert 0 <= beat.method_s < 60
        seen = watch.seen()[3]
        assert seen.is_connected
        assert told(events) == []


@pytest.mark.parametrize(("held_s", "most"), [(0.2, 9), (0.0, 6)])
def test_who_was_connected_for_long_comes_back_however_often(monkeypatch, held_s, most):
    monkeypatch.setattr(beat_sender, "_STEADY_S", 0.1)
    found = 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2.0)
        target = WatchTarget("127.0.0.1", server.getsockname()[1], 0, 0, 0.02, b"k")
        sender = BeatSender(target, list)
        threading.Thread(target=sender.start, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            while found < 9:
                link, _ = server.accept()
                with link, link.makefile("r") as said:
                    link.sendall(b"challenge\n")
                    for _ in range(2):
                        assert said.readline()
                    time.sleep(held_s)
                found += 1
    assert found == most


def test_hello_that_is_not_read_yet_counts():
    held, held_back, let_go = threading.Event(), threading.Event(), threading.Event()

    def hold(_):
        held.set()
        assert let_go.wait(60)

    watch = GroupWatch("test", "127.0.0.1", None, hold)
    target = watch.target(3, 0)
    beats = {}
    try:
        address = (target.address, target.port)
        with socket.create_connection(address, timeout=30) as link:
            challenge = link.makefile("r").readline().strip()
            watch.add_deadline(CallDeadline(0.0, str, lambda: ((3, 0),), "a call"))
            assert held.wait(60)
            hello = [3, 0, proof(target.key, challenge, 3, 0)]
            link.sendall(
                json.dumps(hello).encode() + b"\n" + Beat("step").line() + b"\n"
            )
            watch.expect(3, 0, None)

            def ask():
                held_back.set()
                beats.update(watch.ask([3], 60))

            asking = threading.Thread(target=ask)
            asking.start()
            assert held_back.wait(60)
            let_go.set()
            asking.join(60)
    finally:
        let_go.set()
        watch.close()
    assert beats[3].method == "step"


def test_question_ends_with_the_watch():
    with watching() as (watch, _):
        watch.close()
        assert watch.ask([0], 60) == {}


@pytest.mark.parametrize("is_local", [True, False])
def test_end_of_a_process(is_local):
    with watching() as (watch, events), sending(watch.target(0, 1)) as process:
        watch.expect(0, 1, process.pid if is_local else None)
        watch.ask([0], 60)
        process.kill()
        event = events.get(timeout=60)
        while event.kind == "quiet":
            event = events.get(timeout=60)
        assert event.kind == ("died" if is_local else "lost")
        assert event.who == ((0, 1),)


def test_process_that_is_stopped():
    with watching(LIMIT_S) as (watch, events), sending(watch.target(0, 0)) as process:
        watch.expect(0, 0, process.pid)
        watch.ask([0], 60)
        os.kill(process.pid, signal.SIGSTOP)
        event = events.get(timeout=60)
        assert event.kind == "hung"
        said = re.fullmatch(
            r"no sign of life for ([\d.]+) s \(the limit is 2 s\)", event.detail
        )
        assert said is not None
        assert float(said[1]) >= LIMIT_S


def test_who_has_not_the_key_is_sent_away():
    with watching() as (watch, events):
        target = watch.target(0, 0)
        watch.expect(0, 0, None)
        address = (target.address, target.port)
        deep = b"[" * 200_000 + b"\n"
        nested = b"[" * 1_000 + b"\n"
        known = (b'[0, 0, "0123"]\n', b"garbage\n", b"[1]\n", b"x" * 2_000)
        for answer in (*known, nested, deep):
            with socket.create_connection(address, timeout=30) as link:
                link.settimeout(30)
                assert len(link.recv(64)) > 30
                with contextlib.suppress(
                    ConnectionError
                ):  # closed before the end of a long one
                    link.sendall(answer)
                    assert link.recv(64) == b""
        assert not watch.seen()[0].is_connected
        assert events.empty()
        assert "key=" not in repr(target)


def test_former_process_of_a_rank_is_not_mistaken_for_the_present_one():
    with watching() as (watch, _), sending(watch.target(0, 0)) as process:
        watch.expect(0, 0, None)
        watch.ask([0], 60)
        watch.expect(0, 1, None)
        process.kill()
        assert watch.ask([0], 0.5) == {}
        assert watch.seen()[0].incarnation == 1


def test_deadline_of_a_call():
    with watching() as (watch, events):
        end = time.monotonic() + 0.3
        watch.add_deadline(CallDeadline(end, lambda: "on time", tuple, "a call"))
        watch.add_deadline(
            CallDeadline(
                end + 0.1, lambda: "not on time", lambda: ((1, 0), (2, 0)), "a call"
            )
        )
        event = events.get(timeout=30)
        assert (event.kind, event.detail) == ("late", "not on time")
        assert event.who == ((1, 0), (2, 0))


def test_a_call_that_cannot_be_asked_about_ends_no_watch():
    def shut_down():
        raise RuntimeError("Ray has been shut down")

    with watching() as (watch, events):
        end = time.monotonic() + 0.1
        watch.add_deadline(CallDeadline(end, str, shut_down, "a call"))
        watch.add_deadline(CallDeadline(end + 0.1, str, lambda: ((1, 0),), "another"))
        assert events.get(timeout=30).who == ((1, 0),)


def test_a_deadline_does_not_hold_the_results_of_a_call_that_has_ended():
    class Result:
        pass

    result = Result()
    gone = threading.Event()
    weakref.finalize(result, gone.set)
    with watching() as (watch, _):
        late = functools.partial(lambda result: (), result)
        watch.add_deadline(CallDeadline(time.monotonic() + 600, str, late, "a call"))
        del result, late
        assert gone.wait(30)


def test_closing_ends_the_thread():
    with watching():
        pass
    names = [thread.name for thread in threading.enumerate()]
    assert "watch-test" not in names


def test_silence_is_told_of_early_and_once():
    with watching() as (watch, events), sending(watch.target(3, 0)) as process:
        watch.expect(3, 0, process.pid)
        assert watch.ask([3], 60)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            event = events.get(timeout=60)
            assert (event.kind, event.who) == ("quiet", ((3, 0),))
            assert "no sign of life for" in event.detail
            assert watch.ask([3], 0.2) == {}  # looks again, and has nothing to report
            assert events.empty()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert watch.ask([3], 60)
        assert told(events) == []
