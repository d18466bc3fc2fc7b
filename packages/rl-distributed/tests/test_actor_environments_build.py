from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import rl_distributed_sample_environments as sample

from rl_distributed.actor_environments import (
    InstalledEnvironment,
    UvWorkspaceEnvironment,
    driver_wheel,
    packages,
    uv_tool,
)
from rl_distributed.errors import ActorEnvironmentError

DEADLINE_S = 120
ASK = (
    "import sys, json, importlib.metadata as m, rl_distributed, ray, numpy; "
    "print(json.dumps({'ray': ray.__version__, 'prefix': sys.prefix, "
    "'numpy': numpy.__file__, 'ours': rl_distributed.__file__, "
    "'dists': sorted(d.name for d in m.distributions()), 'path': sys.path}))"
)


def ask(python: Path) -> dict:
    done = subprocess.run(
        [python, "-c", ASK], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def wheels(tmp_path):
    sample.write_wheel(tmp_path / "wheels", "1.0")
    return tmp_path / "wheels"


@pytest.fixture
def wheelhouse():
    if not any(sample.WHEELHOUSE.glob("ray-*.whl")):
        pytest.fail(
            f"{sample.WHEELHOUSE} has no wheels: environments are built from it "
            "without a network; fill it by: python tools/wheelhouse.py fill"
        )
    return sample.WHEELHOUSE


def test_installed_packages_share_nothing_with_the_driver(tmp_path, wheels, wheelhouse):
    wanted = InstalledEnvironment(
        (f"{sample.LIBRARY}==1.0",),
        find_links=(wheels, wheelhouse),
        no_index=True,
        imports=(sample.LIBRARY,),
        preflight_deadline_s=DEADLINE_S,
    )
    prepared = wanted.prepare(tmp_path / "root")
    assert prepared.build_s > 0
    assert prepared.preflight_s > 0
    told = ask(Path(prepared.runtime_env["py_executable"]))
    assert told["ray"] == version("ray")
    assert told["prefix"] == str(tmp_path / "root" / prepared.key)
    assert told["numpy"].startswith(told["prefix"])
    assert sample.LIBRARY in [name.replace("-", "_") for name in told["dists"]]
    assert "rl-distributed" in told["dists"]
    assert "hypothesis" not in told["dists"]
    assert not any(path.startswith(sys.prefix) for path in told["path"])
    again = wanted.prepare(tmp_path / "root")
    assert (again.build_s, again.preflight_s) == (0.0, 0.0)


def test_overlay_has_the_drivers_packages_under_its_own(tmp_path, wheels):
    prepared = sample.overlay(wheels).prepare(tmp_path / "root")
    told = ask(Path(prepared.runtime_env["py_executable"]))
    assert told["numpy"].startswith(sys.prefix)
    assert "hypothesis" in told["dists"]
    assert "isolation_sample" in told["dists"]


def test_workspace_is_synced_from_its_lock(tmp_path, wheelhouse):
    wanted = UvWorkspaceEnvironment("rl-distributed", preflight_deadline_s=DEADLINE_S)
    prepared = wanted.prepare(tmp_path / "root")
    told = ask(Path(prepared.runtime_env["py_executable"]))
    assert told["ray"] == version("ray")
    assert told["numpy"].startswith(told["prefix"])
    assert Path(told["ours"]).is_relative_to(wanted.workspace)
    assert "transformers" not in told["dists"]
    assert "pytest" not in told["dists"]


def test_extra_that_the_lock_does_not_have(tmp_path):
    wanted = UvWorkspaceEnvironment("rl-distributed", "no-such-extra")
    with pytest.raises(
        ActorEnvironmentError, match=r"(?s)uv sync ended.*no-such-extra"
    ):
        wanted.prepare(tmp_path / "root")


def test_wrong_ray_in_the_requirements(tmp_path, wheels):
    wanted = InstalledEnvironment(
        ("ray==1.0",), find_links=(wheels,), no_index=True, overrides=("torch",)
    )
    with pytest.raises(ActorEnvironmentError, match=r"(?s)uv pip ended.*ray==1\.0"):
        wanted.prepare(tmp_path / "root")


def test_torch_comes_along_where_the_driver_has_it(monkeypatch):
    wanted = InstalledEnvironment(("six",))
    assert wanted.fingerprint()["own"] == "rl-distributed[torch]"

    def distribution(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(f"{packages.__name__}.distribution", distribution)
    assert wanted.fingerprint()["own"] == "rl-distributed"


def test_uv_is_found_or_named(monkeypatch, tmp_path):
    assert os.access(uv_tool.find_uv(), os.X_OK)
    monkeypatch.setitem(sys.modules, "uv", None)
    on_path = tmp_path / "uv"
    shutil.copy("/bin/true", on_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert uv_tool.find_uv() == str(on_path)
    on_path.unlink()
    with pytest.raises(
        ActorEnvironmentError, match=r"pip install rl-distributed\[environments\]"
    ):
        uv_tool.find_uv()


def test_sources_of_pip_are_handed_to_uv(monkeypatch, tmp_path):
    for name in ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels/a /wheels/b")
    monkeypatch.setenv("PIP_INDEX_URL", "file:///index")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///more")
    assert uv_tool.pip_sources() == {
        "UV_FIND_LINKS": "/wheels/a,/wheels/b",
        "UV_DEFAULT_INDEX": "file:///index",
        "UV_INDEX": "file:///more",
    }
    monkeypatch.setenv("UV_FIND_LINKS", "/own")
    assert "UV_FIND_LINKS" not in uv_tool.pip_sources()


def test_sources_of_pip_come_from_its_files(monkeypatch, tmp_path):
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\n[ "$3" = global.find-links ] && echo /wheels/c\n')
    pip.chmod(0o755)
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setattr(uv_tool.sys, "executable", str(tmp_path / "no-python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert uv_tool.pip_sources()["UV_FIND_LINKS"] == "/wheels/c"


def test_a_package_of_the_driver_is_carried(tmp_path):
    wheel = driver_wheel.write_wheel("rl-distributed", tmp_path)
    assert wheel is not None
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert any(name.endswith(".dist-info/METADATA") for name in names)
        assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    # A plain package is copied with its files, a compiled one is left to the index.
    wheel = driver_wheel.write_wheel("click", tmp_path) or tmp_path
    with zipfile.ZipFile(wheel) as archive:
        assert "click/core.py" in archive.namelist()
    assert driver_wheel.write_wheel("numpy", tmp_path) is None
    assert driver_wheel.write_wheel("no-such-package", tmp_path) is None
