"""`rl config import`: NeMo RL recipes become valid run files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_cli.main import _run
from rl_cli.nemo_rl.recipe_import import ImportedRecipe, import_recipe
from rl_cli.nemo_rl.their_recipe import TheirRecipe
from rl_distributed.errors import ConfigError

RECIPES = Path(__file__).parent / "nemo_rl_recipes"


RUNNABLE = ["grpo_math", "sft", "dpo", "rm", "ppo", "distillation"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(RECIPES, tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "theirs"


def stage_of(imported: ImportedRecipe) -> dict[str, Any]:
    (stage,) = imported.run["stages"].values()
    return dict(stage)


def reasons(imported: ImportedRecipe) -> dict[str, str]:
    return {entry.key: entry.why for entry in imported.left_out}


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_result_is_valid_and_says_what_is_missing(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(folder / f"{name}.yaml")
    assert _run(["config", "import", source, "-o", "ours.yaml"], False) == 0
    listed = capsys.readouterr().out
    assert _run(["config", "validate", "ours.yaml"], False) == 0
    assert "is valid" in capsys.readouterr().out
    text = Path("ours.yaml").read_text()
    left_out = import_recipe(Path(source)).left_out
    assert len(left_out) > 5
    for entry in left_out:
        assert f"  {entry}\n" in listed
        assert f"#   {entry}\n" in text
    # A second run overwrites nothing.
    assert _run(["config", "import", source, "-o", "ours.yaml"], False) == 2
    assert Path("ours.yaml").read_text() == text
    assert _run(["config", "import", source], False) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out) == yaml.safe_load(text)
    assert str(left_out[0]) in printed.err


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_key_is_looked_at(name: str, folder: Path) -> None:
    path = folder / f"{name}.yaml"
    text = path.read_text() + "invented: {first: 1, second: {third: 2}, off: false}\n"
    path.write_text(text)
    why = reasons(import_recipe(path))
    assert {key for key in why if key.startswith("invented")} == {
        "invented.first",
        "invented.second.third",
    }
    assert why["invented.first"] == "has no counterpart here"


def test_grpo(folder: Path) -> None:
    imported = import_recipe(folder / "grpo_math.yaml")
    stage, why = stage_of(imported), reasons(imported)
    assert imported.run["seed"] == 7
    policy, grpo, loss = stage["policy"], stage["grpo"], stage["loss_fn"]
    assert policy["tokenizer"]["name"] == policy["model_name"] == "org/tiny"
    assert policy["logprob_batch_size"] == 2
    assert policy["dtensor"] == {"activation_checkpointing": True}
    assert policy["sequence_packing"] == {
        "train_mb_tokens": 512,
        "logprob_mb_tokens": 1024,
        "algorithm": "modified_first_fit_decreasing",
    }
    assert policy["scheduler"]["name"] == "cosine"
    assert policy["scheduler"]["warmup_steps"] == 20
    total = policy["scheduler"]["kwargs"]
    assert total == {"total_steps": 100, "min_lr_ratio": pytest.approx(0.1)}
    generation = policy["generation"]
    assert (generation["backend"], generation["val_temperature"]) == ("vllm", 0.9)
    assert generation["max_new_tokens"] == 128
    assert "leave room" in why["policy.generation.max_new_tokens"]
    assert generation["vllm"]["gpu_memory_utilization"] == 0.5
    assert grpo["max_num_steps"] == 12
    assert grpo["val_greedy"] is False
    assert grpo["reward_shaping"]["max_response_length"] == 256
    assert "reward_scaling" not in grpo
    assert grpo["adv_estimator"] == {
        "name": "grpo",
        "normalize_rewards": True,
        "use_leave_one_out_baseline": True,
    }
    assert loss["ratio_clip_max"] == 0.28
    assert loss["kl_output_clamp_value"] is None
    assert "truncated_importance_sampling_ratio" not in loss
    assert "asynchronous" not in grpo
    assert why["policy.unknown_to_us"] == "has no counterpart here"
    data = stage["data"]
    assert data["train"] == {
        "path": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "columns": {"prompt": "problem", "answer": "expected_answer"},
    }
    assert data["prompt_template"] == "Think step by step.\n\n{prompt}\n"
    assert data["split_validation_size"] == 0.05
    assert stage["env"] == {"name": "math", "settings": {"num_workers": 4}}
    assert stage["cluster"] == {"num_nodes": 1, "workers_per_node": 2}
    assert stage["logger"]["sinks"] == ["jsonl", "tensorboard"]
    assert stage["logger"]["sample_resources_every_s"] == 5


def test_sft_dpo_and_distillation(folder: Path) -> None:
    sft = stage_of(import_recipe(folder / "sft.yaml"))
    assert sft["sft"]["val_batches"] == 8
    assert sft["data"]["only_unmask_final"] is True
    assert sft["data"]["train"]["columns"] == {"prompt": "query", "answer": "response"}
    assert sft["policy"]["lora"] == {"r": 4, "alpha": 32, "target_modules": ["q_proj"]}
    assert sft["checkpointing"]["metric_name"] == "val:val_loss"
    imported = import_recipe(folder / "dpo.yaml")
    dpo = stage_of(imported)
    assert dpo["loss_fn"]["reference_policy_kl_penalty"] == 0.1
    assert dpo["loss_fn"]["sft_loss_weight"] == 0.2
    assert dpo["checkpointing"]["metric_name"] == "val:loss"
    assert dpo["policy"]["train_global_batch_size"] == 16
    # Pairs there, rows here.
    assert dpo["policy"]["train_micro_batch_size"] == 4
    assert "pairs there" in reasons(imported)["policy.train_micro_batch_size"]
    distillation = stage_of(import_recipe(folder / "distillation.yaml"))
    assert distillation["distillation"]["topk_logits_k"] == 32
    assert distillation["loss_fn"]["kl_type"] == "mixed"
    teacher = distillation["teacher"]
    assert teacher["model_name"] == "org/large"
    assert teacher["parallelism"] == {"tensor": 2}
    assert "optimizer" not in teacher


def test_sampling_ahead(folder: Path) -> None:
    ahead = {
        "enabled": True,
        "max_trajectory_age_steps": 2,
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": True,
    }
    corrected = {"use_importance_sampling_correction": True}
    imported = changed(
        folder, "grpo_math", grpo={"async_grpo": ahead}, loss_fn=corrected
    )
    assert stage_of(imported)["grpo"]["asynchronous"] == {
        "max_staleness": 2,
        "weight_updates": "between_tokens",
    }
    name = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
    assert "grpo.asynchronous" in reasons(imported)[name]
    with pytest.raises(ConfigError, match="use_importance_sampling_correction=true"):
        changed(folder, "grpo_math", grpo={"async_grpo": ahead})


def test_rm(folder: Path) -> None:
    imported = import_recipe(folder / "rm.yaml")
    stage, why = stage_of(imported), reasons(imported)
    assert (imported.algorithm, imported.run["seed"]) == ("rm", 3)
    assert stage["rm"]["max_num_steps"] == 90
    # Rows here, pairs there.
    assert stage["policy"]["train_micro_batch_size"] == 4
    assert stage["policy"]["train_global_batch_size"] == 16
    assert "generation" not in stage["policy"]
    assert not any("reward_model_cfg" in key for key in why)
    assert stage["checkpointing"]["metric_name"] == "val:loss"


def test_ppo(folder: Path) -> None:
    imported = import_recipe(folder / "ppo.yaml")
    stage, why = stage_of(imported), reasons(imported)
    assert (imported.algorithm, imported.run["seed"]) == ("ppo", 9)
    ppo = stage["ppo"]
    assert (ppo["ppo_epochs"], ppo["critic_warmup_steps"]) == (2, 5)
    # Their lambda for the policy leaves the one for values unchanged.
    assert (ppo["gae_lambda"], ppo["gae_lambda_value"]) == (0.9, 0.95)
    assert (ppo["gae_gamma"], ppo["normalize_advantages"]) == (1.0, True)
    assert ppo["reward_scaling"]["target_min"] == -1.0
    assert stage["critic"]["train_micro_batch_size"] == 4
    assert stage["critic"]["optimizer"]["kwargs"]["lr"] == 1e-5
    assert stage["loss_fn"]["positive_nll_coef"] == 0.1
    assert stage["value_loss_fn"] == {"scale": 0.5, "cliprange": 0.2}
    assert "length" in why["ppo.adv_estimator.length_adaptive_alpha"]
    assert "critic alone" in why["ppo.policy_training_start_step"]
    assert ppo["asynchronous"] == {"max_staleness": 1}
    off = changed(folder, "ppo", ppo={"async_ppo": {"enabled": False}})
    assert "asynchronous" not in stage_of(off)["ppo"]
    estimator = {"name": "raw_reward"}
    raw = changed(folder, "ppo", ppo={"adv_estimator": estimator})
    assert stage_of(raw)["ppo"]["gae_lambda"] == 1.0
    assert "critic" in reasons(raw)["ppo.adv_estimator.name"]


def changed(folder: Path, name: str, **sections: Any) -> ImportedRecipe:
    path = folder / "changed.yaml"
    path.write_text(yaml.safe_dump({"defaults": f"{name}.yaml", **sections}))
    return import_recipe(path)


def test_megatron_takes_its_own_layout_and_schedule(folder: Path) -> None:
    config = {
        "enabled": True,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "optimizer": {"optimizer": "adam", "lr": 4e-6, "min_lr": 4e-7},
        "scheduler": {
            "lr_decay_style": "linear",
            "lr_decay_iters": 100,
            "lr_warmup_iters": 10,
        },
        "moe_permute_fusion": True,
    }
    imported = changed(folder, "grpo_math", policy={"megatron_cfg": config})
    policy = stage_of(imported)["policy"]
    assert policy["backend"] == "megatron"
    assert policy["parallelism"] == {"tensor": 2, "pipeline": 2, "sequence": True}
    assert policy["optimizer"]["kwargs"]["lr"] == 4e-6
    assert policy["scheduler"] == {
        "name": "linear",
        "warmup_steps": 10,
        "kwargs": {"total_steps": 100, "min_lr_ratio": pytest.approx(0.1)},
    }
    assert any(
        "moe_permute_fusion" in k or "megatron_cfg" in k for k in reasons(imported)
    )


@pytest.mark.parametrize(
    ("cluster", "resources", "trainer", "generator"),
    [
        ((1, 8), {"gpus_per_node": 6}, (1, 2), (1, 6)),
        ((1, 2), {"gpus_per_node": None, "num_nodes": None}, (1, 1), (1, 1)),
        ((4, 8), {"num_nodes": 1, "gpus_per_node": 8}, (3, 8), (1, 8)),
    ],
)
def test_a_generator_apart_gets_its_cluster(
    folder: Path,
    cluster: tuple[int, int],
    resources: dict[str, Any],
    trainer: tuple[int, int],
    generator: tuple[int, int],
) -> None:
    apart = {"enabled": False, "resources": resources}
    size = dict(zip(("num_nodes", "gpus_per_node"), cluster, strict=True))
    imported = changed(
        folder, "grpo_math", policy={"generation": {"colocated": apart}}, cluster=size
    )
    stage = stage_of(imported)
    names = "num_nodes", "workers_per_node"
    assert tuple(stage["cluster"][name] for name in names) == trainer
    assert tuple(stage["generation_cluster"][name] for name in names) == generator
    assert not [key for key in reasons(imported) if "colocated" in key]


def test_a_generator_apart_must_leave_the_trainer_something(folder: Path) -> None:
    apart = {"enabled": False, "resources": {"gpus_per_node": 8}}
    with pytest.raises(ConfigError, match=r"some of the 1 x 8 GPUs of cluster: got"):
        changed(
            folder,
            "grpo_math",
            policy={"generation": {"colocated": apart}},
            cluster={"num_nodes": 1, "gpus_per_node": 8},
        )


@pytest.mark.parametrize(
    ("cluster", "resources", "message"),
    [
        ({"num_nodes": "2"}, {}, r"cluster\.num_nodes must be a whole number: got '2'"),
        ({"gpus_per_node": "8"}, {}, r"cluster\.gpus_per_node must be a whole number"),
        (
            {},
            {"gpus_per_node": "4"},
            r"resources\.gpus_per_node must be a whole",
        ),
        ({}, {"num_nodes": 1.5}, r"resources\.num_nodes must be a whole number"),
        (
            {"num_nodes": 2},
            {"num_nodes": 1, "gpus_per_node": 16},
            r"must not exceed cluster\.gpus_per_node \(8\): got 16",
        ),
    ],
)
def test_sizes_of_clusters_that_cannot_be_are_refused(
    folder: Path, cluster: dict[str, Any], resources: dict[str, Any], message: str
) -> None:
    apart = {"enabled": False, "resources": resources}
    with pytest.raises(ConfigError, match=message):
        changed(
            folder,
            "grpo_math",
            policy={"generation": {"colocated": apart}},
            cluster={"num_nodes": 1, "gpus_per_node": 8, **cluster},
        )


def test_megatron_samples_in_the_workers_that_train(folder: Path) -> None:
    generation = {"backend": "megatron", "colocated": {"enabled": False}}
    imported = changed(
        folder,
        "grpo_math",
        policy={"megatron_cfg": {"enabled": True}, "generation": generation},
    )
    why = reasons(imported)["policy.generation.colocated.enabled"]
    assert "in the workers that train" in why
    assert "generation_cluster" not in stage_of(imported)


def test_what_is_not_here_is_named(folder: Path) -> None:
    imported = changed(
        folder,
        "grpo_math",
        policy={
            "precision": "float16",
            "generation": {"backend": "sglang"},
            "draft": {"enabled": True, "model_name": "small"},
            "scheduler": [{"name": "a.First"}, {"name": "b.Second"}],
        },
        grpo={
            "reward_shaping": {"enabled": False},
            "batch_multiplier": 2,
            "invalid_tool_call_advantage": -1.0,
            "adv_estimator": {"name": "gdpo", "reward_weights": [1.0, 2.0]},
        },
        loss_fn={"positive_example_nll_weight": 0.1},
        logger={"swanlab_enabled": True},
        data={"train": {"dataset_name": "squad"}, "default": {"env_name": "code"}},
        env={"code": {"num_workers": 2}},
    )
    why, stage = reasons(imported), stage_of(imported)
    assert "bfloat16" in why["policy.precision"]
    assert "vllm" in why["policy.generation.backend"]
    assert "draft" in why["policy.draft.*"]
    assert "policy.scheduler" in why["policy.scheduler"]
    assert "samples the prompts" in why["grpo.batch_multiplier"]
    assert "reward function" in why["grpo.invalid_tool_call_advantage"]
    assert "by the names" in why["grpo.adv_estimator.reward_weights"]
    assert "ppo" in why["loss_fn.positive_example_nll_weight"]
    assert "MetricSink" in why["logger.swanlab_enabled"]
    assert "made of its raw rows" in why["data.train.dataset_name"]
    assert "code is not here" in why["env.*"]
    assert "env" not in stage
    assert "train" not in stage["data"]


def test_files_that_are_no_recipes_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="one of the sections grpo, sft, dpo"):
        import_recipe(folder / "policy_base.yaml")
    with pytest.raises(ConfigError, match="got grpo, sft"):
        changed(folder, "grpo_math", sft={"seed": 1})
    with pytest.raises(ConfigError, match="ratio_clip_c"):
        changed(folder, "grpo_math", loss_fn={"ratio_clip_c": 0.5})
    assert _run(["config", "import", "nothing.yaml"], False) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Answer in \\boxed{{}}.\n{}\n", "Answer in \\boxed{{}}.\n{prompt}\n"),
        ("{0:>4} in {{x}}", "{prompt:>4} in {{x}}"),
        ("without a place", "without a place"),
    ],
)
def test_a_template_keeps_its_literal_braces(
    theirs: str, ours: str, folder: Path
) -> None:
    (folder / "cot.txt").write_text(theirs)
    template = stage_of(import_recipe(folder / "grpo_math.yaml"))["data"][
        "prompt_template"
    ]
    assert template == ours
    assert template.format(prompt="1+1") == theirs.format("1+1")


def test_values_of_several_lines_stay_comments(folder: Path) -> None:
    text = "be brief\nseed: 7\n"
    recipe = {"defaults": "grpo_math.yaml", "policy": {"unknown_to_us": text}}
    (folder / "changed.yaml").write_text(yaml.safe_dump(recipe))
    source = str(folder / "changed.yaml")
    assert _run(["config", "import", source, "-o", "ours.yaml"], False) == 0
    written = Path("ours.yaml").read_text()
    assert "#   policy.unknown_to_us = be brief seed: 7: has no" in written
    assert yaml.safe_load(written) == import_recipe(folder / "changed.yaml").run


def test_a_file_that_cannot_be_written_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(folder / "grpo_math.yaml")
    assert _run(["config", "import", source, "-o", "gone/ours.yaml"], False) == 2
    assert "gone/ours.yaml cannot be written: No such" in capsys.readouterr().err


def test_long_values_are_cut_in_the_list() -> None:
    recipe = TheirRecipe({"text": "x" * 200, "off": None}, Path())
    recipe.leave_rest()
    (entry,) = recipe.left_out
    assert str(entry) == f"text = {'x' * 60}...: has no counterpart here"
