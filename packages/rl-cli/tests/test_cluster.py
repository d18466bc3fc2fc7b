from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_cli.main import _run
from rl_distributed.launch import (
    KubeRayConfig,
    SlurmConfig,
    kuberay_manifest,
    slurm_script,
)


def test_slurm_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["cluster", "slurm", "num_nodes=2", "command=[a,b c]"], False) == 0
    expected = slurm_script(SlurmConfig(command=["a", "b c"], num_nodes=2))
    assert capsys.readouterr().out == expected


def test_kuberay_reads_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"name": "demo", "image": "i", "ray_version": "2.60.0"}
    file = tmp_path / "demo.yaml"
    file.write_text(yaml.safe_dump(settings))
    line = ["cluster", "kuberay", "--config", str(file), "num_workers=3"]
    assert _run(line, False) == 0
    expected = kuberay_manifest(KubeRayConfig(**settings, num_workers=3))
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["cluster", "slurm"], "command"),
        (["cluster", "slurm", "command=[x]", "num_node=2"], "num_nodes"),
        (["cluster", "kuberay", "name=A_B", "image=i", "ray_version=2"], "lower-case"),
        (["cluster", "slurm", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_wrong_settings_are_user_errors(
    line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(line, False) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
