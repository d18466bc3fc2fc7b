"""`rl config explain` and `rl config schema`."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest
import yaml

from rl_cli.commands.env import Row
from rl_cli.config_schema import schema_of
from rl_cli.console import table
from rl_cli.main import _run

NARROW = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))


def explained(capsys: pytest.CaptureFixture[str], *names: str) -> list[str]:
    assert _run(["config", "explain", *names], False) == 0
    return capsys.readouterr().out.splitlines()


def test_a_key_has_its_type_limits_default_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explained(capsys, "grpo", "num_prompts_per_step") == [
        "grpo.num_prompts_per_step",
        "    int; greater than 0; default 32",
        "    Number of prompts per step.",
    ]


def test_a_section_stands_for_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "sft", "policy.optimizer")
    keys = [line for line in lines if not line.startswith(" ")]
    assert keys == [
        "policy.optimizer",
        "policy.optimizer.name",
        "policy.optimizer.kwargs",
    ]


def test_without_an_algorithm_those_that_have_the_key_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = explained(capsys, "policy.model_name")
    assert lines[0] == "policy.model_name"
    assert "required" in lines[1]
    assert lines[-1].strip() == "of distillation, dpo, grpo, ppo, rm, sft"


def test_keys_of_a_recipe_are_those_of_its_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = explained(capsys, "quickstart", "policy.model_name")
    assert lines[-1].strip() == "of warmup, grpo"


def test_the_default_of_a_preset_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    explain = ["config", "explain", "dapo", "ratio_clip_max", "--json"]
    assert _run(explain, False) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["path"], entry["default"]) == ("loss_fn.ratio_clip_max", "0.28")


def test_keys_that_may_change_meanwhile_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "may change during a run"
    assert words in explained(capsys, "grpo", "grpo.val_period")[1]
    kwargs = " ".join(explained(capsys, "grpo", "policy.optimizer.kwargs"))
    assert f"lr, weight_decay {words}" in " ".join(kwargs.split())
    assert words not in " ".join(explained(capsys, "grpo", "seed"))
    teacher = explained(capsys, "distillation", "teacher.optimizer.kwargs")
    assert words not in " ".join(teacher)


def test_every_line_fits_and_no_key_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = explained(capsys, "grpo")
    assert max(map(len, lines)) <= NARROW
    assert _run(["config", "explain", "grpo", "--json"], False) == 0
    paths = [row["path"] for row in json.loads(capsys.readouterr().out)]
    assert [line for line in lines if not line.startswith(" ")] == paths


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_promts_per_step", "did you mean 'num_prompts_per_step'"),
        ("grppo", "did you mean 'grpo'"),
        ("zzz", "rl config explain grpo lists the keys"),
    ],
)
def test_an_unknown_key_is_named(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["config", "explain", name], False) == 2
    assert said in capsys.readouterr().err


def test_a_table_that_is_too_wide_becomes_a_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rl_cli.console import Terminal  # noqa: PLC0415

    name, key = "rl_models.generation.vllm", "rl-models-vllm-cpu-6cbfbc05f7ac6c9a"
    row = Row(name, "UvWorkspace", "ready", key, size_bytes=1 << 31, last_use=1e9)
    columns = ["name", "way", "state", "size", "last use", "key or reason"]
    Terminal().result(table("Environments", columns, [row.shown()]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= NARROW
    assert lines[:2] == ["Environments", name]
    cells = "    way: UvWorkspace   state: ready   size: 2048 MiB"
    assert lines[2].startswith(cells)
    assert lines[-1] == f"    key or reason: {key}"


def test_a_table_that_is_too_wide_leaves_out_what_can_be_spared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rl_cli.console import Terminal  # noqa: PLC0415

    columns = ["run", "stage", "what", "state"]
    rows = [("r" * 30, "s" * 20, "w" * 16, "finished")]
    Terminal().result(table("Runs", columns, rows, spare=["stage", "what"]))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= NARROW
    assert "s" * 20 not in out
    assert all(value in out for value in ("r" * 30, "w" * 16, "finished"))
    assert out.splitlines()[-1] == "left out at this width: stage"


def test_a_table_that_fits_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    from rl_cli.console import Terminal  # noqa: PLC0415

    rows = [("torch", "ok", "many words " * 9)]
    Terminal().result(table("Doctor", ["what", "state", "found"], rows))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("\N{BOX DRAWINGS HEAVY DOWN AND RIGHT}")
    assert max(map(len, lines)) <= NARROW


def errors_of(name: str, document: object) -> list[str]:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(document)]


def test_the_schema_of_an_algorithm_knows_keys_limits_and_short_forms() -> None:
    right = {
        "defaults": "base.yaml",
        "seed": "${oc.env:SEED}",
        "policy": {"model_name": "m"},
        "data": {"train": "rows.jsonl", "validation": ["a.jsonl"]},
        "grpo": {"num_prompts_per_step": 8},
    }
    assert errors_of("grpo", right) == []
    assert "'sede' was unexpected" in errors_of("dapo", {"sede": 1})[0]
    assert errors_of("grpo", {"grpo": {"num_prompts_per_step": 0}}) != []
    teacher = {"policy": {"model_name": "m"}, "teacher": "path/to/teacher"}
    assert errors_of("distillation", teacher) == []


def test_the_schema_of_recipes_knows_the_keys_of_each_stage() -> None:
    file = resources.files("rl_cli") / "recipes" / "quickstart.yaml"
    document = yaml.safe_load(file.read_text())
    assert errors_of("recipe", document) == errors_of("quickstart", document) == []
    document["stages"]["warmup"]["grpo"] = {}
    assert any("'grpo' was unexpected" in e for e in errors_of("recipe", document))


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["config", "schema", "sft"], False) == 0
    printed = json.loads(capsys.readouterr().out)
    place = printed["$defs"]["SFTSettings"]["properties"]["val_period"]
    assert (
        place["description"] == "Number of steps between two validations; 0 for none."
    )
