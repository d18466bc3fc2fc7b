"""The worlds of the learning benchmark are valid, and their second checks correct."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.learning.checks import bare_answer, bare_expression, replayed_moves
from benchmarks.learning.programs import ProgramTasks
from benchmarks.learning.worlds import WORLDS, World

from rl_algorithms import KeptWorkers, get_algorithm
from rl_algorithms.data.config import DatasetConfig
from rl_algorithms.data.sources import load_configured
from rl_algorithms.registry import algorithm_settings
from rl_envs.worlds.code import CodeEnvironment

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the folder that the settings' file names are relative to."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_world_watches_its_reward_and_holds_tasks_out(name: str) -> None:
    own = World(name).stage("grpo")
    tree = algorithm_settings("grpo", own)
    config = get_algorithm("grpo").config_class.from_dict(
        {**tree, "policy": {**tree["policy"], "model_name": "a-model"}}, source=name
    )
    assert config.env.name == "second_check"
    parts = {}
    for part, given in (("train", config.data.train), ("held", config.data.validation)):
        tasks = given.tasks.model_copy(
            update={"num_rows": min(20, given.tasks.num_rows)}
        )
        rows, _ = load_configured(DatasetConfig(tasks=tasks))
        parts[part] = {row["prompt"] for row in rows}
    assert parts["train"]
    assert not parts["train"] & parts["held"]


def test_a_world_trains_for_two_steps(tmp_path: Path) -> None:
    few = {"num_rows": 8}
    sizes = {"train_global_batch_size": 8, "train_micro_batch_size": 8}
    # Without the goal, which one step does not reach.
    steps = {
        "max_num_steps": 1,
        "stop_at_validation_metric": None,
        "stop_at_validation_threshold": None,
    }
    lesson = {
        "policy": sizes,
        "data": {"train": {"tasks": few}},
        "sft": steps,
        "checkpointing": {"save_period": 1},
    }
    sampling = {
        "policy": {"train_micro_batch_size": 8},
        "data": {"train": {"tasks": few}},
        "grpo": {
            "max_num_steps": 2,
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "val_period": 1,
        },
    }
    control = {"imitation": {"sft": {"max_num_steps": 1}}}
    changes = {
        "common": {"data": {"validation": {"tasks": few}}},
        "stages": {"warmup": lesson, "grpo": sampling, **control},
    }
    with KeptWorkers() as pool:
        curve = World("countdown", changes).run(tmp_path, 1, pool)
    assert curve.steps == [0, 1, 2]
    assert all(0.0 <= value <= 1.0 for value in curve.values)
    assert set(curve.levels) == {"imitation alone"}


def test_programs_are_right_and_split_by_what_they_compute() -> None:
    tasks = ProgramTasks(3)
    train, held_out = tasks.train(60), tasks.held_out(30)
    assert not {str(r["values"]) for r in train} & {str(r["values"]) for r in held_out}
    world = CodeEnvironment({"network_namespace": False})
    try:
        for column in ("test", "hidden_test"):
            rows = [{**row, "test": row[column]} for row in train[:12]]
            logs = [
                [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["answer"] + end},
                ]
                for end in ("", "+1")
                for row in rows
            ]
            rewards = world.step(logs, [*rows, *rows]).rewards.tolist()
            assert rewards == [1.0] * 12 + [0.0] * 12
    finally:
        world.shutdown()


@pytest.mark.parametrize(
    ("response", "is_accepted"),
    [
        ("3+5*2", True),
        ("(5*2)+3", True),
        ("13", False),
        ("9+4", False),
        ("3+5*2=13", False),
        ("3+5*2 ", False),
        ("3+5*(2", False),
        ("3*5-2/", False),
        ("5*2-+3", False),
        ("", False),
    ],
)
def test_an_expression_must_be_bare_and_right(response: str, is_accepted: bool) -> None:
    numbers = [2, 5, 3]
    assert bare_expression("", response, numbers, 13) == float(is_accepted)


def test_an_answer_must_be_bare() -> None:
    assert bare_answer("", "eep", "eep") == 1.0
    assert bare_answer("", "Eep", "eep") == bare_answer("", "eep.", "eep") == 0.0


def test_moves_are_made_again() -> None:
    begun = ".12/453>"
    assert replayed_moves(f"{begun}\nL\n1.2/453>\nL\n12./453>", "U", ".12/453") == 1.0
    # An illegal move changes nothing, and the goal must not be left again.
    assert replayed_moves(f"{begun}\nR\n!.12/453>\nL", "L", ".12/453") == 0.0
    assert replayed_moves("12./453>\nD\n!12./453>", "U", "12./453") == 1.0
    assert replayed_moves("12./453>", "R", "12./453") == 0.0
