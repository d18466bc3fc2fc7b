import pytest
import torch

from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.testing import (
    ContractError,
    check_generation_backend,
    check_training_backend,
)
from rl_models.training.dtensor import DTensorTrainingBackend


def test_the_dtensor_backend_keeps_the_contract(tiny_folder, tmp_path):
    def make():
        optimizer = {"kwargs": {"lr": 1e-3}}
        config = PolicyConfig.from_dict(
            {
                "model_name": str(tiny_folder),
                "optimizer": optimizer,
                "max_total_sequence_length": 64,
            }
        )
        backend = DTensorTrainingBackend()
        backend.setup(config.to_dict())
        return backend

    check_training_backend(make, tiny_folder, tmp_path)


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
