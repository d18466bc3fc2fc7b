"""The recipe for a model larger than a node, scaled down: two by two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_distributed.testing import local_ray
from rl_models import ModelBuildConfig, build_model

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tokenizer": {"characters": "".join(map(chr, range(32, 127))) + "\n"},
}
ROWS = [
    {"problem": f"{n} + 1?", "generated_solution": f"It is {n + 1}.",
     "expected_answer": str(n + 1), "problem_source": "made"}
    for n in range(16)
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_of_32_b_trains_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build_model(ModelBuildConfig.from_dict(SHAPE), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    # Only model, data and scale: each layer is sharded, and the layers are distributed
    # as on the four nodes.
    small = {
        "policy.model_name": "model",
        "policy.parallelism": "{tensor: 2, sequence: true, pipeline: 2}",
        "policy.max_total_sequence_length": 64,
        "policy.train_global_batch_size": 4,
        "policy.scheduler": "null",
        "data.train.path": "rows.jsonl",
        "data.train.split": "null",
        "data.split_validation_size": 4,
        "sft.max_num_steps": 2,
        "sft.val_period": 1,
        "cluster": "{num_nodes: 1, workers_per_node: 4, use_gpus: false}",
        "checkpointing.save_period": 1,
    }
    overrides = [f"stages.sft.{key}={value}" for key, value in small.items()]
    assert _run(["config", "validate", "megatron-32b", *overrides], False) == 0
    words = ["output_dir=run", "report.plot=false", "--quiet", "--json"]
    with local_ray(num_cpus=4):
        assert _run(["train", "megatron-32b", *overrides, *words], False) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 2
    assert result["measure"] == "val:val_loss"
    # Of 97 characters with nearly equal probability.
    assert 3.0 < result["end"] < 6.0
    # The shards of all ranks form one model again, which transformers can load.
    assert (Path(result["checkpoint"]) / "config.json").is_file()
    assert list(Path(result["checkpoint"]).glob("*.safetensors"))
