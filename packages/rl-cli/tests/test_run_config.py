from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_cli import run_stages as compose
from rl_cli.run_config import check_run, load_run, recipe_names, run_from_dict
from rl_distributed.errors import UserError


def refused(name: str, *overrides: str, config: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_run(name, config, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid(name: str) -> None:
    run = load_run(name, None, [])
    assert run.stages
    assert run_from_dict(run.source) == run


def test_overrides_reach_recipe_common_and_stages() -> None:
    run = load_run(
        "quickstart",
        None,
        [
            "seed=7",
            "common.policy.max_total_sequence_length=48",
            "stages.grpo.grpo.num_prompts_per_step=4",
            "stages.warmup.policy.optimizer.kwargs.lr=1e-4",
            "report.num_samples=0",
        ],
    )
    warmup, grpo = run.stages
    assert run.seed == warmup.config.seed == grpo.config.seed == 7
    assert {s.config.policy.max_total_sequence_length for s in run.stages} == {48}
    assert grpo.config.grpo.num_prompts_per_step == 4
    assert warmup.config.policy.optimizer.kwargs["lr"] == 1e-4
    assert run.report.num_samples == 0


def test_stages_take_the_context_of_the_model_that_is_handed_on() -> None:
    keys = ["~common.policy.max_total_sequence_length", "model.max_position_embeddings"]
    run = load_run("quickstart", None, [keys[0], f"{keys[1]}=24"])
    assert {s.config.policy.max_total_sequence_length for s in run.stages} == {24}


def test_a_stage_can_be_removed() -> None:
    run = load_run("quickstart", None, ["~stages.grpo"])
    assert [stage.name for stage in run.stages] == ["warmup"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sead=7", "seed"),
        ("stages.grpo.grpo.num_promts_per_step=4", "num_prompts_per_step"),
        ("common.policy.max_total_sequence_lenght=4", "max_total_sequence_length"),
        ("stages.grpo.grpo.num_prompts_per_step=many", "num_prompts_per_step"),
        ("grpo.num_prompts_per_step=4", "stages.grpo.grpo.num_prompts_per_step"),
        ("stages.grpo.policy.model_name=x", "model_name"),
        ("model.hidden_size=63", "hidden_size"),
        ("stages.gpro.seed=1", "no stage 'gpro'"),
        ("stages.grpo.algorithm=gpro", "did you mean 'grpo'"),
        ("seed", "seed"),
    ],
)
def test_wrong_overrides_are_named_with_a_remedy(override: str, said: str) -> None:
    assert said in refused("quickstart", override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=x", 'seed must be an integer: got "x"'),
        ("model.hidden_size=0", "model.hidden_size must be greater than 0: got 0"),
        ("stages.grpo.grpo.max_num_steps=-1", "grpo.max_num_steps must be greater"),
        ("stages.grpo.grpo.num_promts=3", "grpo.num_promts is not a known key"),
        ("stages.grpo={grpo: {max_num_steps: -1}}", "grpo.max_num_steps must be"),
        ("common.policy.train_global_batch_size=0", "policy.train_global_batch_size"),
        ("common.polcy.x=1", "polcy is not a known key; did you mean 'policy'?"),
    ],
)
def test_what_an_override_set_wrong_is_named_as_it_was_written(
    override: str, said: str
) -> None:
    message = refused("quickstart", override)
    assert message.startswith(said)
    assert message.endswith(f"(override {override!r})")


def test_wrong_values_of_a_recipe_file_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "title: mine\n"
        "stages:\n"
        "  sft:\n"
        "    policy: {model_name: model}\n"
        "    sft:\n"
        "      max_num_steps: -3\n"
    )
    said = "sft.max_num_steps must be greater than 0: got"
    assert refused(str(path)) == f"{said} -3 ({path}:6)"
    # A value overridden in a section no longer comes from the file.
    override = "stages.sft={sft: {max_num_steps: -4}}"
    assert refused(str(path), override) == f"{said} -4 (override {override!r})"
    assert load_run(str(path), None, ["stages.sft.sft.max_num_steps=2"]).stages


@pytest.mark.parametrize("override", [(), ("grpo.x=1",), ("stages.sft.seed=1",)])
@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("stages: [sft]", "stages"),
        ("stages:\n  sft:", "stages.sft"),
        ("model: {}\nstages:\n  sft: {policy: tiny}", "policy"),
    ],
)
def test_sections_that_are_none_are_named_whatever_is_overridden(
    lines: str, key: str, override: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"title: x\n{lines}\n")
    said = refused(str(file), *override)
    if override != ("grpo.x=1",):  # which is wrong as well
        assert f"{key} must be a mapping" in said
        assert "mine.yaml:" in said


def test_unknown_name_lists_recipes_and_algorithms() -> None:
    message = refused("quikstart")
    assert "quickstart" in message
    assert "grpo" in message
    assert "sft" in message


