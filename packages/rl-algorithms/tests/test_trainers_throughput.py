"""Throughput metrics."""

from __future__ import annotations

import pytest
import torch

from rl_algorithms import SFTConfig
from rl_algorithms.trainers.run.throughput import Throughput, peak_tflops
from rl_models.planning.flops import ModelFlops


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
