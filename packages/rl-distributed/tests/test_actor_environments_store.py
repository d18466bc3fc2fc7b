from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import rl_distributed_sample_environments as sample

from rl_distributed.actor_environments import EnvironmentStore, default_root
from rl_distributed.errors import ActorEnvironmentError, LockHeldError
from rl_distributed.file_lock import FileLock

SCRIPT = sample.__file__
DEADLINE_S = 120


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    sample.write_wheel(tmp_path / "wheels", "1.0")
    return tmp_path / "wheels"


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "root")


def start_builder(store: EnvironmentStore, wheels: Path) -> subprocess.Popen[str]:
    log = store.root.parent / "log"
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(store.root), str(wheels), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what}"
        pause.wait(0.01)


def at_work_in(folder: Path) -> list[int]:
    """Return processes that were started to work in a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process.pid)
    return found


def library_version(python: Path) -> str:
    code = "import isolation_sample as s; print(s.VERSION)"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    return done.stdout.strip() or done.stderr


# --- building ----------------------------------------------------------------------


def test_built_once_and_found_again(store, wheels, monkeypatch, tmp_path):
    monkeypatch.setenv("BUILD_LOG", str(tmp_path / "log"))
    wanted = sample.overlay(wheels, cls=sample.LoggedOverlay)
    key = wanted.key()
    assert store.find(key).state == "absent"
    built, waited = store.ensure(wanted)
    assert built.state == "ready"
    assert waited > 0
    assert built.size_bytes > 0
    assert built.label == "driver + isolation_sample==1.0"
    again, waited = store.ensure(sample.overlay(wheels, cls=sample.LoggedOverlay))
    assert (again.key, waited) == (key, 0.0)
    assert [e.key for e in store.environments()] == [key]
    assert (tmp_path / "log").read_text().count("begin") == 1
    assert library_version(built.python) == "1.0"
    # Scripts find their interpreter after the folder was renamed.
    assert "build-" not in (built.path / "pyvenv.cfg").read_text()


def test_many_processes_at_once_build_once(store, wheels, tmp_path):
    builders = [start_builder(store, wheels) for _ in range(6)]
    try:
        told = [builder.communicate(timeout=DEADLINE_S) for builder in builders]
    finally:
        for builder in builders:
            builder.kill()
    assert [builder.returncode for builder in builders] == [0] * 6, told
    assert len({out for out, _ in told}) == 1
    assert all(out.split()[1] == "ready" for out, _ in told)
    assert (tmp_path / "log").read_text().count("begin") == 1


def test_many_threads_at_once_build_once(store, wheels, monkeypatch, tmp_path):
    monkeypatch.setenv("BUILD_LOG", str(tmp_path / "log"))
    wanted = sample.overlay(wheels, cls=sample.LoggedOverlay)
    threads = [threading.Thread(target=store.ensure, args=[wanted]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert (tmp_path / "log").read_text().count("begin") == 1
    assert store.find(wanted.key()).state == "ready"


@pytest.mark.slow
def test_killed_at_random_points_then_built(store, wheels, tmp_path):
    generator = random.Random(7)
    log = tmp_path / "log"
    key = sample.overlay(wheels, cls=sample.LoggedOverlay).key()
    killed = 0
    # At once, and then at random moments up to beyond the last rename.
    for delay_s in [0.0, 0.0, *(generator.uniform(0.0, 0.25) for _ in range(8))]:
        seen = log.read_text().count("begin") if log.exists() else 0
        builder = start_builder(store, wheels)
        wait_until(
            lambda seen=seen, builder=builder: (
                builder.poll() is not None
                or (log.exists() and log.read_text().count("begin") > seen)
            ),
            "the build to begin",
        )
        try:
            builder.wait(timeout=delay_s)
        except subprocess.TimeoutExpired:
            builder.send_signal(signal.SIGKILL)
            killed += 1
        builder.communicate()
        # Its child processes are now on their own: for a moment with the lock, then
        # with the folder.
        wait_until(lambda: not at_work_in(store.root), "the rest to end")
        state = store.find(key).state
        assert state in ("ready", "broken", "absent")
        if state == "ready":
            python = store.find(key).python
            assert library_version(python) == "1.0"
            store.prune(0, start_grace_s=0)
    assert killed > 0
    last = start_builder(store, wheels)
    out, err = last.communicate(timeout=DEADLINE_S)
    assert out.split() == [key, "ready"], err
    assert library_version(store.find(key).python) == "1.0"
    store.prune()
    left = {path.name for path in store.root.iterdir()}
    assert left == {key, ".locks"}


def test_killed_builder_is_followed_by_one_that_waits(store, wheels, tmp_path):
    log = tmp_path / "log"
    builders = {b.pid: b for b in (start_builder(store, wheels) for _ in range(3))}
    try:
        wait_until(lambda: log.exists() and "begin" in log.read_text(), "a build")
        killed = builders.pop(int(log.read_text().split()[1]))
        killed.kill()
        killed.communicate()
        told = [
            builder.communicate(timeout=DEADLINE_S) for builder in builders.values()
        ]
    finally:
        for builder in builders.values():
            builder.kill()
    assert [out.split()[1] for out, _ in told] == ["ready"] * 2, told
    assert log.read_text().count("begin") <= 2


def test_remains_of_an_interrupted_build_are_broken_then_replaced(store, wheels):
    wanted = sample.overlay(wheels)
    key = wanted.key()
    (store.root / f".build-{key}-00000000" / "bin").mkdir(parents=True)
    (store.root / key / "bin").mkdir(parents=True)  # no marker: never finished
    with FileLock(store.root / ".locks" / f"{key}.lock", "the test").held():
        pass
    assert store.find(key).state == "broken"
    assert [e.state for e in store.environments()] == ["broken"]
    built, _ = store.ensure(wanted)
    assert built.state == "ready"
    assert {path.name for path in store.root.iterdir()} == {key, ".locks"}


def test_interpreter_that_has_gone_is_built_anew(store, wheels):
    wanted = sample.overlay(wheels)
    built, _ = store.ensure(wanted)
    built.python.unlink()
    assert store.find(built.key).state == "broken"
    again, waited = store.ensure(wanted)
    assert again.state == "ready"
    assert waited > 0


def test_failed_build_leaves_nothing(store, wheels):
    missing = sample.overlay(wheels, "9.9")
    with pytest.raises(ActorEnvironmentError, match=r"isolation_sample==9\.9"):
        store.ensure(missing)
    assert store.environments() == []
    assert {path.name for path in store.root.iterdir()} == {".locks"}


def test_build_that_takes_too_long(store, wheels):
    slow = sample.overlay(wheels, build_deadline_s=0.001)
    with pytest.raises(ActorEnvironmentError, match=r"build_deadline_s \(0\.001 s\)"):
        store.ensure(slow)
    assert store.environments() == []


def test_waiting_for_another_builder_has_a_deadline(store, wheels):
    wanted = sample.overlay(wheels, build_deadline_s=0.2)
    with FileLock(store.root / ".locks" / f"{wanted.key()}.lock", "the test").held():
        assert store.find(wanted.key()).state == "building"
        with pytest.raises(LockHeldError, match=r"isolation_sample==1\.0"):
            store.ensure(wanted)


def test_root_that_cannot_be_written(tmp_path, wheels):
    (tmp_path / "file").write_text("")
    with pytest.raises(ActorEnvironmentError, match="set RL_ENV_ROOT"):
        EnvironmentStore(tmp_path / "file" / "root").ensure(sample.overlay(wheels))


def test_root_is_the_users_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "given"))
    assert default_root() == tmp_path / "given"
    monkeypatch.delenv("RL_ENV_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_root() == tmp_path / "cache" / "rl" / "environments"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_root() == Path.home() / ".cache" / "rl" / "environments"


# --- pruning -----------------------------------------------------------------------


def test_prune_keeps_what_is_used(store, wheels):
    built, _ = store.ensure(sample.overlay(wheels))
    code = "print('up', flush=True); import sys; sys.stdin.read()"
    user = subprocess.Popen(
        [built.python, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert user.stdout is not None
        assert user.stdout.readline().strip() == "up"
        assert store.prune(0, start_grace_s=0) == []
        assert store.find(built.key).state == "ready"
    finally:
        user.kill()
        user.communicate()
    assert [e.key for e in store.prune(0, start_grace_s=0)] == [built.key]
    assert store.find(built.key).state == "absent"


def test_prune_by_age(store, wheels):
    built, _ = store.ensure(sample.overlay(wheels))
    assert store.prune() == []
    assert store.prune(1) == []
    assert store.prune(0) == []  # a worker may be about to start in it
    old = time.time() - 3 * 86_400
    os.utime(built.path / ".last-use", (old, old))
    assert store.prune(4) == []
    assert [e.key for e in store.prune(2, dry_run=True)] == [built.key]
    assert store.find(built.key).state == "ready"
    assert [e.key for e in store.prune(2)] == [built.key]
    assert store.environments() == []


def test_prune_leaves_what_was_given_out_since_it_was_listed(store, wheels):
    built, _ = store.ensure(sample.overlay(wheels))
    listed = store.find(built.key)
    os.utime(built.path / ".last-use", (listed.last_use + 60, listed.last_use + 60))
    assert not store._remove_free(listed)
    assert store._remove_free(store.find(built.key))


def test_prune_leaves_what_is_being_built(store, wheels):
    key = sample.overlay(wheels).key()
    (store.root / f".build-{key}-00000000").mkdir(parents=True)
    (store.root / f".trash-{'0' * 32}").mkdir()
    with FileLock(store.root / ".locks" / f"{key}.lock", "the test").held():
        assert store.prune(0) == []
    assert [e.state for e in store.prune()] == ["broken"]
    assert {path.name for path in store.root.iterdir()} == {".locks"}


def test_prune_removes_nothing_that_is_not_its_own(store, wheels):
    built, _ = store.ensure(sample.overlay(wheels))
    foreign = ("photos", ".build-tools", ".trash-of-mine", "backup-0123456789abcdef")
    for name in foreign:
        (store.root / name).mkdir()
        (store.root / name / "file").write_text("mine")
    assert [e.key for e in store.environments()] == [built.key]
    assert [e.key for e in store.prune(0, start_grace_s=0)] == [built.key]
    assert all((store.root / name / "file").exists() for name in foreign)
