"""Runs whose generator has a cluster of its own (section `generation_cluster`)."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import rl_algorithms as rl
import rl_models
from rl_algorithms.distillation.config import DistillationConfig
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.ppo.config import PPOConfig
from rl_algorithms.testing import weights_digest
from rl_algorithms.trainers.ahead.start import check_ahead
from rl_algorithms.trainers.setup.component_checks import check_components
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_algorithms.trainers.setup.starting import Starter
from rl_algorithms.trainers.steps.memory_turns import share_devices
from rl_distributed.errors import ConfigError, ResourceInsufficientError

ROWS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
NEEDS = Needs(generation=True, environment=True)
SETTINGS = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "max_num_steps": 4,
    "max_num_epochs": None,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 64,
    "lr": 1e-2,
}
APART = {"generation_cluster": {"workers_per_node": 2}}
AHEAD = {
    "grpo.asynchronous": {"max_staleness": 1},
    "loss_fn.use_importance_sampling_correction": True,
}


def trainer(pool, model, folder, **settings):
    made = rl.GRPOTrainer.from_pretrained(
        model, output_dir=str(folder), **{**SETTINGS, **settings}
    )
    return rl.GRPOTrainer(made.config, pool=pool)


def sevens(prompt, response):
    return float(response[:1] == "7")


def fit(*args, **settings):
    return trainer(*args, **settings).fit(ROWS, reward_fn=sevens, progress=False)


def digest(result):
    checkpoint = result.model_path.parents[1]
    assert list(checkpoint.glob("*/weights/*"))
    return weights_digest(checkpoint)


def config(**sections):
    policy = {"model_name": "m", "max_total_sequence_length": 16}
    policy["generation"] = {"max_new_tokens": 4, **sections.pop("generation", {})}
    return GRPOConfig.from_dict({"policy": policy, **sections}, source="test")


def test_samples_the_same_and_keeps_both_clusters(pool, tiny_model, tmp_path):
    expected = digest(fit(pool, tiny_model, tmp_path / "turns"))
    result = fit(pool, tiny_model, tmp_path / "apart", **APART)
    assert digest(result) == expected
    policy, generation = pool.parts["policy"], pool.parts["generation"]
    assert generation.num_replicas == 2
    assert generation.cluster is pool.parts["generation_cluster"]
    assert policy.cluster is pool.parts["cluster"] is not generation.cluster
    assert policy.cluster.max_colocated_worker_groups == 1
    assert not share_devices(policy, generation)

    ahead = fit(pool, tiny_model, tmp_path / "ahead", **APART, **AHEAD)
    assert max(ahead.history.column("train:asynchronous/staleness_max")[1]) == 1.0
    # The same section, so the same processes.
    assert pool.parts["generation"] is generation

    fit(pool, tiny_model, tmp_path / "again")
    assert pool.parts["generation"].cluster is pool.parts["cluster"]
    assert generation.cluster.is_shut_down


def test_refused_where_both_do_not_fit(pool, tiny_model, tmp_path):
    apart = {"generation_cluster": {"workers_per_node": 4}}
    with pytest.raises(
        ResourceInsufficientError, match="'generation_cluster', beside the others"
    ):
        fit(pool, tiny_model, tmp_path, **apart)


def test_refused_beside_a_generator_that_is_given():
    given = Components(policy=object(), generation=object(), environment=object())
    with pytest.raises(ConfigError, match="generation_cluster is for a generator that"):
        check_components(config(**APART), given, NEEDS, object())


def test_refused_beside_a_policy_that_samples_by_itself():
    class Own:
        def generate(self, rows):
            return rows

        def train(self, rows):
            return {}

    made = config(checkpointing={"enabled": False}, **APART)
    given = Components(policy=Own(), environment=object())
    with pytest.raises(ConfigError, match="or a policy that samples by itself"):
        check_components(made, given, NEEDS, object())


@pytest.mark.parametrize(
    ("kind", "sections"),
    [(GRPOConfig, {}), (PPOConfig, {}), (DistillationConfig, {"teacher": "t"})],
)
def test_refused_where_the_training_workers_sample(kind, sections):
    generation = {"backend": "megatron", "max_new_tokens": 4}
    policy = {"model_name": "m", "backend": "megatron", "generation": generation}
    with pytest.raises(ConfigError, match="generation_cluster is for a generator with"):
        kind.from_dict({"policy": policy, **sections, **APART}, source="test")


def test_refused_where_nothing_is_sampled():
    sections = {"distillation": {"on_policy": False}, "teacher": "t", **APART}
    with pytest.raises(ConfigError, match="generation_cluster"):
        DistillationConfig.from_dict(
            {"policy": {"model_name": "m"}, **sections}, source="test"
        )


def test_the_trainers_machines_are_taken_first(monkeypatch):
    """The generator might take half of each node, and leave the trainer none whole."""
    order = []

    class Cluster:
        def __init__(self, name):
            self.name = name

        def place(self):
            order.append(self.name)

    def generator(cluster, *settings, **more):
        order.append(cluster.name)
        return SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setattr(rl_models, "GenerationPolicy", generator)
    with ExitStack() as closing:
        starter = Starter(config(**APART), closing)
        trainer, sampler = Cluster("cluster"), Cluster("generation_cluster")
        starter.generation(sampler, None, trainer)
        starter.generation(trainer, None, trainer)
    assert order == ["cluster", "generation_cluster", "cluster"]


def test_a_start_that_fails_leaves_no_machines_in_a_pool(
    ray_cluster, tiny_model, tmp_path
):
    with rl.KeptWorkers() as own:
        made = trainer(own, tiny_model, tmp_path / "fails", **APART)
        broken = made.config.replace(
            policy=made.config.policy.replace(model_name=str(tmp_path / "none"))
        )
        with pytest.raises(Exception, match="none"):
            rl.GRPOTrainer(broken, pool=own).fit(ROWS, reward_fn=sevens, progress=False)
        assert own.parts == {}


@pytest.mark.parametrize(
    ("sections", "is_refused"),
    [
        ({}, True),
        (APART, False),
        ({"generation": {"backend": "huggingface"}}, True),
        ({"generation": {"backend": "openai"}}, False),
    ],
)
def test_sampling_ahead_on_gpus_needs_one(sections, is_refused):
    made = config(
        cluster={"use_gpus": True},
        grpo={"asynchronous": {"max_staleness": 1}},
        loss_fn={"use_importance_sampling_correction": True},
        **sections,
    )
    if not is_refused:
        check_ahead(made, Components(), NEEDS)
        return
    with pytest.raises(ConfigError, match="section generation_cluster"):
        check_ahead(made, Components(), NEEDS)
