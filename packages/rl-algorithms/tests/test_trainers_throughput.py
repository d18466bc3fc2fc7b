"""Operations against hand counts, and figures per second."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from rl_algorithms import SFTConfig
from rl_algorithms.trainers.run.throughput import ModelFlops, Throughput, peak_tflops

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


def test_no_utilisation_on_a_cpu_without_a_peak():
    config = SFTConfig.from_dict({"policy": {"model_name": "m"}})
    assert peak_tflops(config) is None
    assert peak_tflops(config.replace(peak_tflops_per_worker=2.5)) == 2.5


def test_figures_of_a_step():
    meter = Throughput(2, ModelFlops(10, 2), peak=1e-9)
    rows = {
        "input_lengths": torch.tensor([3, 5, 5]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    meter.note_trained(rows)
    timing = {"total_step_time": 4.0, "policy_training": 2.0}
    figures = meter.take({"num_samples": 2.0, "num_tokens": 8.0}, timing)
    operations = 6 * 10 * 8 + 12 * 2 * 34
    assert figures["tokens_per_sec"] == 2.0
    assert figures["tokens_per_sec_per_worker"] == 1.0
    assert figures["policy_training_tokens_per_sec"] == 4.0
    assert figures["train_flops_per_worker"] == operations / 2.0 / 2
    assert figures["train_fp_utilization"] == pytest.approx(operations / 4 / 1000.0)
    assert "generation_tokens_per_sec" not in figures
    again = meter.take({"num_tokens": 8.0}, timing)
    assert "train_fp_utilization" not in again, "each step counts its own rows"
