"""The time line that a run writes to its folder."""

from __future__ import annotations

import itertools
import json

import pytest

import rl_algorithms as rl

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(4)]


def trainer(pool, model, folder, **settings):
    made = rl.GRPOTrainer.from_pretrained(
        model,
        output_dir=str(folder),
        **{
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_new_tokens": 3,
            "max_total_sequence_length": 16,
            "train_micro_batch_size": 16,
            "max_num_steps": 2,
            **settings,
        },
    )
    return rl.GRPOTrainer(made.config, pool=pool)


def fit(made, **options):
    return made.fit(ROWS, reward_fn=lambda prompt, response: 1.0, **options)


def read(folder):
    lines = (folder / "timeline.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def seconds_of(record, group):
    """Return the seconds of each method of a group, or of the driver."""
    found = {}
    for row in record["rows"]:
        if row["name"].partition("[")[0] == group:
            for method, _, micros in row["calls"]:
                name = record["methods"][method]
                found[name] = found.get(name, 0.0) + micros / 1e6
    return found


def test_workers_and_phases_agree_with_the_timing_metrics(pool, tiny_model, tmp_path):
    result = fit(trainer(pool, tiny_model, tmp_path / "run"))
    records = read(tmp_path / "run")
    assert [(r["step"], r["is_start"]) for r in records] == [
        (0, True), (1, False), (2, False),
    ]  # fmt: skip
    for earlier, later in itertools.pairwise(records):
        end_s = earlier["start_s"] + earlier["seconds"]
        assert end_s == pytest.approx(later["start_s"], abs=1e-3)
    for record in records[1:]:
        metrics = result.history.at(record["step"])
        driver, policy, generation = (
            seconds_of(record, name) for name in ("driver", "policy", "generation")
        )
        for phase in ("policy_training", "generation", "advantage_calculation"):
            assert driver[phase] == pytest.approx(metrics[f"timing:{phase}"], abs=2e-3)
        assert 0 < policy["train"] <= metrics["timing:policy_training"] + 2e-3
        assert generation["generate"] > 0
        [scored] = {row["name"] for row in record["rows"]} - {
            "driver", "policy[0]", "generation[0]",
        }  # fmt: skip
        assert scored.startswith("environment")
        environment = seconds_of(record, scored.partition("[")[0])
        assert 0 < environment["step"] <= metrics["timing:generation"] + 2e-3
        assert record["seconds"] >= metrics["timing:total_step_time"] - 2e-3
    # The checkpoint of the last step, which comes after it.
    assert "checkpointing" in seconds_of(records[-1], "driver")


def test_a_resumed_run_appends(pool, tiny_model, tmp_path):
    folder = tmp_path / "run"
    fit(trainer(pool, tiny_model, folder, save_period=1))
    fit(trainer(pool, tiny_model, folder, max_num_steps=3), resume="auto")
    found = [(r["step"], r["is_start"]) for r in read(folder)]
    assert found == [(0, True), (1, False), (2, False), (2, True), (3, False)]


def test_asynchronous_runs_have_one(pool, tiny_model, tmp_path):
    ahead = {
        "grpo.asynchronous": {"max_staleness": 1},
        "loss_fn.use_importance_sampling_correction": True,
    }
    fit(trainer(pool, tiny_model, tmp_path / "run", max_num_steps=4, **ahead))
    records = read(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    methods = {
        group: {name for record in records for name in seconds_of(record, group)}
        for group in ("driver", "policy", "generation")
    }
    assert {"generation", "policy_training"} <= methods["driver"]
    assert "train" in methods["policy"]
    assert "generate" in methods["generation"]


def test_it_can_be_turned_off(pool, tiny_model, tmp_path):
    fit(trainer(pool, tiny_model, tmp_path / "run", logger={"timeline": False}))
    assert not (tmp_path / "run" / "timeline.jsonl").exists()
