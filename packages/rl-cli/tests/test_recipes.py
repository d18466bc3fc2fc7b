"""Every recipe is listed, valid, fits its GPUs, and trains at reduced scale."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matrix_cells import cells

from rl_algorithms import KeptWorkers
from rl_algorithms.trainers.progress import ProgressDisplay
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_cli import run_stages
from rl_cli.console import Terminal
from rl_cli.main import _run
from rl_cli.recipe_files import AboutConfig, recipe_names, recipe_path, summarize
from rl_cli.run_config import load_run
from rl_cli.run_folder import RunFolder
from rl_distributed import ConfigError
from rl_distributed.config import load_config
from rl_distributed.testing import local_ray
from rl_models import ModelBuildConfig, build_model

Capture = pytest.CaptureFixture[str]
NAMES = [name for name in recipe_names() if name != "quickstart"]
# Its workers need the environment of Megatron-core: tests/test_megatron_recipe.py.
# Sorted by algorithm, because runs of one shape share their processes.
TRAINED = sorted(
    (name for name in NAMES if name != "megatron-32b"),
    key=lambda name: (summarize(name).algorithm.replace("dapo", "grpo"), name),
)
# One recipe per algorithm.
COVERING = {summarize(name).algorithm: name for name in TRAINED}.values()
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "name a bird"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "tulu3": [
        {"messages": [*TALK, {"role": "assistant", "content": f"bird {n}"}]}
        for n in range(8)
    ],
    "helpsteer3": [
        {"context": [{"role": "user", "content": f"bird {n}?"}], "response1": "a wren",
         "response2": "a stone", "overall_preference": (-1) ** n}
        for n in range(8)
    ],
    "gsm8k": [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)],
    "dapo_math": [{"prompt": f"{n} + 2?", "solution": f"{n + 2}"} for n in range(8)],
    "deepscaler": [
        {"problem": f"{n} + 3?", "answer": f"{n + 3}", "solution": ""} for n in range(8)
    ],
    "mbpp": [
        {"text": f"add {n}", "code": f"def f(a):\n    return a + {n}\n",
         "test_list": [f"assert f(1) == {n + 1}"]}
        for n in range(8)
    ],
    "math": [
        {"problem": f"{n} * 2?", "solution": f"\\boxed{{{2 * n}}}"} for n in range(4)
    ],
}  # fmt: skip
HELD_OUT: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "30 + 1?", "answer": "#### 31"}],
    "helpsteer3": [
        {**ROWS["helpsteer3"][0], "context": [{"role": "user", "content": "fish?"}]}
    ],
    "mbpp": [{**ROWS["mbpp"][0], "text": "add 30"}],
    "math": ROWS["math"],
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and a small file of each published schema."""
    folder = tmp_path_factory.mktemp("recipes")
    characters = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = {"characters": characters, "chat_template": CHAT}
    config = ModelBuildConfig.from_dict({**SIZES, "tokenizer": tokenizer})
    build_model(config, folder / "model", seed=1)
    for prefix, files in (("train", ROWS), ("held_out", HELD_OUT)):
        for name, rows in files.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{prefix}_{name}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[KeptWorkers]:
    with local_ray(num_cpus=6), KeptWorkers() as kept:
        yield kept


def stage_of(name: str) -> tuple[str, dict[str, Any]]:
    path = recipe_path(name)
    assert path is not None
    ((stage, config),) = load_config(path)["stages"].items()
    return stage, config


def in_small(name: str, place: Path) -> list[str]:
    """Return overrides that replace only model, data and scale."""
    stage, config = stage_of(name)
    algorithm = config["algorithm"]
    section = {"dapo": "grpo"}.get(algorithm, algorithm)
    policy, data, settings = config["policy"], config["data"], config[section]
    small: dict[str, Any] = {
        "policy.model_name": place / "model",
        "policy.precision": "float32",
        "policy.max_total_sequence_length": 384,
        "policy.train_global_batch_size": 4,
        "policy.train_micro_batch_size": 2,
        "policy.scheduler": "null",
        "cluster": "{workers_per_node: 1, use_gpus: false}",
        "checkpointing.save_period": 1,
        f"{section}.max_num_steps": 1,
        f"{section}.val_period": 1,
        f"{section}.val_at_end": "false",
        "data.train.path": place / f"train_{data['train']['format']}.jsonl",
    }
    if "generation_cluster" in config:
        small["generation_cluster"] = small["cluster"]
    if "sequence_packing" in policy:
        small["policy.sequence_packing.train_mb_tokens"] = 384
    if "max_input_seq_length" in data:
        small["data.max_input_seq_length"] = 256
    if "validation" in data:
        held_out = place / f"held_out_{data['validation']['format']}.jsonl"
        small["data.validation.path"] = held_out
    else:
        small["data.split_validation_size"] = 2
    if "teacher" in config:
        small["teacher.model_name"] = place / "model"
    if "env" in config and "num_workers" in config["env"].get("settings", {}):
        small["env.settings.num_workers"] = 1
    if "generation" in policy:
        small |= sampled_in_small(algorithm, section, settings)
    return [f"stages.{stage}.{key}={value}" for key, value in small.items()]


