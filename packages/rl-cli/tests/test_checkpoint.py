"""`rl checkpoint`: showing and converting training states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_cli.main import _run
from rl_distributed.checkpoint.manifest import write_manifest
from rl_models.checkpoint.sharded import Box, Shard, write_shards, write_state

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of one weight, split over two ranks."""
    folder = tmp_path / "step_7"
    for rank in range(2):
        box = Box((4, 2), (2 * rank, 0), (2, 2))
        part = torch.full((2, 2), float(rank))
        shards = {
            "parameter/w.weight": Shard(part, box),
            "optimizer/w.weight/exp_avg": Shard(part.clone(), box),
        }
        write_shards(folder / "policy/optimizer", shards, rank, 2)
    write_state(folder / "policy/optimizer", {}, 2)
    (folder / "policy/weights").mkdir()
    (folder / "policy/weights/config.json").write_text('{"model_type": "qwen2"}')
    return folder


def test_inspect_shows_what_is_there(step: Path, capsys: Capture) -> None:
    assert _run(["checkpoint", "inspect", str(step), "--json"], False) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["num_ranks"], found["num_parameters"]) == (7, 2, 8)
    assert found["shapes"] == {"w.weight": [4, 2]}
    assert found["optimizer"] == ["exp_avg"]
    assert _run(["checkpoint", "inspect", str(step)], False) == 0
    shown = capsys.readouterr().out
    assert "2 ranks" in shown
    assert "exp_avg" in shown


def test_convert_writes_a_model_folder(
    step: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "model"
    assert _run(["checkpoint", "convert", str(step), str(out)], False) == 0
    assert capsys.readouterr().out.strip() == str(out)
    whole = load_file(out / "model.safetensors")["w.weight"]
    assert whole.tolist() == [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert _run(["checkpoint", "convert", str(step), str(out)], False) == 2
    assert "must be new" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_refused(
    step: Path, tmp_path: Path, capsys: Capture
) -> None:
    for command in (["inspect"], ["convert"]):
        more = [str(tmp_path / "out")] if command == ["convert"] else []
        code = _run(["checkpoint", *command, str(tmp_path), *more], False)
        assert code == 2
        assert "must be a checkpoint with a training state" in capsys.readouterr().err
    (step / "policy/optimizer/rank_00001_of_00002.safetensors").unlink()
    assert _run(["checkpoint", "inspect", str(step)], False) == 1
    assert "rank_00001_of_00002.safetensors is missing" in capsys.readouterr().err


def test_a_run_is_its_newest_checkpoint_and_damage_is_told(
    step: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    newest = step.rename(run / "checkpoints" / "step_7")
    write_manifest(newest)
    assert _run(["checkpoint", "inspect", str(run), "--json"], False) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["damage"]) == (7, "")
    (newest / "policy/weights/config.json").write_text("{")
    assert _run(["checkpoint", "inspect", str(newest)], False) == 1
    assert "config.json has 1 bytes" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "recipe" / "stages" / "grpo").mkdir(parents=True)
    assert _run(["checkpoint", "inspect", str(tmp_path / "recipe")], False) == 2
    assert "with several stages; give one of" in capsys.readouterr().err
