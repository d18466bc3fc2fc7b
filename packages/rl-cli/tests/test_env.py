from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rl_cli.main import _run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user file with two environments: one to build, one interpreter."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "envsample-1.0.dist-info"
    with zipfile.ZipFile(wheels / "envsample-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("envsample.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: envsample\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", f"envsample.py,,\n{info}/RECORD,,\n")
    (tmp_path / "environments.yaml").write_text(
        "environments:\n"
        "  package.worker:\n"
        "    overlay: [envsample==1.0]\n"
        f"    find_links: [{wheels}]\n"
        "    no_index: true\n"
        "    preflight_deadline_s: 120\n"
        f"  package.other: {{python: {sys.executable}, preflight_deadline_s: 120}}\n"
    )
    monkeypatch.setenv("RL_ENV_CONFIG", str(tmp_path / "environments.yaml"))
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "root"))
    return tmp_path


def rows(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    assert _run(["env", *arguments, "--json"], False) == code
    listed = json.loads(capsys.readouterr().out)
    return {row["name"] or row["key"]: row for row in listed}


def test_list_build_check_prune(folder: Path, capsys: Capture) -> None:
    listed = rows(capsys, "list")
    assert listed["package.worker"]["state"] == "absent"
    assert listed["package.worker"]["way"] == "Overlay"
    assert listed["package.other"]["state"] == "given"

    assert rows(capsys, "check", "package.worker", code=1)["package.worker"][
        "detail"
    ] == ('it is absent; run: rl env build "package.worker"')
    built = rows(capsys, "build", "package.worker")["package.worker"]
    assert built["state"] == "ready"
    assert built["size_bytes"] > 0
    assert Path(built["path"], "bin", "python").exists()

    fits = rows(capsys, "check")
    assert {name: row["state"] for name, row in fits.items()} == {
        "package.worker": "fits",
        "package.other": "fits",
    }
    assert (
        rows(capsys, "check", "package.worker", "--import", "envsample")[
            "package.worker"
        ]["state"]
        == "fits"
    )
    unfit = rows(capsys, "check", "package.other", "--import", "envsample", code=1)
    assert "cannot import 'envsample'" in unfit["package.other"]["detail"]

    assert rows(capsys, "prune", "--all") == {}  # it was handed out just now
    assert _run(["env", "prune", "--all"], False) == 0
    assert "1 kept" in capsys.readouterr().err
    old = time.time() - 9 * 86_400
    os.utime(Path(built["path"], ".last-use"), (old, old))
    assert rows(capsys, "prune") == {}
    assert list(rows(capsys, "prune", "--unused-days", "7", "--dry-run")) == [
        built["key"]
    ]
    assert list(rows(capsys, "prune", "--unused-days", "7")) == [built["key"]]
    assert rows(capsys, "list")["package.worker"]["state"] == "absent"


def test_list_shows_what_nothing_declares_any_more(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = rows(capsys, "build", "package.worker")["package.worker"]
    monkeypatch.delenv("RL_ENV_CONFIG")
    listed = rows(capsys, "list")
    assert listed[built["key"]]["way"] == "driver + envsample==1.0"
    assert _run(["env", "list"], False) == 0
    assert "MiB" in capsys.readouterr().out


def test_empty(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "root"))
    assert _run(["env", "prune"], False) == 0
    assert "Removed: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "package.workr"], "did you mean 'package.worker'"),
        (["build", "rl-models[vlm-cpu]"], "did you mean 'vllm-cpu'"),
        (["prune", "--all", "--unused-days", "3"], "mutually exclusive"),
        (["prune", "--unused-days", "-3"], "--unused-days"),
        (["forge"], "forge"),
    ],
)
def test_wrong_input_leaves_with_two(
    folder: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    assert _run(["env", *arguments], False) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["list", "build", "check", "prune"])
def test_help_has_examples(name: str, capsys: Capture) -> None:
    assert _run(["env", name, "--help"], False) == 0
    assert "Examples:" in capsys.readouterr().out


def test_list_imports_neither_ray_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from rl_cli.main import _run; _run(['env', 'list'], False); "
        "print([m for m in ('ray', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
