"""Runs that continue after training workers are killed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matrix_cells import cells
from safetensors.torch import load_file

import rl_algorithms as rl
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.worker_recovery import Recovery
from rl_distributed.errors import ConfigError, WorkerDiedError
from rl_models.build.model import ModelBuildConfig, build_model

ROWS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
GRPO = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 16,
    "lr": 3e-3,
    "max_num_steps": 5,
    "save_period": 2,
    "val_period": 2,
}


def seven(prompt, response):
    return 1.0 if response[:1] == "7" else 0.1 * len(response)


class Killer(rl.Callback):
    """Kills a model's workers once when a phase of each given step begins."""

    def __init__(self, *moments, model="policy", again=0, number=signal.SIGKILL):
        self.left = list(moments)
        self.model, self.again, self.number = model, again, number

    def on_phase(self, trainer, steps_done, phase, step, total):
        if (step, phase) not in self.left:
            return
        if self.again:
            self.again -= 1
        else:
            self.left.remove((step, phase))
        models = [self.model] if isinstance(self.model, str) else self.model
        for model in models:
            for pid in getattr(trainer.components, model).group.worker_pids:
                os.kill(pid, self.number)


def run(model, folder, pool, *killers, algorithm="grpo", **settings):
    settings = {**GRPO, "output_dir": str(folder), **settings}
    made = rl.get_algorithm(algorithm).from_pretrained(model, **settings)
    trainer = type(made)(made.config, pool=pool)
    return trainer.fit(ROWS, val_dataset=ROWS[:4], reward_fn=seven, callbacks=killers)


def weights(result, part="policy"):
    return load_file(
        result.run_dir / "checkpoints" / "step_5" / part / "weights/model.safetensors"
    )


def measured(result):
    """Return the measurements of each step, without durations."""
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("timing:", "performance:"))
        }
        for record in result.history
    ]


def check_equal(found, expected, *parts):
    assert found.steps == expected.steps == 5
    for part in parts or ("policy",):
        ours, theirs = weights(found, part), weights(expected, part)
        assert set(ours) == set(theirs)
        assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    assert measured(found) == measured(expected)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory, pool):
    return run(tiny_model, tmp_path_factory.mktemp("whole") / "run", pool)