def test_a_preset_is_an_algorithm_with_settings_beneath_the_users(
    tmp_path: Path,
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("policy: {model_name: m}\nloss_fn: {ratio_clip_max: 0.3}\n")
    run = load_run("dapo", path, ["grpo.dynamic_sampling_max_gen_batches=3"])
    (stage,) = run.stages
    assert run.name == stage.algorithm == "dapo"
    assert stage.config.grpo.use_dynamic_sampling
    assert stage.config.grpo.dynamic_sampling_max_gen_batches == 3
    assert stage.config.loss_fn.ratio_clip_max == 0.3
    assert stage.config.loss_fn.ratio_clip_min == 0.2
    assert run_from_dict(run.source) == run
    assert "or 'dapo'?" in refused("dappo")


def test_a_stage_can_name_a_preset() -> None:
    run = load_run("quickstart", None, ["stages.grpo.algorithm=rloo"])
    config = run.stages[1].config
    assert config.loss_fn.disable_ppo_ratio
    # The recipe takes precedence.
    assert config.loss_fn.reference_policy_kl_penalty == 0.0


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "nothing.yaml" in refused("nothing.yaml")
    assert "gone.yaml" in refused("grpo", config=tmp_path / "gone.yaml")


def test_config_belongs_to_an_algorithm(tmp_path: Path) -> None:
    assert "--config" in refused("quickstart", config=tmp_path / "a.yaml")


def test_algorithm_with_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"policy": {"model_name": "m"}, "seed": 1}))
    run = load_run("grpo", path, ["grpo.num_prompts_per_step=2", "seed=3"])
    (stage,) = run.stages
    assert (stage.algorithm, stage.config.seed) == ("grpo", 3)
    assert stage.config.policy.model_name == "m"
    assert run_from_dict(run.source) == run


def test_wrong_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("policy: {model_name: m}\ngrpo: {num_prompt_per_step: 2}\n")
    message = refused("grpo", config=path)
    assert "my.yaml" in message
    assert "num_prompts_per_step" in message


def test_algorithm_without_model_says_what_is_missing() -> None:
    assert "policy" in refused("grpo")


def test_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    recipe = {
        "title": "mine",
        "stages": {"only": {"algorithm": "sft", "policy": {"model_name": "m"}}},
    }
    path.write_text(yaml.safe_dump(recipe))
    run = load_run(str(path), None, [])
    assert run.name == "mine"
    assert run.stages[0].config.policy.model_name == "m"


def test_recipe_without_stages_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("title: x\nstages: {}\n")
    assert "at least one stage" in refused(str(path))


def test_a_critic_begins_with_the_model_that_is_handed_on():
    data = {
        "seed": 1,
        "policy": {"model_name": "(handed on)"},
        "critic": {"model_name": "(handed on)", "head": "value"},
        "teacher": {"model_name": "large"},
        "early_stop": None,
    }
    found = compose._with_model(data, "runs/sft/model")
    assert found == {
        "policy": {"model_name": "runs/sft/model"},
        "critic": {"model_name": "runs/sft/model"},
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.grpo.policy.generation.backend=vlm", "'vllm'"),
        ("stages.grpo.policy.backend=dtensr", "'dtensor'"),
        ("stages.grpo.policy.optimizer.kwargs.lrr=1e-3", "lrr"),
        ("stages.grpo.policy.optimizer.kwargs.betas=3", "policy.optimizer.kwargs"),
        ("stages.grpo.policy.optimizer.name=torch.optim.Adamw", "torch.optim.Adamw"),
        ("stages.grpo.policy.scheduler.name=cosin", "policy.scheduler.name"),
        ("stages.grpo.env.name=sort", "'sorting'"),
        ("stages.grpo.data.train.tasks.world=sort", "'sorting'"),
        ("stages.grpo.data.train.tasks.settings.num_digit=4", "num_digits"),
    ],
)
def test_what_the_last_stage_names_is_checked_before_the_first_begins(
    override: str, said: str
) -> None:
    run = load_run("quickstart", None, [override])
    with pytest.raises(UserError) as caught:
        check_run(run)
    assert said in str(caught.value)
    assert caught.value.__notes__ == ["in stage grpo"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.model_name=/no/such", "/no/such"),
        ("data.train=nofile.jsonl", "nofile.jsonl"),
        ("data.validation=[{path: data/a/b/c}]", "data/a/b/c"),
    ],
)
def test_missing_files_are_found_without_a_run(override: str, said: str) -> None:
    run = load_run("sft", None, ["policy.model_name=org/name", override])
    with pytest.raises(UserError, match=said) as caught:
        check_run(run)
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_names_what_there_is(name: str) -> None:
    check_run(load_run(name, None, []))
