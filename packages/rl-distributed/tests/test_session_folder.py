from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
import ray

from rl_distributed.cluster.session_folder import (
    check_session_folder,
    create_session_folder,
)
from rl_distributed.cluster.start import init_ray
from rl_distributed.errors import ConfigError, SecurityError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short temporary folder: those of tests are too long for socket paths."""
    short = Path(f"/tmp/rl-{os.getpid()}")
    tmp_path.mkdir(exist_ok=True)
    short.symlink_to(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    yield short
    short.unlink()


def test_it_is_the_owners_only(base: Path) -> None:
    folder = create_session_folder()
    assert folder == base / f"ray-{os.getuid()}" / "ray"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    folder.parent.chmod(0o777)
    create_session_folder()
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_path_that_is_too_long(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, "/tmp/" + "x" * 60)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=rf"{variable} '/tmp/x+' is \d+ characters"):
        init_ray(address="local")
    assert not Path(os.environ[variable]).exists()


def test_the_longest_path_is_short_enough_for_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    for length in range(10, 80):
        monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * (length - 1))
        try:
            folder = check_session_folder()
        except ConfigError:
            break
        longest = length, folder
    length, folder = longest
    session = f"session_2026-11-22_12-22-39_661150_{4_194_304}"
    socket = folder / "ray" / session / "sockets" / "plasma_store"
    assert len(os.fsencode(socket)) == 107


def test_what_cannot_be_written(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "file").write_text("")
    monkeypatch.setenv("RAY_TMPDIR", str(base / "file"))
    with pytest.raises(ConfigError, match=r"Ray cannot keep .*set RAY_TMPDIR to a"):
        check_session_folder()
    monkeypatch.setenv("RAY_TMPDIR", "/proc/none")
    with pytest.raises(ConfigError, match=r"Ray cannot keep .*set RAY_TMPDIR to a"):
        create_session_folder()
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="it is not writable"):
        check_session_folder()


def test_somebody_elses_folder_is_refused(base: Path) -> None:
    (base / "real").mkdir()
    (base / f"ray-{os.getuid()}").symlink_to(base / "real")
    with pytest.raises(SecurityError, match="belongs to user"):
        create_session_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_reads_nothing_of_a_cluster(ray_cluster: None) -> None:
    session = ray._private.worker._global_node.get_session_dir_path()
    seen = subprocess.run(
        ["find", session, "-type", "f"],
        user=65_534,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert seen.stdout == ""
    assert "Permission denied" in seen.stderr