@pytest.mark.parametrize(
    ("moment", "back_to"),
    cells(
        [
            ((2, "policy_training"), 0),
            ((4, "prepare_for_generation"), 2),
            # When step 4 is counted and validated.
            ((5, "checkpointing"), 2),
        ],
        [((2, "policy_training"), 0), ((5, "checkpointing"), 2)],
    ),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_killed_rank_leaves_no_trace_in_the_result(
    tiny_model, tmp_path, pool, whole, moment, back_to
):
    killer = Killer(moment)
    found = run(tiny_model, tmp_path / "run", pool, killer)
    assert not killer.left
    check_equal(found, whole)
    (warning,) = [w for w in found.warnings if "are lost" in w]
    assert f"in step {moment[0]}, and are started again (1 of 3 in a row)" in warning
    assert f"the run goes back to step {back_to}" in warning


class Stop(rl.Callback):
    """Requests a stop in the run's third step, and waits for the request."""

    def on_step_end(self, trainer, step, metrics):
        if step == 3:
            ask = (trainer.run_dir, "stop")
            options = {"by": "alice", "deadline_s": 120.0}
            self.thread = threading.Thread(
                target=lambda: setattr(self, "said", rl.control_run(*ask, **options))
            )
            self.thread.start()
            pause, requests = threading.Event(), trainer.run_dir / "requests"
            while self.thread.is_alive() and not [*requests.glob("*.request.json")]:
                pause.wait(0.01)


def test_a_stop_holds_where_the_run_goes_back(tiny_model, tmp_path, pool):
    stop, killer = Stop(), Killer((4, "checkpointing"))
    found = run(tiny_model, tmp_path / "run", pool, stop, killer)
    stop.thread.join(120.0)
    assert not killer.left
    assert (found.steps, found.stopped_by) == (2, "alice")
    assert found.stop_reason == "stopped by alice"
    assert (stop.said.step, stop.said.checkpoint.name) == (2, "step_2")


@pytest.mark.matrix
def test_a_critic_goes_back_with_the_policy(tiny_model, tmp_path, pool):
    settings = {"algorithm": "ppo", "num_generations_per_prompt": 1}
    whole = run(tiny_model, tmp_path / "whole", pool, **settings)
    killer = Killer((4, "value_training"), model="critic")
    found = run(tiny_model, tmp_path / "run", pool, killer, **settings)
    assert not killer.left
    check_equal(found, whole, "policy", "critic")


def test_restarts_in_a_row_are_bounded(tiny_model, tmp_path, pool):
    killer = Killer((3, "policy_training"), again=9)
    settings = {"fault_tolerance.max_restarts": 1}
    with pytest.raises(WorkerDiedError) as caught:
        run(tiny_model, tmp_path / "run", pool, killer, **settings)
    assert killer.again == 7, "the first time, and once more"
    notes = " ".join(caught.value.__notes__)
    assert "fault_tolerance.max_restarts=1 restarts in a row are used up" in notes


def test_a_run_that_keeps_nothing_ends(tiny_model, tmp_path, pool):
    killer = Killer((2, "policy_training"))
    settings = {"checkpointing.enabled": False}
    with pytest.raises(WorkerDiedError) as caught:
        run(tiny_model, tmp_path / "run", pool, killer, **settings)
    assert "checkpointing.enabled=false" in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("period", [None, 1], ids=["the start", "a snapshot"])
def test_a_point_is_the_same_each_time_a_run_goes_back_to_it(period):
    state = TrainerState(step=1, metrics={"train:loss": 1.0})
    nothing = SimpleNamespace(policy=None, critic=None, teacher=None, sync=None)
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            fault_tolerance=SimpleNamespace(max_restarts=3, snapshot_period=period)
        ),
        state=state,
        components=nothing,
        needs=None,
        _write_own=lambda folder: None,
    )
    outputs = SimpleNamespace(checkpoints=SimpleNamespace(saved_at=-1))
    recovery = Recovery(trainer, outputs, None)
    info = {"state": state.to_dict(), "callbacks": {"Counter/1": {"steps": [0]}}}
    recovery.begin(info)
    if period:
        recovery.take_snapshot(info)
    for _ in range(2):
        with recovery.grow() as point:
            assert point.info["state"]["metrics"] == {"train:loss": 1.0}
            assert point.info["state"]["updates"] == []
            assert point.info["callbacks"] == {"Counter/1": {"steps": [0]}}
            state.restore(point.info["state"])
            held = point.info["callbacks"]["Counter/1"]
        # As the steps that follow do.
        state.metrics["train:loss"] = 0.5
        state.updates.append({"number": 1, "step": 2})
        held["steps"].append(2)


