"""A checkpoint folder after its writer was killed, and on a full disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_distributed.checkpoint
from rl_distributed.checkpoint import (
    CheckpointingConfig,
    CheckpointManager,
    inspection,
    read_manifest,
)
from rl_distributed.errors import CheckpointError

WRITER = textwrap.dedent(
    """
    import sys
    from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager

    manager = CheckpointManager(
        CheckpointingConfig(checkpoint_dir=sys.argv[1], keep_top_k=1, keep_latest_k=2)
    )
    info = manager.load_training_info() or {"step": 0}
    while True:
        # Each step is written twice, so that replacing one is interrupted too.
        for _ in range(2):
            info = {"step": info["step"] + 1 if _ == 0 else info["step"]}
            with manager.writing(info["step"], info) as path:
                for index in range(3):
                    data = bytes([info["step"] % 256]) * 20_000
                    (path / f"weights_{index}").write_bytes(data)
            print(info["step"], flush=True)
    """
)


# Saves a checkpoint repeatedly, killed at a later file operation each time, until it
# gets through. A fork is a separate process, and needs no start of Python.
KILLED_EVERYWHERE = textwrap.dedent(
    """
    import json, os, shutil, signal, sys
    from pathlib import Path
    from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager

    root = Path(sys.argv[1])
    OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "open")

    def manager():
        return CheckpointManager(
            CheckpointingConfig(
                checkpoint_dir=str(root / "now"), metric_name="score", keep_top_k=1
            )
        )

    def save(step, run):
        with manager().writing(step, {"score": -step, "run": run}) as path:
            (path / "weights").mkdir()
            for index in range(2):
                (path / "weights" / str(index)).write_bytes(b"%d.%d" % (step, run))

    def kill_at(number):
        left = number
        def counted(real):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            return call
        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))

    def check(step):
        reader = manager()
        latest = reader.get_latest_checkpoint_path()
        reader.verify(latest)
        info = reader.load_training_info(latest)
        found = -info["score"]
        assert found in (step - 1, step), (found, step)
        for index in range(2):
            content = (latest / "weights" / str(index)).read_bytes()
            assert content == b"%d.%d" % (found, info["run"]), (content, info)
        best = reader.get_best_checkpoint_path()
        reader.verify(best)
        assert reader.load_training_info(best)["score"] == -1, best

    for step in (1, 2):
        save(step, 0)
    # The next one pushes step 2 out; then it is written again; then step 4 begins with
    # leftovers of one that was killed.
    for stage, step in enumerate((3, 3, 4)):
        shutil.copytree(root / "now", root / f"before_{stage}")
        number, killed = 0, True
        while killed:
            number += 1
            shutil.rmtree(root / "now")
            shutil.copytree(root / f"before_{stage}", root / "now")
            child = os.fork()
            if child == 0:
                kill_at(number)
                save(step, stage)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            killed = os.WIFSIGNALED(status)
            assert killed or status == 0, status
            check(step)
            if killed:
                # Going on cleans up.
                save(step, stage)
                check(step)
                names = sorted(path.name for path in (root / "now").iterdir())
                assert names == [".writer.lock", "step_1", f"step_{step}"], names
        print(number)
        leftovers = root / "now" / "tmp_step_9"
        shutil.copytree(root / "now" / "step_1", leftovers)
    """
)


def manager_in(folder: Path, **settings: Any) -> CheckpointManager:
    config = CheckpointingConfig(checkpoint_dir=str(folder), **settings)
    return CheckpointManager(config)


def save(manager: CheckpointManager, step: int) -> None:
    with manager.writing(step, {"loss": float(step)}) as path:
        (path / "weights").write_bytes(b"x" * 100)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    reached = 0
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        try:
            for _ in range(rng.randint(1, 4)):
                line = child.stdout.readline()
                assert line, "the writer ended by itself"
                reached = int(line)
            # Somewhere within the next save, which takes about 10 ms.
            signal.sigtimedwait([], rng.random() * 0.02)  # the moment of the kill
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
            child.wait(60)
            child.stdout.close()
        reached = int(rest[-1]) if rest else reached
        manager = manager_in(tmp_path)
        latest = manager.get_latest_checkpoint_path()
        assert latest is not None
        manager.verify(latest)
        info = manager.load_training_info(latest)
        assert info is not None
        assert info["step"] in (reached, reached + 1)
        content = bytes([info["step"] % 256]) * 20_000
        for index in range(3):
            assert (latest / f"weights_{index}").read_bytes() == content
    whole = [p for p in tmp_path.iterdir() if p.name.startswith("step_")]
    assert len(whole) <= 4


def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_EVERYWHERE, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = child.communicate(timeout=240)
    finally:
        child.kill()
    assert child.returncode == 0, err
    points = [int(line) for line in out.split()]
    assert len(points) == 3
    assert all(number > 15 for number in points), points


@pytest.mark.parametrize("name", ["manifest.json", "training_info.json", "weights"])
def test_no_flipped_byte_goes_unnoticed(name: str, tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    with manager.writing(1, {"step": 1}) as path:
        (path / "weights").write_bytes(bytes(range(64)))
    root = tmp_path / "step_1"
    entries, data = read_manifest(root), (root / name).read_bytes()
    for position, bit in itertools.product(range(len(data)), (0, 2, 5, 7)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        (root / name).write_bytes(bytes(flipped))
        with contextlib.suppress(CheckpointError):
            manager.verify(root)
            # Only a space of the manifest may differ.
            assert name == "manifest.json"
            assert read_manifest(root) == entries


def test_a_fallback_says_what_is_skipped_and_what_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_in(tmp_path)
    for step in (1, 2, 3, 4):
        with manager.writing(step, {"step": step}) as path:
            (path / "weights").write_bytes(b"x" * 100)
    (tmp_path / "step_4" / "weights").write_bytes(b"x" * 60)
    (tmp_path / "step_3" / "manifest.json").unlink()
    reader = manager_in(tmp_path)
    for _ in range(2):
        assert reader.get_latest_checkpoint_path() == tmp_path / "step_2"
    first, second = (record.getMessage() for record in caplog.records)
    assert "step_4 is damaged: weights has 60 bytes, expected 100" in first
    assert "step_3 is incomplete: it has no manifest.json" in second
    for text in (first, second):
        assert f"{tmp_path / 'step_2'} is the newest whole one" in text
    for step in (1, 2):
        (tmp_path / f"step_{step}" / "weights").unlink()
    caplog.clear()
    assert manager_in(tmp_path).get_latest_checkpoint_path() is None
    assert "there is no whole one" in caplog.text


def test_lost_training_information_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_in(tmp_path, metric_name="loss", keep_top_k=1)
    save(manager, 1)
    info = tmp_path / "step_1" / "training_info.json"
    # As after a power cut: the size is right, and the content is not there.
    info.write_bytes(bytes(info.stat().st_size))
    for step in (2, 3):
        save(manager, step)
    assert manager.get_best_checkpoint_path() == tmp_path / "step_3"
    # The damaged one stays, and takes nobody's place.
    assert list(manager.list_checkpoints()) == [1, 3]
    assert caplog.text.count("is damaged; it does not count") == 1


@pytest.mark.parametrize("after", [False, True])
def test_the_best_is_found_while_the_writer_removes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    manager = manager_in(tmp_path, metric_name="loss")
    for step in (1, 2, 3):
        save(manager, step)
    read = inspection.read_training_info

    def removing(root: Path) -> dict[str, Any]:
        if not after and root.name == "step_3":
            shutil.rmtree(root)
        info = read(root)
        if after and root.name == "step_3":
            shutil.rmtree(root)
        return info

    monkeypatch.setattr(inspection, "read_training_info", removing)
    assert manager.get_best_checkpoint_path() == tmp_path / "step_2"


def test_a_leftover_that_cannot_be_removed_stops_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = shutil.rmtree
    busy = {"removed_step_1", "removed_step_3"}

    def removed(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name in busy and path.exists():
            # What NFS says while a reader has a file in it open.
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", removed)
    manager = manager_in(tmp_path, keep_latest_k=1)
    for step in (1, 2, 3, 3):
        save(manager, step)
    assert list(manager.list_checkpoints()) == [3]
    assert {p.name for p in tmp_path.glob("*step_*")} == {"step_3", *busy}
    assert "removed_step_1, which is a leftover, cannot be removed" in caplog.text
    busy.clear()
    save(manager, 4)
    assert [p.name for p in tmp_path.glob("*step_*")] == ["step_4"]


def test_nothing_reads_a_pickle() -> None:
    source = Path(rl_distributed.checkpoint.__file__).parent
    text = "".join(path.read_text() for path in source.glob("*.py"))
    for word in ("pickle", "torch.load", "joblib", "marshal", "shelve", "unsafe_load"):
        assert word not in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, if the tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount program")
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)


def check_full_disk(manager: CheckpointManager, old: Path, size: int) -> None:
    with (
        pytest.raises(CheckpointError) as caught,
        manager.writing(2, {"step": 2}) as path,
    ):
        (path / "weights").write_bytes(b"x" * size)
    message = str(caught.value)
    assert "tmp_step_2 cannot be written: the disk or quota is full" in message
    assert "checkpointing.checkpoint_dir" in message
    assert str(old) in message
    names = sorted(p.name for p in manager.checkpoint_dir.iterdir())
    assert names == [".writer.lock", "step_1"]
    assert manager.get_latest_checkpoint_path() == old
    manager.verify(old)


def test_a_full_disk_leaves_the_old_checkpoint_valid(small_disk: Path) -> None:
    manager = manager_in(small_disk)
    with manager.writing(1, {"step": 1}) as path:
        (path / "weights").write_bytes(b"x" * 300_000)
    check_full_disk(manager, small_disk / "step_1", 2_000_000)
    # There is room again for one that fits.
    with manager.writing(2, {"step": 2}) as path:
        (path / "weights").write_bytes(b"x" * 300_000)
    assert manager.get_latest_checkpoint_path() == small_disk / "step_2"


def test_a_file_limit_is_taken_for_a_full_disk(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    with manager.writing(1, {"step": 1}) as path:
        (path / "weights").write_bytes(b"x" * 100)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        check_full_disk(manager, tmp_path / "step_1", 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("failing_call", range(6))
def test_a_failure_at_any_synchronisation_keeps_the_old_one(
    failing_call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_in(tmp_path)
    with manager.writing(1, {"step": 1}) as path:
        (path / "weights").write_bytes(b"old")
    real, calls = os.fsync, 0

    def fsync(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls > failing_call:
            raise OSError(28, os.strerror(28))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with (
        pytest.raises(CheckpointError, match="the disk or quota is full"),
        manager.writing(1, {"step": 1, "again": True}) as path,
    ):
        (path / "weights").write_bytes(b"new")
    monkeypatch.undo()
    reader = manager_in(tmp_path)
    latest = reader.get_latest_checkpoint_path()
    assert latest is not None
    again = "again" in json.loads((latest / "training_info.json").read_text())
    assert (latest / "weights").read_bytes() == (b"new" if again else b"old")


def test_a_full_disk_in_a_worker_is_known_by_its_text(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    with (
        pytest.raises(CheckpointError, match="the disk or quota is full"),
        manager.writing(1, {}),
    ):
        raise RuntimeError(
            "worker 1: SafetensorError: No space left on device (os error 28)"
        )
    with pytest.raises(RuntimeError, match="other"), manager.writing(1, {}):
        raise RuntimeError("other")
    assert [path.name for path in tmp_path.iterdir()] == [".writer.lock"]


# One writer


# Saves a number of steps in sequence, and reports how each ended.
RIVAL = textwrap.dedent(
    """
    import sys
    from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
    from rl_distributed.errors import CheckpointError

    folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=folder))
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(count):
        try:
            with manager.writing(step, {"writer": name}) as path:
                for index in range(20):
                    (path / f"{name}_{index}").write_text(name * 1000)
        except CheckpointError as error:
            print("refused", error, flush=True)
        else:
            print("saved", flush=True)
    print("done", flush=True)
    sys.stdin.readline()
    """
)


@contextlib.contextmanager
def rival(folder: Path, name: str, count: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RIVAL, str(folder), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert said(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_two_processes_one_writes_and_the_other_is_told(tmp_path: Path) -> None:
    count = 10
    with rival(tmp_path, "a", count) as first, rival(tmp_path, "b", count) as second:
        for process in (first, second):
            go_on(process)
        lines = {
            name: list(iter(lambda process=process: said(process), "done"))
            for name, process in (("a", first), ("b", second))
        }
        (winner,) = [name for name in "ab" if lines[name] == ["saved"] * count]
        (loser,) = {"a", "b"} - {winner}
        pid = (first if winner == "a" else second).pid
        assert len(lines[loser]) == count
        for line in lines[loser]:
            assert f"are written by process {pid} on {socket.gethostname()}" in line
            assert "set checkpointing.checkpoint_dir to another folder" in line
        reader = manager_in(tmp_path)
        assert list(reader.list_checkpoints()) == list(range(count))
        for path in reader.list_checkpoints().values():
            reader.verify(path)
            assert {file.name[0] for file in path.glob("?_*")} == {winner}
            assert reader.load_training_info(path) == {"writer": winner}
        # Reading releases no lock; the end of the process, however it comes, does.
        with pytest.raises(CheckpointError, match=f"process {pid} "):
            reader.remove_old_checkpoints()
        process = first if winner == "a" else second
        process.kill()
        process.wait(60)
        with reader.writing(count, {"writer": "c"}):
            pass
    assert reader.get_latest_checkpoint_path() == tmp_path / f"step_{count}"


def test_two_managers_of_one_process_take_turns(tmp_path: Path) -> None:
    first, second = manager_in(tmp_path), manager_in(tmp_path)
    path = first.init_tmp_checkpoint(1, {})
    (path / "weights").write_text("first")
    with pytest.raises(CheckpointError, match="written by this very process"):
        second.init_tmp_checkpoint(1, {})
    assert (path / "weights").read_text() == "first"
    first.finalize_checkpoint(path)
    # While idle it yields, and gets the right back as soon as the other is idle.
    with (
        second.writing(2, {}),
        pytest.raises(CheckpointError, match="written by this very process"),
    ):
        first.remove_old_checkpoints()
    with first.writing(3, {}):
        pass
    assert list(first.list_checkpoints()) == [1, 2, 3]


def test_a_checkpoint_whose_folder_was_taken_over_is_not_finalized(
    tmp_path: Path,
) -> None:
    manager = manager_in(tmp_path)
    path = manager.init_tmp_checkpoint(1, {})
    # As after a long suspension, or a manual cleanup.
    (tmp_path / ".writer.lock").unlink()
    with rival(tmp_path, "a", 1) as other:
        go_on(other)
        assert said(other) == "saved"
        path.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=f"written by process {other.pid}"):
            manager.finalize_checkpoint(path)
    assert list(manager.list_checkpoints()) == [0]


def test_looking_makes_no_lock(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    assert manager.get_latest_checkpoint_path() is None
    assert manager.list_checkpoints() == {}
    assert list(tmp_path.iterdir()) == []
