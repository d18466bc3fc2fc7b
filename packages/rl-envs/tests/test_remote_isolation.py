"""Environments whose workers have different packages than the driver."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rl_distributed.actor_environments import OverlayEnvironment
from rl_distributed.errors import ActorEnvironmentError
from rl_envs import (
    EnvironmentInterface,
    EnvironmentReturn,
    RemoteEnvironment,
    env_registry,
    register_env,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")

LIBRARY = "rl_envs_sample_judge"
LOGS = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 3


def write_wheel(folder: Path, version: str) -> None:
    """Write a wheel of a judge that reports its version."""
    info = f"{LIBRARY}-{version}.dist-info"
    files = {
        f"{LIBRARY}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {LIBRARY}\n"
        f"Version: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        lines.append(f"{path},sha256={digest.decode().rstrip('=')},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{LIBRARY}-{version}-py3-none-any.whl", "w") as made:
        for path, text in files.items():
            made.writestr(path, text)


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OverlayEnvironment:
    """Install version 1.0 in the driver; the environment requires 2.0."""
    wheels, own = tmp_path / "wheels", tmp_path / "driver"
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        write_wheel(wheels, version)
    with zipfile.ZipFile(wheels / f"{LIBRARY}-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(own)
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "environments"))
    monkeypatch.setattr(env_registry, "_registered", dict(env_registry._registered))
    return OverlayEnvironment(
        (f"{LIBRARY}==2.0",),
        find_links=(str(wheels),),
        no_index=True,
        preflight_deadline_s=120,
    )


def judging_class(needed: Any) -> type[EnvironmentInterface[Any]]:
    class Judging(EnvironmentInterface[Any]):
        actor_environment = needed

        def __init__(self, factor: float = 1.0) -> None:
            import rl_envs_sample_judge  # noqa: PLC0415

            self.score = factor * float(rl_envs_sample_judge.VERSION)

        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            count = len(metadata)
            return EnvironmentReturn(
                [],
                [None] * count,
                [None] * count,
                [self.score] * count,
                [True] * count,
                None,
            )

    return Judging


def test_an_environment_scores_with_another_version_than_the_driver_has(
    judge: OverlayEnvironment,
) -> None:
    judging = judging_class(judge)
    register_env("judging")(judging)
    with RemoteEnvironment(judging, num_workers=2, start_deadline_s=240) as remote:
        assert remote.step(LOGS, [{}] * 3).rewards.tolist() == [2.0] * 3
    with RemoteEnvironment("judging", {"factor": 2.0}, start_deadline_s=240) as by_name:
        assert by_name.step(LOGS, [{}] * 3).rewards.tolist() == [4.0] * 3
    assert metadata.version(LIBRARY) == "1.0"
    assert LIBRARY not in sys.modules


def test_an_environment_that_cannot_be_made_is_named(judge: OverlayEnvironment) -> None:
    missing = OverlayEnvironment(
        (f"{LIBRARY}==3.0",), find_links=judge.find_links, no_index=True
    )
    with pytest.raises(ActorEnvironmentError) as caught:
        RemoteEnvironment(judging_class(missing))
    assert "environment 'Judging' cannot run with what it declares" in str(caught.value)
    assert f"{LIBRARY}==3.0" in str(caught.value)