class Counter(rl.Callback):
    """Counts steps, including repeated ones."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, trainer, step, metrics):
        self.steps.append(step)


LAST_ALONE = {"save_period": 5, "fault_tolerance.snapshot_period": 2}


class TestSnapshots:
    def test_a_run_goes_back_to_the_newest(self, tiny_model, tmp_path, pool, whole):
        # Only step 5 is checkpointed; the snapshot after step 2 is replaced by the one
        # after step 4.
        counter, killer = Counter(), Killer((4, "policy_training"), (5, "generation"))
        found = run(tiny_model, tmp_path / "run", pool, counter, killer, **LAST_ALONE)
        assert not killer.left
        check_equal(found, whole)
        back_to = [w.partition("goes back to step ")[2][:1] for w in found.warnings]
        assert [step for step in back_to if step] == ["2", "4"]
        assert counter.steps == [1, 2, 3, 3, 4, 5]
        assert not [*Path(tempfile.gettempdir()).glob(f"rl-snapshot-{os.getpid()}-*")]
        assert not [*Path("/dev/shm").glob(f"rl-snapshot-{os.getpid()}-*")]
        record = found.history[3]
        assert record["timing:snapshot"] > 0

    def test_or_to_a_checkpoint_that_is_newer(self, tiny_model, tmp_path, pool, whole):
        settings = {"save_period": 3, "fault_tolerance.snapshot_period": 2}
        counter, killer = Counter(), Killer((4, "policy_training"))
        found = run(tiny_model, tmp_path / "run", pool, counter, killer, **settings)
        assert not killer.left
        check_equal(found, whole)
        assert counter.steps == [1, 2, 3, 4, 5]
        (warning,) = [w for w in found.warnings if "are lost" in w]
        assert "the run goes back to step 3" in warning

    # CI covers snapshots, and runs with a critic that go back, separately.
    @pytest.mark.matrix
    def test_with_a_critic(self, tiny_model, tmp_path, pool):
        settings = {"algorithm": "ppo", "num_generations_per_prompt": 1}
        whole = run(tiny_model, tmp_path / "whole", pool, **settings)
        killer = Killer((4, "value_training"), model="critic")
        found = run(
            tiny_model, tmp_path / "run", pool, killer, **settings, **LAST_ALONE
        )
        assert not killer.left
        check_equal(found, whole, "policy", "critic")

    def test_asynchronous(self, tiny_model, tmp_path, pool, whole_ahead):
        counter, killer = Counter(), Killer((4, "policy_training"))
        settings = {**LAST_ALONE, **ahead(0)}
        found = run(tiny_model, tmp_path / "run", pool, counter, killer, **settings)
        assert not killer.left
        check_equal(found, whole_ahead)
        assert counter.steps == [1, 2, 3, 3, 4, 5]

    def test_needs_restarts(self, tiny_model, tmp_path, pool):
        settings = {"fault_tolerance.max_restarts": 0, **LAST_ALONE}
        with pytest.raises(ConfigError, match="snapshot_period=2 needs max_restarts"):
            run(tiny_model, tmp_path / "run", pool, **settings)


def ahead(staleness):
    return {
        "grpo.asynchronous": {"max_staleness": staleness, "event_log": True},
        "loss_fn.use_importance_sampling_correction": True,
    }


@pytest.fixture(scope="module")
def whole_ahead(tiny_model, tmp_path_factory, pool):
    folder = tmp_path_factory.mktemp("whole-ahead") / "run"
    return run(tiny_model, folder, pool, **ahead(0))


class TestAsynchronous:
    @pytest.mark.parametrize(
        ("moment", "back_to"),
        cells(
            [
                # The generator may be loading step 1's weights.
                ((2, "generation"), 0),
                ((4, "policy_training"), 2),
                # Its answers belong to the restored weights and are used again.
                ((3, "policy_training"), 2),
            ],
            [((2, "generation"), 0), ((3, "policy_training"), 2)],
        ),
        ids=lambda value: "-".join(map(str, value)) if type(value) is tuple else None,
    )
    def test_without_staleness_it_leaves_no_trace(
        self, tiny_model, tmp_path, pool, whole_ahead, moment, back_to
    ):
        killer = Killer(moment)
        found = run(tiny_model, tmp_path / "run", pool, killer, **ahead(0))
        assert not killer.left
        check_equal(found, whole_ahead)
        (warning,) = [w for w in found.warnings if "are lost" in w]
        assert f"the run goes back to step {back_to}" in warning

    # A worker counts as hung after two minutes without a sign of life.
    @pytest.mark.matrix
    @pytest.mark.timeout(600)
    def test_a_stopped_rank_is_replaced_like_a_killed_one(
        self, tiny_model, tmp_path, pool, whole_ahead
    ):
        killer = Killer((4, "policy_training"), number=signal.SIGSTOP)
        found = run(tiny_model, tmp_path / "run", pool, killer, **ahead(0))
        assert not killer.left
        check_equal(found, whole_ahead)
        (warning,) = [w for w in found.warnings if "are lost" in w]
        assert "its process is stopped (SIGSTOP)" in warning

    def test_replicas_that_are_lost_as_well_leave_no_trace(
        self, tiny_model, tmp_path, pool, whole_ahead
    ):
        killer = Killer((4, "generation"), model=("policy", "generation"))
        found = run(tiny_model, tmp_path / "run", pool, killer, **ahead(0))
        assert not killer.left
        check_equal(found, whole_ahead)

    def test_after_the_last_step(self, tiny_model, tmp_path, pool, whole_ahead):
        # The schedule has ended by then, and a new one starts.
        killer = Killer((5, "checkpointing"))
        settings = {**ahead(0), "save_period": 5}
        found = run(tiny_model, tmp_path / "run", pool, killer, **settings)
        assert not killer.left
        check_equal(found, whole_ahead)

    def test_a_teacher_that_is_lost_leaves_no_trace(self, tiny_model, tmp_path, pool):
        teacher = build_model(
            ModelBuildConfig(num_hidden_layers=1, max_position_embeddings=64),
            tmp_path / "teacher",
            seed=4,
        )
        settings = {
            "algorithm": "distillation",
            "teacher": str(teacher),
            "topk_logits_k": 4,
            "distillation.asynchronous": {"max_staleness": 0},
        }
        whole = run(tiny_model, tmp_path / "whole", pool, **settings)
        killer = Killer((4, "teacher_logprob_inference"), model="teacher")
        found = run(tiny_model, tmp_path / "run", pool, killer, **settings)
        assert not killer.left
        check_equal(found, whole)

    @pytest.mark.parametrize(
        "moment",
        [
            pytest.param((3, "generation"), marks=pytest.mark.matrix),
            (4, "policy_training"),
        ],
    )
    def test_each_prompt_is_trained_on_once_and_none_too_old(
        self, tiny_model, tmp_path, pool, moment
    ):
        killer = Killer(moment)
        found = run(tiny_model, tmp_path / "run", pool, killer, **ahead(1))
        assert not killer.left
        assert found.steps == 5
        (path,) = (found.run_dir / "asynchronous").glob("events_*.jsonl")
        log = [json.loads(line) for line in path.read_text().splitlines()]
        steps, back_to = trained_groups(log)
        assert back_to == [2]
        assert sorted(n for groups in steps.values() for n, _ in groups) == [*range(20)]
        ages = [step - old for step, groups in steps.items() for _, old in groups]
        assert 0 <= min(ages) <= max(ages) <= 1
        # The generator has confirmed each version of each trainer once, in order.
        for trainer in (0, 1):
            versions = [
                entry["event"]["version"]
                for entry in log[1:]
                if entry["event"]["type"] == "WeightsLoaded"
                and entry["event"]["trainer"] == trainer
            ]
            assert versions == sorted(set(versions)) != []


def trained_groups(log):
    """Return each step's prompts from a log, with the oldest version of their tokens.

    Steps whose weights were lost are left out. Also return where the run went back to.
    """
    versions, asked, done, back_to = {}, {}, {}, []
    for entry in log[1:]:
        event = entry["event"]
        if event["type"] == "Answered":
            versions[event["task"]] = event["oldest_version"]
        elif event["type"] == "TrainerReady" and event["incarnation"]:
            back_to.append(event["state"]["step"])
            done = {step: done[step] for step in done if step < back_to[-1]}
        elif event["type"] == "StepTrained":
            groups = asked[event["step"]]
            done[event["step"]] = [
                (n, min(versions[r] for r in rs)) for n, rs in groups
            ]
        for action in entry["actions"]:
            if action["type"] == "Train":
                # JSON turns a named tuple into a list: its number, its rows.
                asked[action["step"]] = action["groups"]
    return done, back_to
