"""A checkpoint folder after its writer was killed, and on a disk that is full."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
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


def manager_in(folder: Path) -> CheckpointManager:
    return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder)))


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    reached = 0
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        try:
            for _ in range(rng.randint(2, 5)):
                line = child.stdout.readline()
                assert line, "the writer ended by itself"
                reached = int(line)
            # Somewhere inside of the next save, which takes some 10 ms.
            signal.sigtimedwait([], rng.random() * 0.02)  # the moment of the kill
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
            child.wait(30)
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where the tests may mount one."""
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
    assert sorted(p.name for p in manager.checkpoint_dir.iterdir()) == ["step_1"]
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
    assert list(tmp_path.iterdir()) == []
