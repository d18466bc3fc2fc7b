"""Each preset is valid and matches its paper; the user's settings win."""

from __future__ import annotations

import pytest

import rl_algorithms as rl
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.presets import Preset, find_preset, preset_names, register_preset
from rl_algorithms.registry import algorithm_settings, get_algorithm
from rl_distributed.errors import ConfigError, RegistryError

MODEL = {"policy": {"model_name": "m", "generation": {"max_new_tokens": 50}}}


def config(name: str, **settings) -> GRPOConfig:
    tree = algorithm_settings(name, {**MODEL, **settings})
    return GRPOConfig.from_dict(tree, source=name)


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_is_valid_and_says_where_it_comes_from(name):
    preset = find_preset(name)
    assert preset is not None
    assert preset.title
    assert preset.paper
    built = config(name)
    assert built.output_dir is None
    # A saved configuration reproduces the run.
    assert GRPOConfig.from_dict(built.to_dict(), source=name) == built
    assert get_algorithm(name).algorithm == preset.algorithm


def test_dapo():
    built = config("dapo")
    shaping = built.grpo.reward_shaping
    assert shaping is not None
    assert (shaping.max_response_length, shaping.overlong_buffer_length) == (50, 10)
    assert built.grpo.use_dynamic_sampling
    assert built.loss_fn.token_level_loss
    assert built.loss_fn.ratio_clip_max == 0.28
    assert not built.loss_fn.needs_reference_logprobs


def test_lengths_that_follow_from_the_generation():
    assert config("drgrpo").loss_fn.fixed_length_normalizer == 50
    given = config("dapo", grpo={"reward_shaping": {"max_response_length": 20}})
    assert given.grpo.reward_shaping is not None
    assert given.grpo.reward_shaping.overlong_buffer_length == 4
    half = config("dapo", grpo={"reward_shaping": {"overlong_buffer_fraction": 0.5}})
    assert half.grpo.reward_shaping is not None
    assert half.grpo.reward_shaping.overlong_buffer_length == 25


def test_no_reference_policy_and_a_penalty_that_needs_one_are_refused():
    asked = {"grpo": {"skip_reference_policy_logprobs_calculation": True}}
    assert not config("dapo", **asked).loss_fn.needs_reference_logprobs
    with pytest.raises(
        ConfigError, match=r"needs loss_fn\.reference_policy_kl_penalty"
    ):
        config("grpo", **asked, loss_fn={"reference_policy_kl_penalty": 0.1})


def test_rloo_and_reinforce_plus_plus_put_the_kl_into_the_reward():
    for name in ("rloo", "reinforce_plus_plus"):
        loss = config(name).loss_fn
        assert loss.needs_reference_logprobs
        assert not loss.has_kl_term
    assert config("reinforce++").grpo.num_generations_per_prompt == 1
    assert config("reinforce++-baseline").loss_fn.has_kl_term


def test_what_the_user_sets_wins():
    built = config(
        "dapo",
        grpo={"use_dynamic_sampling": False, "reward_shaping": None},
        loss_fn={"ratio_clip_max": 0.5},
    )
    assert built.grpo.reward_shaping is None
    assert not built.grpo.use_dynamic_sampling
    assert built.loss_fn.ratio_clip_max == 0.5
    assert built.loss_fn.reference_policy_kl_penalty == 0.0


def test_an_algorithm_has_no_settings_of_its_own():
    assert algorithm_settings("grpo", MODEL) == MODEL
    assert algorithm_settings("sft") == {}


def test_an_unknown_name_suggests_presets_too():
    with pytest.raises(
        RegistryError, match=r"did you mean .*'dapo'\?.*presets: cispo, "
    ):
        get_algorithm("dapoo")


def test_presets_of_ones_own():
    mine = Preset("mine", "grpo", "Mine", {"seed": 7}, aliases=("my",))
    register_preset(mine)
    register_preset(mine)
    assert config("my").seed == 7
    assert "mine" in preset_names()
    for taken in ("dapo", "reinforce++"):
        with pytest.raises(ConfigError, match="choose another name"):
            register_preset(Preset(taken, "grpo", "Mine", {}))


def test_train_puts_the_preset_beneath_its_settings(monkeypatch):
    monkeypatch.setattr(rl.GRPOTrainer, "fit", lambda trainer, *args, **kw: trainer)

    def trained(**settings) -> GRPOConfig:
        return rl.train("m", [], algorithm="dapo", **settings).config

    built = trained(ratio_clip_max=0.5, config={"seed": 5})
    assert built.grpo.use_dynamic_sampling
    assert (built.loss_fn.ratio_clip_max, built.seed) == (0.5, 5)
    # A complete configuration is taken unchanged.
    whole = GRPOConfig.from_dict(MODEL)
    assert not trained(config=whole).grpo.use_dynamic_sampling
