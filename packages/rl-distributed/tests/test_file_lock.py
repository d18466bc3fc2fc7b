from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rl_distributed.errors import DeadlineExceededError, LockHeldError
from rl_distributed.failures.lock_owner import LockOwner, machine_id
from rl_distributed.file_lock import FileLock, FolderLock, is_locked

SCRIPT = Path(__file__).parent / "scripts" / "hold_lock.py"
DEADLINE_S = 60.0


@contextlib.contextmanager
def holder(folder: Path, lease_s: float, *ways: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns `folder`, as described in `scripts/hold_lock.py`."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, folder, str(lease_s), *ways],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- one machine -------------------------------------------------------------------


def test_a_second_holder_is_told_of_the_first(tmp_path):
    path = tmp_path / "deep" / "a.lock"
    with FileLock(path, "one thing").held() as descriptor:
        assert os.fstat(descriptor).st_ino == path.stat().st_ino
        assert is_locked(path)
        other = FileLock(path, "building 'x'", remedy="raise build_deadline_s")
        with pytest.raises(LockHeldError) as caught:
            other.acquire(0.1)
        owner = other.owner()
    assert owner is not None
    assert caught.value.owner == owner
    assert (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
    age = datetime.now(UTC) - datetime.fromisoformat(owner.since)
    assert timedelta(0) <= age < timedelta(minutes=5)
    message = str(caught.value)
    assert message.startswith("building 'x': ")
    assert f"this very process ({os.getpid()} on {socket.gethostname()})" in message
    assert "waited 0.1 s; raise build_deadline_s" in message
    assert isinstance(caught.value, DeadlineExceededError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.owner) == (message, owner)
    assert not is_locked(path)
    assert other.owner() is None
    assert path.read_bytes() == b""
    with other.held():
        assert is_locked(path)
    assert not is_locked(tmp_path / "absent")
    # A folder in the path may be a file.
    path.write_text("")
    assert not is_locked(path / "lock")


def test_one_object_takes_a_lock_once(tmp_path):
    lock = FileLock(tmp_path / "a.lock", "it")
    with lock.held(), pytest.raises(RuntimeError, match="locked by this object"):
        lock.acquire()
    assert not lock.is_held
    lock.release()


def test_a_lock_of_a_killed_process_is_free(tmp_path):
    lock = FolderLock(tmp_path, "writing", remedy="take another folder")
    with holder(tmp_path, 30.0) as process:
        assert said(process) == "held"
        expected = (
            rf"writing: .*held by process {process.pid} on {socket.gethostname()} "
            rf"since \d{{4}}-.*; take another folder"
        )
        with pytest.raises(LockHeldError, match=expected):
            lock.acquire()
        owner = lock.owner()
        assert owner is not None
        assert (owner.pid, owner.machine) == (process.pid, machine_id())
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert lock.owner() is None
        with lock.held(DEADLINE_S):
            assert lock.is_held


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    with holder(tmp_path, 30.0, "fork") as process:
        lines = {said(process), said(process)}
        child = next(line.split() for line in lines if line.startswith("child"))
        try:
            # The child does not count as the holder, but does not free it either.
            assert child[2] == "False"
            with pytest.raises(LockHeldError):
                FolderLock(tmp_path, "it").acquire()
            process.kill()
            process.wait(DEADLINE_S)
            os.kill(int(child[1]), 0)
            with FolderLock(tmp_path, "it").held(DEADLINE_S):
                os.kill(int(child[1]), 0)
        finally:
            os.kill(int(child[1]), signal.SIGKILL)


def test_threads_of_one_process_exclude_each_other(tmp_path):
    inside = []

    def enter(number: int) -> int:
        with FileLock(tmp_path / "a.lock", f"thread {number}").held(DEADLINE_S):
            inside.append(number)
            assert inside == [number]
            inside.remove(number)
        return number

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(enter, range(40))) == list(range(40))


def test_a_lock_that_nobody_refers_to_is_free(tmp_path):
    lock = FolderLock(tmp_path, "it")
    lock.acquire()
    del lock
    gc.collect()
    with FolderLock(tmp_path, "it").held():
        pass


def test_a_lock_whose_file_was_removed_is_lost(tmp_path):
    lock = FolderLock(tmp_path, "it")
    lock.acquire()
    assert lock.is_held
    (tmp_path / ".owner.lock").unlink()
    assert not lock.is_held
    other = FolderLock(tmp_path, "it")
    with other.held():
        assert not lock.is_held
        lock.release()
        assert other.is_held
    lock.acquire()
    lock.release()


def test_a_data_file_keeps_its_content_and_its_holder_is_unknown(tmp_path):
    path = tmp_path / "data"
    path.write_text("{}")
    path.chmod(0o600)
    lock = FileLock(path, "data", is_data=True, mode=0o600)
    with lock.held() as descriptor:
        os.write(descriptor, b"more")
        with pytest.raises(LockHeldError, match="held by another process"):
            FileLock(path, "data", is_data=True).acquire()
        owner = FileLock(path, "data", is_data=True).owner()
    assert owner == LockOwner(0)
    assert path.read_text() == "{}more"
    made = FileLock(tmp_path / "made", "data", is_data=True, mode=0o600)
    with made.held():
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_locks_of_other_names_and_shared_ones(tmp_path):
    with (
        FolderLock(tmp_path, "one").held(),
        FolderLock(tmp_path, "two", name="checkpoints").held(),
    ):
        assert {path.name for path in tmp_path.iterdir()} == {
            ".owner.lock",
            ".checkpoints.lock",
        }
    with (tmp_path / ".owner.lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert is_locked(tmp_path / ".owner.lock")
        with pytest.raises(LockHeldError, match="held by another process"):
            FolderLock(tmp_path, "one").acquire()


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b"null", b'{"pid": "x"}'])
def test_a_damaged_note_names_nobody_and_is_replaced(tmp_path, note):
    (tmp_path / ".owner.lock").write_bytes(note)
    lock = FolderLock(tmp_path, "it")
    assert lock.owner() is None
    with lock.held():
        owner = lock.owner()
    assert owner is not None
    assert owner.pid == os.getpid()