def sampled_in_small(
    algorithm: str, section: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return overrides that also change where answers are sampled."""
    small: dict[str, Any] = {
        "policy.generation.backend": "huggingface",
        "policy.generation.precision": "float32",
        "policy.generation.max_new_tokens": 8,
        f"{section}.num_prompts_per_step": 4,
    }
    if settings.get("num_generations_per_prompt", 1) > 1:
        small["policy.train_global_batch_size"] = 8
        small[f"{section}.num_generations_per_prompt"] = 2
    # A tiny random model earns nothing, so no group has variance.
    if settings.get("drop_zero_variance_groups"):
        small["grpo.drop_zero_variance_groups"] = "false"
    if algorithm == "dapo":
        small["grpo.use_dynamic_sampling"] = "false"
    if "critic_warmup_steps" in settings:
        small["ppo.critic_warmup_steps"] = 0
    return small


@pytest.mark.parametrize("name", cells(TRAINED, COVERING))
def test_a_recipe_trains_in_small(
    name: str,
    place: Path,
    pool: KeptWorkers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_stages, "KeptWorkers", lambda: contextlib.nullcontext(pool))
    overrides = in_small(name, place)
    assert _run(["config", "validate", name, *overrides], False) == 0
    run = load_run(name, None, overrides)
    display = ProgressDisplay(Terminal(quiet=True).err)
    folder = RunFolder.create(run.name, str(tmp_path / "run"), run.source)
    with folder, SignalGuard() as guard:
        outcome = run_stages.carry_out(run, folder, display, guard, resume=False)
    (result,) = outcome.stages.values()
    assert result["steps"] == 1
    assert (outcome.checkpoint / "model.safetensors").is_file()
    assert any(metric.startswith("val:") for metric in outcome.metrics)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_valid_as_it_stands(name: str, capsys: Capture) -> None:
    assert _run(["config", "validate", name], False) == 0
    said = capsys.readouterr().out
    # No setting is made inert by another key.
    assert said.splitlines() == [said.strip()]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_fits_the_gpus_that_it_names(name: str, capsys: Capture) -> None:
    assert _run(["plan", name, "--json"], False) == 0
    plan = json.loads(capsys.readouterr().out)
    gpus = summary_about(name).planned_for
    assert plan["fits"] is (None if gpus is None else True)
    if gpus is not None:
        config = load_run(name, None, []).stages[0].config
        cluster, apart = config.cluster, config.sampling_cluster
        beside = 0 if apart is None else apart.num_bundles
        assert (cluster.num_nodes, cluster.workers_per_node + beside) == (
            gpus.num_nodes,
            gpus.per_node,
        )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("agents-gsm8k", "asynchronous: tokens come from weights"),
        ("tools-gsm8k", "on-policy: each answer is used once"),
    ],
)
def test_a_plan_says_how_stale_answers_may_be(
    name: str, said: str, capsys: Capture
) -> None:
    assert _run(["plan", name], False) == 0
    assert said in " ".join(capsys.readouterr().out.replace("│", " ").split())


def summary_about(name: str) -> AboutConfig:
    return load_run(name, None, []).about


def test_other_gpus_can_be_planned_for(capsys: Capture) -> None:
    assert _run(["plan", "dapo-math-7b", "--gpus", "8x24GB", "--json"], False) == 2
    assert "does not fit" in capsys.readouterr().err


def test_the_list_says_what_each_takes(capsys: Capture) -> None:
    assert _run(["recipes", "--json"], False) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(listed) == recipe_names()
    for entry in listed.values():
        assert all(entry.values()), entry
        assert "measured" in entry["time"] or "estimated" in entry["time"]
    assert listed["quickstart"]["algorithm"] == "sft, grpo"
    assert listed["dapo-math-7b"]["hardware"] == "8 GPUs with 80 GB"
    assert listed["megatron-32b"]["hardware"] == "4 nodes of 8 GPUs with 80 GB"
    assert _run(["recipes"], False) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in listed)


def test_a_recipe_is_printed_with_its_comments(capsys: Capture) -> None:
    assert _run(["recipes", "show", "dapo-math-7b"], False) == 0
    path = recipe_path("dapo-math-7b")
    assert path is not None
    assert capsys.readouterr().out == path.read_text()
    assert _run(["recipes", "show", "dapo-math"], False) == 2
    assert "did you mean 'dapo-math-7b'" in capsys.readouterr().err


def test_a_recipe_of_ones_own_need_not_say_what_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("title: mine\nstages: {sft: {policy: {model_name: a/b}}}\n")
    found = summarize(str(file))
    assert (found.algorithm, found.model, found.hardware) == ("sft", "a/b", "no GPU")
    file.write_text("title: mine\nabout: {gpus: eight}\nstages: {sft: {}}\n")
    with pytest.raises(ConfigError, match=r"about\.?.*gpus|gpus.*8x80GB"):
        summarize(str(file))


def test_the_table_of_the_guide_is_that_of_the_recipes() -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "recipes.md"
    lines = page.read_text().splitlines()
    assert (
        table_of(recipe_names())
        == [line for line in lines if line.startswith("| `")][: len(recipe_names())]
    )


def table_of(names: Sequence[str]) -> list[str]:
    """Return the rows of the guide's table."""
    rows = map(summarize, names)
    return [
        f"| `{row.name}` | {row.algorithm} | {row.model} | {row.hardware} | "
        f"{row.time} | {row.purpose} |"
        for row in rows
    ]
