"""Folders kept in memory as arrays."""

from __future__ import annotations

import stat
import subprocess
import sys
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


def test_what_a_killed_process_has_left_is_removed(places):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60.0)
    left, others = places[0] / f"rl-snapshot-{ended.pid}-1", places[0] / "rl-snapshot-x"
    with memory.passing_folder(1) as mine:
        for folder in (left, others):
            (folder / "a").mkdir(parents=True)
        with memory.passing_folder(1):
            assert not left.exists()
            assert mine.exists()
            assert Path(others, "a").exists()
