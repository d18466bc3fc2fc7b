from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from rl_algorithms import registry as algorithms
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.registry import (
    algorithm_names,
    get_algorithm,
    get_config_class,
    register_algorithm,
)
from rl_algorithms.sft.trainer import SFTTrainer
from rl_distributed import registry
from rl_distributed.errors import ConfigError, RegistryError


@pytest.mark.parametrize("name", algorithm_names())
def test_the_declared_configuration_is_that_of_the_trainer(name):
    assert name in algorithms._CONFIGS
    assert algorithms._CONFIGS.get(name) is get_algorithm(name).config_class


def test_a_preset_has_the_configuration_of_its_algorithm():
    assert get_config_class("dapo") is GRPOConfig


def test_an_unknown_name_is_told_with_the_nearest():
    with pytest.raises(RegistryError, match="did you mean 'grpo'"):
        get_config_class("grppo")


@pytest.fixture
def others(monkeypatch):
    """Return algorithms of other packages only, given as entry points by group."""
    points: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))
    for name, group in (("_ALGORITHMS", "rl.algorithms"), ("_CONFIGS", "configs")):
        monkeypatch.setattr(algorithms, name, registry.Registry(group, "algorithm"))
    return points


def point(name, value, group="rl.algorithms"):
    return EntryPoint(name, value, group)


def test_a_trainer_without_a_declared_configuration_is_asked(others):
    others["rl.algorithms"] = [point("own", "rl_algorithms.sft.trainer:SFTTrainer")]
    assert get_config_class("own") is SFTTrainer.config_class


def test_a_trainer_registered_in_code_wins_over_a_declared_configuration(others):
    others["rl.algorithms"] = [point("own", "rl_algorithms.grpo.trainer:GRPOTrainer")]
    others["configs"] = [point("own", "rl_algorithms.grpo.config:GRPOConfig")]
    assert get_config_class("own") is GRPOConfig
    register_algorithm("own")(SFTTrainer)
    assert get_config_class("own") is SFTTrainer.config_class


def test_two_packages_with_one_algorithm_are_told_also_without_an_import(others):
    others["rl.algorithms"] = [
        point("own", "rl_algorithms.grpo.trainer:GRPOTrainer"),
        point("own", "rl_algorithms.sft.trainer:SFTTrainer"),
    ]
    others["configs"] = [point("own", "rl_algorithms.grpo.config:GRPOConfig")]
    with pytest.raises(RegistryError, match="provided more than once"):
        get_config_class("own")


def test_what_is_no_trainer_has_no_configuration(others):
    others["rl.algorithms"] = [point("own", "rl_algorithms.grpo.config:GRPOConfig")]
    with pytest.raises(ConfigError, match="must be a subclass of BaseTrainer"):
        get_config_class("own")
