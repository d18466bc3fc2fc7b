"""The commands of the guide on checkpoints between layouts, run verbatim."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_cli.main import _run
from rl_models.config import PolicyConfig
from rl_models.testing import build_tiny_model
from rl_models.training.dtensor import DTensorTrainingBackend

GUIDE = Path(__file__).parents[1] / "docs/guides/checkpoint-layouts.md"


def write_checkpoint(base: Path, step: Path, **settings: object) -> None:
    backend = DTensorTrainingBackend()
    config = PolicyConfig(
        model_name=str(base), max_total_sequence_length=64, **settings
    )
    backend.setup(config.to_dict())
    with torch.no_grad():
        for parameter in backend.model.trained.values():
            parameter.add_(0.01)
    backend.save_checkpoint(step / "policy/weights", step / "policy/optimizer")


def test_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build_tiny_model(tmp_path / "base")
    steps = [tmp_path / f"runs/{run}/checkpoints/step_100" for run in ("a", "lora")]
    write_checkpoint(base, steps[0])
    write_checkpoint(base, steps[1], lora={"r": 2})
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) >= 5
    for command in commands:
        assert command[0] == "rl"
        assert _run(command[1:], False) == 0, command
    for made, step in (("model", steps[0]), ("merged", steps[1])):
        found, wanted = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for folder in (tmp_path / made, step / "policy/weights")
        )
        for name, value in wanted.state_dict().items():
            torch.testing.assert_close(
                found.state_dict()[name], value, atol=1e-6, rtol=0
            )
    # Adapters alone are not a model.
    assert _run(["checkpoint", "convert", str(steps[1]), "without-base"], False) == 2
