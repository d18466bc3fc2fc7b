"""Folders kept in memory as arrays."""

from __future__ import annotations

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rl_distributed.checkpoint import memory


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Folders replacing shared memory and the one for temporary files."""
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    for folder in (shared, temporary):
        folder.mkdir()
    monkeypatch.setattr(memory, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(memory.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(
        memory.shutil, "disk_usage", lambda root: SimpleNamespace(free=100)
    )
    return shared, temporary


def test_files_come_back_as_they_were(places):
    content = {
        "weights/model.bin": np.arange(300, dtype=np.uint16).view(np.uint8),
        "a/b/empty": np.zeros(0, np.uint8),
    }
    with memory.passing_folder(600) as folder:
        memory.write_files(folder, content)
        assert (folder / "weights" / "model.bin").read_bytes() == bytes(
            content["weights/model.bin"]
        )
        found = memory.read_files(folder)
    assert not folder.exists()
    assert sorted(found) == sorted(content)
    assert all(np.array_equal(found[name], content[name]) for name in content)
    assert memory.size_of(found) == 600


@pytest.mark.parametrize(("size", "place"), [(50, 0), (51, 1), (None, 1)])
def test_in_memory_if_there_is_room(places, size, place):
    with memory.passing_folder(size) as folder:
        assert folder.parent == places[place]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_failure_removes_the_folder(places):
    def fail():
        with memory.passing_folder(1) as folder:
            (folder / "file").write_text("text")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [*places[0].iterdir()] == []


HOLD = """
import sys
import tempfile
from pathlib import Path

import numpy as np

from rl_distributed.checkpoint import memory

memory._SHARED_MEMORY = tempfile.tempdir = Path(sys.argv[1])
kept = memory.FolderInMemory({"a/b": np.frombuffer(b"text", np.uint8)}, key="k")
with memory.passing_folder(1) if sys.argv[2] == "passing" else kept.opened() as folder:
    print(folder, (folder / "a" / "b").exists(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(root, kind):
    """A process that has a folder until it is killed, or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        folder, has_files = process.stdout.readline().split()
        assert has_files == str(kind == "opened")
        yield process, Path(folder)
    finally:
        process.kill()
        process.communicate(timeout=60.0)


@pytest.mark.parametrize("kind", ["passing", "opened"])
def test_what_a_killed_process_has_left_is_removed(places, kind):
    with holder(places[0], kind) as (process, folder):
        with memory.passing_folder(1):
            assert folder.exists(), "its process is running"
        process.kill()
        process.wait(60.0)
        assert folder.exists()
        with memory.passing_folder(1) as mine:
            assert [*places[0].iterdir()] == [mine]


def test_processes_of_a_machine_share_a_folder(places):
    kept = memory.FolderInMemory({"a/b": np.frombuffer(b"text", np.uint8)}, key="k")
    with holder(places[0], "opened") as (process, folder):
        (folder / "seen").touch()
        with kept.opened() as mine:
            assert mine == folder
            assert (mine / "seen").exists(), "it is not written again"
            process.communicate(timeout=60.0)
            assert (mine / "a" / "b").read_text() == "text", "the last one removes it"
        assert not folder.exists()


def test_a_folder_that_a_writer_left_unfinished_is_written_again(places):
    kept = memory.FolderInMemory({"a": np.frombuffer(b"text", np.uint8)})
    unfinished = places[0] / f"rl-snapshot-{kept.key}"
    unfinished.mkdir()
    (unfinished / "a").write_text("te")
    with kept.opened() as folder:
        assert folder == unfinished
        assert (folder / "a").read_text() == "text"
    assert not folder.exists()


def test_many_users_of_a_folder_at_once(places):
    kept = memory.FolderInMemory({"a": np.frombuffer(b"text", np.uint8)})

    def use(_):
        for _ in range(50):
            with kept.opened() as folder:
                assert (folder / "a").read_text() == "text"

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(use, range(8), timeout=60.0))
    assert [*places[0].iterdir()] == []
