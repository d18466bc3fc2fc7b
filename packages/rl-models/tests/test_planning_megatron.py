"""The plan's memory against allocations of `megatron` ranks on a CPU."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rl_models.checkpoint.model_folder import read_model_config
from rl_models.config import PolicyConfig
from rl_models.environments import MEGATRON
from rl_models.planning.layouts import Layout
from rl_models.planning.memory import model_memory
from rl_models.planning.model_shape import ModelShape, shape_of_config
from rl_models.planning.rank_memory import MicroBatch, ModelMemory, RankWork
from rl_models.testing import build_tiny_model

SCRIPT = Path(__file__).parent / "rl_models_megatron_memory.py"
TOLERANCE = 0.05
ROWS, WIDTH = 4, 96
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 3000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
SAMPLING = {"max_new_tokens": 8, "temperature": 0.7}
AT_ONCE = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "foreach": True}}
SHORT = {"max_total_sequence_length": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "small vocabulary": ("llama", {"vocab_size": 300}, {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {}, {}),
    "experts": ("qwen3_moe", EXPERTS, {}),
    "bfloat16": ("llama", {}, {"precision": "bfloat16"}),
    "qwen3 in bfloat16": ("qwen3", {}, {"precision": "bfloat16"}),
    "recomputed": ("llama", {}, {"megatron": {"activation_checkpointing": True}}),
    "shared state": ("llama", {}, {"megatron": {"distributed_optimizer": True}}),
    "temperature": ("llama", {}, {"generation": SAMPLING}),
    "all parameters at once": (
        "llama",
        {},
        {"optimizer": AT_ONCE, "train_micro_batch_size": 1, **SHORT},
    ),
    # All-pairs attention scores would take twice what is planned.
    "long rows": ("llama", {"vocab_size": 300}, {"max_total_sequence_length": 512}),
}


def policy_of(folder: Path, case: str) -> dict[str, Any]:
    return {
        "model_name": str(folder / case),
        "backend": "megatron",
        "max_total_sequence_length": WIDTH,
        "train_micro_batch_size": ROWS,
        "tokenizer": {"name": str(folder / "tokenizer")},
        **CASES[case][2],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, and measurements of one `megatron` process."""
    made = tmp_path_factory.mktemp("memory")
    build_tiny_model(made / "tokenizer")
    for case, (family, sizes, _) in CASES.items():
        config = AutoConfig.for_model(family, **{**SIZES, **sizes})
        AutoModelForCausalLM.from_config(config).save_pretrained(made / case)
    cases = {case: policy_of(made, case) for case in CASES}
    (made / "cases.json").write_text(json.dumps(cases))
    (python,) = shlex.split(MEGATRON.resolve().prepare().runtime_env["py_executable"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free.getsockname()[1]}
    variables = {name: str(value) for name, value in place.items()}
    variables |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, str(SCRIPT), str(made)],
        env={**os.environ, **variables},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return made


def shape_of(folder: Path, case: str) -> ModelShape:
    return shape_of_config(read_model_config(folder / case) or {}, case)


def planned(
    folder: Path, case: str, layout: Layout | None = None, num_micro_batches: int = 3
) -> ModelMemory:
    policy = PolicyConfig.from_dict(policy_of(folder, case))
    # The last token of a row is only a target.
    rows = policy.train_micro_batch_size
    tokens = rows * ((policy.max_total_sequence_length or 0) - 1)
    part = MicroBatch(tokens, tokens)
    return model_memory(
        shape_of(folder, case),
        policy,
        layout or Layout(backend="megatron"),
        RankWork(part, part, num_micro_batches, on_gpu=False),
    )


@pytest.mark.parametrize("case", CASES)
def test_a_rank_needs_what_was_planned(folder: Path, case: str) -> None:
    found = json.loads((folder / "found.json").read_text())[case]
    memory = planned(folder, case)
    assert memory.weights == found["weights"]
    assert memory.optimizer == found["optimizer"]
    working = memory.training - memory.resident
    assert working == pytest.approx(found["several"], rel=TOLERANCE)
    assert found["one"] <= working * (1 + TOLERANCE)
    passing = memory.passing - memory.resident
    assert found["logprobs"] <= passing * (1 + TOLERANCE)
    assert passing <= 1.3 * found["logprobs"]


def test_copies_share_the_state_of_the_optimizer_alone(folder: Path) -> None:
    copied = Layout(data=4, backend="megatron")
    alone, four = (
        planned(folder, "shared state"),
        planned(folder, "shared state", copied),
    )
    assert four.weights == alone.weights
    assert four.optimizer == pytest.approx(alone.optimizer / 4, rel=1e-3)
    plain = planned(folder, "llama", copied)
    assert plain.optimizer == alone.optimizer
    # All parameters' gradients lie in one buffer while they accumulate.
    short = planned(folder, "small vocabulary", copied)
    assert short.training >= short.resident + 2 * short.weights


def test_ranks_that_share_layers_need_less(folder: Path) -> None:
    alone = planned(folder, "qwen3")
    cut = planned(folder, "qwen3", Layout(tensor=2, backend="megatron"))
    assert cut.weights == pytest.approx(alone.weights / 2, rel=0.01)
    assert cut.logits == pytest.approx(alone.logits / 2, rel=0.01)
    staged = Layout(pipeline=2, backend="megatron")
    stage = planned(folder, "qwen3", staged)
    assert stage.weights < alone.weights
    # Two micro-batches are in flight on the first stage, each in half of the layers.
    assert stage.activations == pytest.approx(alone.activations, rel=0.1)
    single = planned(folder, "qwen3", staged, num_micro_batches=1)
    assert single.activations < 0.6 * alone.activations
