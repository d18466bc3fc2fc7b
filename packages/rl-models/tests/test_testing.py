import re
import threading

import pytest
import torch

from rl_models import testing
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.testing import (
    ContractError,
    build_tiny_model,
    check_generation_backend,
    check_training_backend,
    check_weights_in_flight,
)
from rl_models.training.dtensor import DTensorTrainingBackend


# With as many key heads as query heads, their weights have the same shape.
@pytest.mark.parametrize("num_key_value_heads", [2, 4])
def test_the_dtensor_backend_keeps_the_contract(tmp_path, num_key_value_heads):
    folder = build_tiny_model(
        tmp_path / "model", num_key_value_heads=num_key_value_heads
    )

    def make():
        optimizer = {"kwargs": {"lr": 1e-3}}
        config = PolicyConfig.from_dict(
            {
                "model_name": str(folder),
                "optimizer": optimizer,
                "max_total_sequence_length": 64,
            }
        )
        backend = DTensorTrainingBackend()
        backend.setup(config.to_dict())
        return backend

    check_training_backend(make, folder, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("logprobs", "log-probs must be those of the model"),
        ("weight_version", "version must start at 0"),
        ("generation_lengths", "lengths must add up"),
    ],
)
def test_broken_generation_backends_are_found(tiny_folder, fault, rule):
    class Broken(HuggingFaceGenerationBackend):
        def generate(self, data, **settings):
            output = super().generate(data, **settings)
            shift = torch.ones_like(output[fault])
            output[fault] = (
                output[fault]
                + shift * (output[fault] != 0)
                + (shift if fault == "weight_version" else 0)
            )
            return output

    def make():
        backend = Broken()
        config = GenerationConfig(max_new_tokens=8)
        backend.setup(config.to_dict(), model_name=str(tiny_folder))
        return backend

    with pytest.raises(ContractError, match=rule):
        check_generation_backend(make, tiny_folder)


def test_tokens_that_name_other_weights_are_found(tiny_folder):
    class Newest(HuggingFaceGenerationBackend):
        def generate(self, data, **settings):
            output = super().generate(data, **settings)
            versions = output["token_versions"]
            versions[versions >= 0] = self.weight_version
            output["weight_version"] = versions.max(1).values
            return output

    def make(kind):
        backend = kind()
        config = GenerationConfig(max_new_tokens=32, stop_token_ids=[])
        backend.setup(config.to_dict(), model_name=str(tiny_folder))
        return backend

    check_weights_in_flight(lambda: make(HuggingFaceGenerationBackend), tiny_folder)
    with pytest.raises(ContractError, match="weights that token_versions names"):
        check_weights_in_flight(lambda: make(Newest), tiny_folder)


def test_a_backend_whose_updates_wait_is_found(tiny_folder, monkeypatch):
    class Waiting(HuggingFaceGenerationBackend):
        lock = threading.Lock()

        def generate(self, data, **settings):
            with self.lock:
                return super().generate(data, **settings)

        def load_weights(self, tensors, version):
            with self.lock:
                return super().load_weights(tensors, version)

    def make():
        backend = Waiting()
        config = GenerationConfig(max_new_tokens=8)
        backend.setup(config.to_dict(), model_name=str(tiny_folder))
        return backend

    monkeypatch.setattr(testing, "_MOST_CALLS", 2)
    with pytest.raises(ContractError, match="must not wait for the end of a call"):
        check_weights_in_flight(make, tiny_folder)


def test_an_update_that_mixes_up_weights_is_found(tmp_path):
    folder = build_tiny_model(tmp_path, num_key_value_heads=4)

    class Swapping(HuggingFaceGenerationBackend):
        def load_weights(self, tensors, version):
            swapped = {"q_proj": "k_proj", "k_proj": "q_proj"}
            renamed = [
                (re.sub("[qk]_proj", lambda found: swapped[found[0]], name), value)
                for name, value in tensors
            ]
            return super().load_weights(iter(renamed), version)

    def make():
        backend = Swapping()
        config = GenerationConfig(max_new_tokens=8)
        backend.setup(config.to_dict(), model_name=str(folder))
        return backend

    with pytest.raises(ContractError, match="must take the place of its name"):
        check_generation_backend(make, folder)