def test_a_link_and_a_missing_right_are_refused(tmp_path):
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"):
        FileLock(tmp_path / "link", "it").acquire()
    with pytest.raises(NotADirectoryError):
        FolderLock(tmp_path / "real" / "below", "it").acquire()


# --- several machines --------------------------------------------------------------


def test_an_owner_on_another_machine_whose_locks_do_not_reach_here(tmp_path):
    with holder(tmp_path, 3.0, "far", "local_locks") as process:
        assert said(process) == "held"
        lock = FolderLock(tmp_path, "writing")
        # The kernel sees no lock; the sign of life shows one.
        assert not is_locked(tmp_path / ".owner.lock")
        owner = lock.owner()
        assert owner is not None
        assert (owner.pid, owner.machine) == (process.pid, "another boot")
        with pytest.raises(LockHeldError, match=f"process {process.pid} on"):
            lock.acquire()
        assert not is_locked(tmp_path / ".owner.lock")
        process.kill()
        process.wait(DEADLINE_S)
        # No deadline is needed for a dead holder.
        lock.acquire()
        assert lock.is_held
        lock.release()


def test_an_owner_that_died_long_ago_elsewhere_is_not_waited_for(tmp_path):
    with holder(tmp_path, 3_600.0, "far", "local_locks") as process:
        assert said(process) == "held"
    file = tmp_path / ".owner.lock"
    assert file.stat().st_size > 0
    before = time.time() - 2 * 3_600
    os.utime(file, (before, before))
    lock = FolderLock(tmp_path, "it")
    assert lock.owner() is None
    lock.acquire()
    lock.release()


def test_an_owner_that_ended_in_good_order_elsewhere_leaves_no_note(tmp_path):
    with holder(tmp_path, 3_600.0, "far", "local_locks") as process:
        assert said(process) == "held"
        process.communicate("", timeout=DEADLINE_S)
    assert (tmp_path / ".owner.lock").read_bytes() == b""
    with FolderLock(tmp_path, "it").held():
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="not implemented"):
        FileLock(tmp_path / "a.lock", "it").acquire()
    with holder(tmp_path, 3.0, "no_locks") as process:
        assert said(process) == "held"
        lock = FolderLock(tmp_path, "it", lease_s=3.0)
        owner = lock.owner()
        assert owner is not None
        assert owner.pid == process.pid
        with pytest.raises(LockHeldError, match=f"process {process.pid} on"):
            lock.acquire()
        process.kill()
        process.wait(DEADLINE_S)
        lock.acquire()
        assert lock.is_held
    assert "has no locks: signs of life alone" in caplog.text
    # Another owner's note replaced ours: the lock is lost, and remains the other's.
    note = LockOwner(1, "there", "then", "another boot", "token", 1.0)
    with (tmp_path / ".owner.lock").open("r+b") as file:
        note.write(file.fileno())
    assert not lock.is_held
    lock.release()
    with (tmp_path / ".owner.lock").open("rb") as file:
        assert LockOwner.read(file.fileno()) == note
