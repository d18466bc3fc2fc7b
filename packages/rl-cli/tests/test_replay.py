"""`rl replay` and `rl diff` on recorded runs of a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rl_cli.main import _run
from rl_distributed.testing import local_ray
from rl_models.build.model import ModelBuildConfig, build_model

Capture = pytest.CaptureFixture[str]
SETTINGS = (
    "policy.optimizer.kwargs.lr=0.01",
    "policy.train_global_batch_size=4",
    "policy.max_total_sequence_length=32",
    "sft.max_num_steps=2",
    "record_training=true",
    "checkpointing.save_period=1",
)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with local_ray(num_cpus=4):
        yield


@pytest.fixture(scope="module")
def runs(ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two identical SFT runs."""
    folder = tmp_path_factory.mktemp("runs")
    shape = ModelBuildConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = build_model(shape, folder / "tiny")
    rows = [
        {"prompt": f"{a}+{b}=", "response": str(a + b)}
        for a in (1, 2)
        for b in (3, 4, 5, 6)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name in ("a", "b"):
        settings = (f"policy.model_name={model}", f"output_dir={folder / name}")
        command = ["train", "sft", *settings, f"data.train={data}", *SETTINGS]
        assert _run([*command, "--json"], False) == 0
        found.append(folder / name)
    return found[0], found[1]


def shown(capsys: Capture, *command: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = _run([*command, "--json"], False)
    return code, json.loads(capsys.readouterr().out)


def changed(path: Path, name: str) -> None:
    tensors = load_file(path)
    tensors[name].view(-1)[3] += 1
    save_file(tensors, path)


def test_a_run_is_replayed(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    again = tmp_path / "again"
    code, found = shown(capsys, "replay", str(runs[0]), "--to", str(again))
    assert (code, found["same"], found["last_step"]) == (0, True, 2)
    assert found["checkpoint"] == str(runs[0] / "checkpoints" / "step_2")
    weights = "policy/weights/model.safetensors"
    theirs = runs[0] / "checkpoints" / "step_2" / weights
    assert (again / weights).read_bytes() == theirs.read_bytes()
    part = ("--from-checkpoint", "1", "--steps", "1")
    assert _run(["replay", str(runs[0]), *part], False) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Steps 2 to 2 are the same, bit by bit; weights and")
    assert "step 2 of 2: same" in said.err


def test_a_changed_byte_is_named_by_both_commands(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    code, found = shown(capsys, "diff", *map(str, runs))
    verdicts = {part["name"]: part["verdict"] for part in found["parts"]}
    assert (code, verdicts["rows"]) == (0, "same")
    folder = shutil.copytree(runs[0], tmp_path / "copy")
    path = next((folder / "recording").glob("step_000002-*.safetensors"))
    changed(path, "input_ids")
    code, found = shown(capsys, "replay", str(folder))
    assert (code, found["difference"]["step"]) == (1, 2)
    what = f"column input_ids of the rows of the policy ({path.name})"
    assert found["difference"]["what"] == what
    code, found = shown(capsys, "diff", str(runs[0]), str(folder))
    first = found["first"]
    assert (code, first["part"], first["step"]) == (1, "rows", 2)
    assert first["what"] == "column input_ids of call 0 (policy), row 0, token 3"
    assert first["second"] == first["first"] + 1
    assert first["details"] == {"num_elements": 1}


def test_wrong_input_is_told(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    folder = shutil.copytree(runs[0], tmp_path / "copy")
    for options, said in (
        ((), "has no recording of its training"),
        (("--stage", "grpo"), "has no stage 'grpo' to replay"),
        (("--from-checkpoint", "7"), "has no step from 8 on"),
        (("--steps", "0"), "must be an integer from 1"),
    ):
        place = runs[0] if options else folder
        if not options:
            shutil.rmtree(folder / "recording")
        assert _run(["replay", str(place), *options], False) == 2
        assert said in " ".join(capsys.readouterr().err.split())
