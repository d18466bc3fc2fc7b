from __future__ import annotations

import subprocess
import sys

import pytest

from rl_distributed.errors import ConfigError, RegistryError
from rl_models import GenerationConfig
from rl_models.backend_forms import with_defaults
from rl_models.generation.huggingface import HuggingFaceGenerationBackend, Traits
from rl_models.generation.traits import GenerationTraits, get_generation_traits
from rl_models.policy.hosting import hosting_of
from rl_models.registry import (
    get_generation_backend,
    register_generation_backend,
)
from rl_models.training.traits import TrainingTraits


@pytest.mark.parametrize("on_gpu", [False, True])
def test_traits_ask_the_same_of_workers_as_the_backend(on_gpu):
    config = GenerationConfig(max_new_tokens=4, backend="huggingface")
    asked = [
        hosting_of(found, config, on_gpu=on_gpu)
        for found in (Traits, HuggingFaceGenerationBackend)
    ]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("name", ["huggingface", "vllm"])
def test_traits_are_found_without_the_libraries_that_sample(name):
    program = (
        "import sys\n"
        "from rl_models.registry import generation_backend_described as told\n"
        f"print(told({name!r}).__name__)\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["Traits", "[]"]


def test_a_backend_registered_in_code_has_its_own_traits():
    @register_generation_backend("with-traits-of-its-own")
    class Backend:
        """A backend that cannot sample."""

        @staticmethod
        def calls_at_once(config):
            return 3

        def setup(self, config): ...

        def generate(self, prompts, sampling_params): ...

        def update_weights(self, state_dict): ...

        def shutdown(self): ...

    traits = get_generation_traits("with-traits-of-its-own")
    assert issubclass(traits, Backend)
    config = GenerationConfig(max_new_tokens=4, backend="with-traits-of-its-own")
    hosting = hosting_of(traits, config, on_gpu=False)
    assert (hosting.calls_at_once, hosting.workers_per_replica) == (3, 1)
    assert not hosting.frees_memory
    assert get_generation_backend("with-traits-of-its-own") is Backend


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({"backend": "huggingface"}, None),
        ({"backend": "vllm", "vllm": {"async_engine": True}}, None),
        ({"backend": "vllm"}, "vllm.async_engine=false loads weights between two"),
        ({"backend": "openai"}, "backend 'openai' loads weights between two calls"),
        ({"backend": "megatron"}, "backend 'megatron' loads weights between two"),
    ],
)
def test_who_loads_weights_while_rows_are_sampled(settings, obstacle):
    config = GenerationConfig(max_new_tokens=4, **settings)
    traits = get_generation_traits(config.backend)
    found = traits.in_flight_obstacle(config)
    assert (found is None) if obstacle is None else (obstacle in found)
    if config.backend == "vllm":
        # The only one of these that starts without servers and trainers.
        if obstacle is None:
            hosting = hosting_of(traits, config, on_gpu=False, updates_in_flight=True)
            assert hosting.updates_in_flight
        else:
            with pytest.raises(ConfigError, match="updates_in_flight=True needs"):
                hosting_of(traits, config, on_gpu=False, updates_in_flight=True)
        assert not hosting_of(traits, config, on_gpu=False).updates_in_flight


def test_an_unknown_backend_is_told():
    with pytest.raises(RegistryError, match="did you mean 'huggingface'"):
        get_generation_traits("huggingfase")


def test_what_a_backend_leaves_out_has_a_default_and_what_it_says_counts():
    class Told:
        parallel_axes = ("tensor",)

        @staticmethod
        def check_config(config):
            raise ConfigError(f"got {config}")

    traits = with_defaults(Told, TrainingTraits)
    assert traits.parallel_axes == ("tensor",)
    assert not traits.has_adapters
    assert traits.worker_class == "rl_models.training.worker.TrainingWorker"
    with pytest.raises(ConfigError, match="got 3"):
        traits.check_config(3)

    class Inheriting(GenerationTraits):
        prompts = "token_ids"

    assert with_defaults(Inheriting, GenerationTraits) is Inheriting
