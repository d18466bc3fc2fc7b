"""FLOPs against hand counts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from rl_models.planning.flops import ModelFlops, gpu_peak_tflops

QWEN = Qwen2Config(
    vocab_size=50,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    tie_word_embeddings=False,
)


def test_parameters_are_those_of_the_matrices():
    flops = ModelFlops.of(QWEN)
    model = AutoModelForCausalLM.from_config(QWEN)
    matrices = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name
    )
    assert flops.matmul_parameters == matrices
    assert flops.attention_width == 3 * 24


def test_formula():
    flops = ModelFlops(matmul_parameters=10, attention_width=2)
    assert flops.training(torch.tensor([3, 5])) == 6 * 10 * 8 + 12 * 2 * (9 + 25)


def test_only_the_chosen_experts_count():
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=6,
        moe_intermediate_size=8,
        num_experts=16,
        num_experts_per_tok=2,
    )
    attention, head = 4 * 24 * 24, 24 * 50
    experts = 3 * 24 * 8 * 2 + 24 * 16
    assert ModelFlops.of(config).matmul_parameters == attention + experts + head


def test_unknown_architectures_have_no_count():
    class Config:
        model_type = "gpt2"

    assert ModelFlops.of(Config()) is None


def test_a_gpu_has_the_peak_of_its_longest_name():
    assert gpu_peak_tflops("NVIDIA H100 80GB HBM3") == 989.5
    assert gpu_peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert gpu_peak_tflops("NVIDIA H20") == 148.0
    assert gpu_peak_tflops("an unknown GPU") is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA RTX A4000", None),
        ("AMD Instinct MI250X", None),
    ],
)
def test_a_name_within_another_is_another_gpu(name, peak):
    assert gpu_peak_tflops(name) == peak
