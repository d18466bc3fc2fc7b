"""Ray's session folders: who owns them, and when they are removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_distributed.cluster.session_owner import (
    _LOCK,
    owned_session,
    prune_sessions,
    release_sessions,
)

OWNER = """
import sys
from pathlib import Path
from rl_distributed.cluster.session_owner import owned_session
folder = Path(sys.argv[1])
import os
with owned_session(folder):
    for number in range(int(sys.argv[2])):
        (folder / f"session_2026-01-0{number + 1}_{os.getpid()}" / "logs").mkdir(
            parents=True
        )
print("owned", flush=True)
sys.stdin.read()
"""


class Owner:
    """A program that has started sessions, and runs until told to exit."""

    def __init__(self, folder: Path, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "owned\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_sessions()


def names(folder: Path) -> list[str]:
    return sorted(path.name[8:18] for path in folder.iterdir())


def test_those_of_a_living_program_stay_and_those_of_a_dead_one_go(
    tmp_path: Path,
) -> None:
    owner = Owner(tmp_path, 5)
    try:
        assert prune_sessions(tmp_path, num_kept=0) == []
        assert len(names(tmp_path)) == 5
    finally:
        owner.kill()
    assert len(prune_sessions(tmp_path)) == 2
    assert names(tmp_path) == ["2026-01-03", "2026-01-04", "2026-01-05"]
    assert len(prune_sessions(tmp_path, num_kept=0)) == 3
    assert names(tmp_path) == []


def test_those_of_other_programs_stay(tmp_path: Path) -> None:
    other = tmp_path / "session_2020-01-01_00-00-00_000000_1"
    other.mkdir()
    kept = tmp_path / "elsewhere"
    (kept / "logs").mkdir(parents=True)
    (kept / _LOCK).touch()
    (tmp_path / "session_latest_1").symlink_to(kept)
    assert prune_sessions(tmp_path, num_kept=0) == []
    assert other.is_dir()
    assert (kept / "logs").is_dir()


def test_one_that_a_process_still_names_stays(tmp_path: Path) -> None:
    Owner(tmp_path, 1).kill()
    [session] = tmp_path.iterdir()
    wait = "import sys; print('up', flush=True); sys.stdin.read()"
    worker = subprocess.Popen(
        [sys.executable, "-c", wait, f"--temp-dir={session}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "up\n"
    assert prune_sessions(tmp_path, num_kept=0) == []
    worker.communicate(timeout=60)
    assert prune_sessions(tmp_path, num_kept=0) == [session]


def test_one_that_failed_to_start_is_owned_too(tmp_path: Path) -> None:
    session = tmp_path / f"session_2026-01-01_{os.getpid()}"
    earlier = tmp_path / f"session_2025-01-01_{os.getpid()}"
    earlier.mkdir()

    def start() -> None:
        with owned_session(tmp_path):
            session.mkdir()
            raise OSError("no start")

    with pytest.raises(OSError, match="no start"):
        start()
    assert prune_sessions(tmp_path, num_kept=0) == []
    release_sessions()
    # The earlier one may be from another container with the same number.
    assert prune_sessions(tmp_path, num_kept=0) == [session]
    assert earlier.is_dir()


START = """
from rl_distributed.cluster.start import init_ray, shutdown_ray
init_ray(num_cpus=1, address="local")
shutdown_ray()
"""


def test_a_start_removes_old_ones_and_owns_its_own(tmp_path: Path) -> None:
    short = Path(f"/tmp/rl-{os.getpid()}-own")
    short.symlink_to(tmp_path)
    folder = tmp_path / f"ray-{os.getuid()}" / "ray"
    folder.mkdir(parents=True, mode=0o700)
    try:
        Owner(folder, 4).kill()
        env = os.environ | {"RAY_TMPDIR": str(short)}
        env.pop("RAY_ADDRESS", None)
        subprocess.run([sys.executable, "-c", START], env=env, check=True, timeout=180)
    finally:
        short.unlink()
    sessions = [path for path in folder.glob("session_2*") if path.is_dir()]
    assert len(sessions) == 4
    assert all((session / _LOCK).is_file() for session in sessions)
    assert not (folder / "session_2026-01-01").exists()
    assert len(prune_sessions(folder, num_kept=0)) == 4
