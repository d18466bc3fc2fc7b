"""Complete runs of policies that are sharded, or that train adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_run import check_kept_logprobs, recipe, write_recipe
from transformers import AutoModelForCausalLM


def _metrics(folder: Path) -> dict[str, list[float]]:
    """Return every value of each metric of the GRPO stage."""
    values: dict[str, list[float]] = {}
    for path in (folder / "out" / "stages" / "grpo").rglob("metrics.jsonl"):
        for line in path.read_text().splitlines():
            for name, value in json.loads(line).get("metrics", {}).items():
                values.setdefault(name, []).append(value)
    return values


def _train(rl: Callable[..., Any], folder: Path, data: dict[str, Any]) -> Any:
    path = write_recipe(folder, data)
    done = rl("train", path, "--json", f"output_dir={folder}/out")
    assert done.code == 0, done.err
    # Sampler and trainer computed the same log-probs, so the weights sent are the
    # trainer's.
    errors = _metrics(folder)["train:token_mult_prob_error"]
    assert len(errors) == 4
    assert all(abs(error - 1.0) < 1e-3 for error in errors), errors
    check_kept_logprobs(folder / "out" / "stages" / "grpo", num_answers=4 * 4)
    return done.json


@pytest.mark.slow
def test_a_run_whose_workers_share_each_layer(
    rl: Callable[..., Any], tmp_path: Path
) -> None:
    data = recipe()
    data["common"]["cluster"]["workers_per_node"] = 2
    data["common"]["policy"]["parallelism"] = {"tensor": 2, "sequence": True}
    data["model"]["num_key_value_heads"] = 2
    result = _train(rl, tmp_path, data)
    assert result["steps"] == 4
    weights = load_file(Path(result["checkpoint"]) / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.slow
def test_a_run_that_trains_adapters(rl: Callable[..., Any], tmp_path: Path) -> None:
    data = recipe()
    grpo = data["stages"]["grpo"]
    grpo["policy"]["lora"] = {"r": 4}
    grpo["loss_fn"] = {"reference_policy_kl_penalty": 0.1}
    result = _train(rl, tmp_path, data)
    assert result["steps"] == 4
    # The reference is the base: the policy has moved away from it.
    divergence = _metrics(tmp_path)["train:kl_penalty"]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 0
    checkpoint = Path(result["checkpoint"])
    merged = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    named = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(
        named["base_model_name_or_path"], dtype=torch.float32
    )
    adapted = PeftModel.from_pretrained(base, checkpoint / "adapter").eval()
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            merged(tokens).logits, adapted(tokens).logits, atol=1e-5, rtol=0
        )


@pytest.mark.slow
# CI trains adapters that are sent merged; rl-models compares both ways of sending.
@pytest.mark.matrix
def test_sending_adapters_alone_trains_the_same_weights(
    rl: Callable[..., Any], tmp_path: Path
) -> None:
    trained = {}
    for sync in ("merged", "adapter"):
        data = recipe()
        data["stages"]["grpo"]["policy"]["lora"] = {"r": 2, "sync": sync}
        folder = tmp_path / sync
        folder.mkdir()
        result = _train(rl, folder, data)
        trained[sync] = load_file(
            Path(result["checkpoint"]) / "adapter" / "adapter_model.safetensors"
        )
    assert trained["merged"].keys() == trained["adapter"].keys()
    for name, value in trained["merged"].items():
        assert torch.equal(trained["adapter"][name], value), name
    assert any(value.any() for name, value in trained["merged"].items() if "_B" in name)
