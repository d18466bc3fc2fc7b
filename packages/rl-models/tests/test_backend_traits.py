from __future__ import annotations

import subprocess
import sys

import pytest

from rl_distributed.errors import RegistryError
from rl_models import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend, Traits
from rl_models.policy.backend_traits import hosting_of
from rl_models.registry import (
    get_generation_backend,
    get_generation_traits,
    register_generation_backend,
)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_traits_ask_the_same_of_workers_as_the_backend(on_gpu):
    config = GenerationConfig(max_new_tokens=4, backend="huggingface")
    asked = [
        hosting_of(found, config, on_gpu=on_gpu)
        for found in (Traits, HuggingFaceGenerationBackend)
    ]
    assert asked[0] == asked[1]
    assert not hasattr(HuggingFaceGenerationBackend, "check_model")


def test_traits_are_found_without_the_libraries_that_sample():
    program = (
        "import sys\n"
        "from rl_models.registry import get_generation_traits\n"
        "print(get_generation_traits('huggingface').__name__)\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["Traits", "[]"]


def test_a_backend_registered_in_code_has_its_own_traits():
    @register_generation_backend("with-traits-of-its-own")
    class Backend:
        """Nothing samples."""

        def setup(self, config): ...

        def generate(self, prompts, sampling_params): ...

        def update_weights(self, state_dict): ...

        def shutdown(self): ...

    assert get_generation_traits("with-traits-of-its-own") is Backend
    assert get_generation_backend("with-traits-of-its-own") is Backend


def test_an_unknown_backend_is_told():
    with pytest.raises(RegistryError, match="did you mean 'huggingface'"):
        get_generation_traits("huggingfase")
