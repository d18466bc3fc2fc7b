"""Asynchronous runs with real workers on Ray and a tiny model."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest
from matrix_cells import cells

import rl_algorithms as rl
from rl_algorithms.asynchronous.event_log import EventLog, replay
from rl_algorithms.testing import weights_digest
from rl_algorithms.trainers.recording.recording import ANSWERS, Recording
from rl_algorithms.trainers.run.weight_log import WeightLog
from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles
from rl_distributed.errors import ConfigError
from rl_distributed.runs.ending import run_state
from rl_distributed.timing.timeline_file import TIMELINE, read_timeline
from rl_models.build.model import ModelBuildConfig, build_model

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(4)]
GRPO = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 64,
    "reference_policy_kl_penalty": 0.0,
    "lr": 1e-2,
    "progress": False,
}
CORRECTED = {"loss_fn.use_importance_sampling_correction": True}


def from_json(value):
    """Return `json` output with tuples instead of lists."""
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    return value


def sevens(prompt, response):
    return float(response[:1] == "7")


def train(pool, model, folder, *, resume=False, algorithm="grpo", **settings):
    fit = {
        name: settings.pop(name)
        for name in ("reward_fn", "environment", "callbacks", "val_dataset")
        if name in settings
    }
    if not {"reward_fn", "environment"} & set(fit) and "env" not in settings:
        fit["reward_fn"] = None if algorithm == "distillation" else sevens
    settings.pop("progress", None)
    made = rl.get_algorithm(algorithm).from_pretrained(
        model, output_dir=str(folder), **settings
    )
    trainer = type(made)(made.config, pool=pool)
    return trainer.fit(ROWS, resume=resume, progress=False, **fit)


def trained(result):
    """Return what the run trained on, without metrics that only one kind reports."""
    return [
        {
            key: value
            for key, value in record.items()
            if key.startswith(("train:", "val:")) and "asynchronous" not in key
        }
        for record in result.history
    ]


def with_staleness(staleness, **more):
    return {"grpo.asynchronous": {"max_staleness": staleness, **more}}


class TestSynchronousOrder:
    def test_no_staleness_is_the_run_in_turns(self, pool, tiny_model, tmp_path):
        settings = {
            **GRPO,
            **CORRECTED,
            "max_num_steps": 5,
            "val_period": 2,
            "val_at_start": True,
            "val_dataset": ROWS[:4],
        }
        turns = train(pool, tiny_model, tmp_path / "turns", **settings)
        ahead = train(
            pool, tiny_model, tmp_path / "ahead", **settings, **with_staleness(0)
        )
        assert trained(ahead) == trained(turns)
        assert weights_digest(ahead.checkpoint_path) == weights_digest(
            turns.checkpoint_path
        )
        assert ahead.history.column("train:asynchronous/staleness_max")[1] == [0.0] * 5


def logs(folder):
    """Return the lines of a run's event logs as JSON, oldest log first."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "asynchronous").glob("events_*.jsonl"))
    ]


def trained_prompts(log, *, up_to):
    """Return prompt numbers of the steps before `up_to` that a log marks as done."""
    found = []
    asked = {}
    for entry in log[1:]:
        if entry["event"]["type"] == "StepTrained" and entry["event"]["step"] < up_to:
            found += asked[entry["event"]["step"]]
        for action in entry["actions"]:
            if action["type"] == "Train":
                # JSON turns a named tuple into a list: its number, its rows.
                asked[action["step"]] = [group[0] for group in action["groups"]]
    return found


class Broken(rl.Callback):
    """Ends a run mid-step, as a crash would."""

    def __init__(self, step):
        self._step = step

    def on_step_begin(self, trainer, step):
        if step == self._step:
            raise RuntimeError("the machine is gone")


class Pausing(rl.Callback):
    """Pauses the run after its second step, until nothing is pending."""

    def __init__(self, run):
        self._run, self.seen = run, []
        self._thread = threading.Thread(target=self._talk)
        self._error = None

    def on_step_end(self, trainer, step, metrics):
        if step == 2:
            self._ahead = trainer._ahead
            self._thread.start()
            look = threading.Event()
            while not any((self._run / "requests").glob("*.request.json")):
                look.wait(0.01)

    def _talk(self):
        try:
            rl.control_run(self._run, "pause", deadline_s=60.0)
            self.seen.append(run_state(self._run))
            # Weights that the trainer has just sent may still be loading.
            look, end_s = threading.Event(), time.monotonic() + 60.0
            while (waits := self._waits()) is not None:
                assert time.monotonic() < end_s, waits
                look.wait(0.05)
        except BaseException as error:
            self._error = error
        try:
            rl.control_run(self._run, "resume", deadline_s=60.0)
            self.seen.append(run_state(self._run))
        except BaseException as error:
            self._error = self._error or error

    def _waits(self):
        """Return the waits that have a deadline; a pause may take any time."""

        def ask(schedule):
            is_idle = not schedule._state.tasks and schedule.next_deadline_s() is None
            return None if is_idle else schedule.waits()

        return self._ahead._controller.ask(ask)

    def join(self):
        self._thread.join(60.0)
        if self._error is not None:
            raise self._error


class TestAhead:
    def test_learns_and_its_log_replays(self, pool, tiny_model, tmp_path):
        result = train(
            pool,
            tiny_model,
            tmp_path / "run",
            **GRPO,
            **CORRECTED,
            **with_staleness(1, event_log=True),
            max_num_steps=24,
            max_num_epochs=4,
            val_period=8,
            val_dataset=ROWS[:4],
        )
        rewards = result.history.column("train:reward")[1]
        assert sum(rewards[-4:]) / 4 > 0.3 > sum(rewards[:4]) / 4
        oldest = result.history.column("train:asynchronous/staleness_max")[1]
        assert oldest[0] == 0.0
        assert max(oldest) == 1.0
        assert len(result.history.column("val:reward")[1]) == 3
        (log,) = logs(result.run_dir)
        path = next((result.run_dir / "asynchronous").iterdir())
        again = replay(EventLog.from_lines(path.read_text().splitlines()))
        assert [
            [
                from_json({"type": type(action).__name__, **asdict(action)})
                for action in actions
            ]
            for actions in again
        ] == [[from_json(action) for action in entry["actions"]] for entry in log[1:]]
        assert sorted(trained_prompts(log, up_to=24)) == list(range(96))
        transfers = list(WeightLog(result.run_dir).read())
        versions = [record["version"] for record in transfers]
        # One optimizer step per step, and the last weights sample the last validation.
        assert versions == list(range(versions[0], 25))
        assert all(r["processes"] == 1 and len(r["digest"]) == 32 for r in transfers)
        assert all(r["version"] <= r["step"] for r in transfers)

    def test_answers_go_on_with_new_weights(self, pool, tiny_model, tmp_path):
        settings = {**GRPO, **CORRECTED, "max_new_tokens": 52}
        settings["max_total_sequence_length"] = 64
        result = train(
            pool,
            tiny_model,
            tmp_path / "run",
            **settings,
            **{
                "policy.generation.stop_token_ids": [],
                # Few at a time, so that a step is sampled longer than it is trained.
                "policy.generation.max_batch_size": 2,
                "record_training": True,
                "max_num_steps": 8,
                "val_period": 4,
                "val_dataset": ROWS[:4],
            },
            **with_staleness(1, weight_updates="between_tokens"),
        )
        column = result.history.column
        assert len(column("train:reward")[1]) == 8
        mixed = column("train:asynchronous/mixed_version_rate")[1]
        assert mixed[0] == 0.0
        assert max(mixed) > 0.0
        assert max(column("train:asynchronous/staleness_max")[1]) == 1.0
        transfers = list(WeightLog(result.run_dir).read())
        assert [record["version"] for record in transfers][-1] == 8
        assert all(len(record["digest"]) == 32 for record in transfers)
        replayed = rl.replay_run(result.run_dir, pool=pool)
        assert replayed.is_same, replayed.difference

    def test_a_paused_run_samples_no_further_and_goes_on(
        self, pool, tiny_model, tmp_path
    ):
        run = tmp_path / "run"
        asker = Pausing(run)
        result = train(
            pool,
            tiny_model,
            run,
            **GRPO,
            **CORRECTED,
            **with_staleness(1, event_log=True),
            callbacks=[asker],
        )
        asker.join()
        assert asker.seen == ["paused", "running"]
        assert result.steps == 8
        oldest = result.history.column("train:asynchronous/staleness_max")[1]
        assert max(oldest) <= 1.0
        (log,) = logs(run)
        kinds = [entry["event"]["type"] for entry in log[1:]]
        begin, end = kinds.index("RunPaused"), kinds.index("RunResumed")
        # Answers in flight are finished, up to the number the schedule has room for.
        assert "Answered" in kinds[begin:end]
        assert "StepTrained" not in kinds[begin:end]
        assert sorted(trained_prompts(log, up_to=8)) == list(range(32))

    def test_a_crash_loses_and_repeats_no_prompt(self, pool, tiny_model, tmp_path):
        settings = {
            **GRPO,
            **CORRECTED,
            **with_staleness(2, event_log=True),
            "checkpointing.save_period": 2,
        }
        with pytest.raises(RuntimeError, match="the machine is gone"):
            train(pool, tiny_model, tmp_path / "run", **settings, callbacks=[Broken(4)])
        result = train(pool, tiny_model, tmp_path / "run", resume=True, **settings)
        assert result.steps == 8
        first, second = logs(result.run_dir)
        assert second[0]["state"]["step"] == 2
        # More prompts than those of the steps had been started by then.
        assert second[0]["state"]["position"] > 8
        prompts = trained_prompts(first, up_to=2) + trained_prompts(second, up_to=8)
        assert sorted(prompts) == list(range(32))

    @pytest.mark.matrix
    def test_ppo(self, pool, tiny_model, tmp_path):
        result = train(
            pool,
            tiny_model,
            tmp_path / "run",
            algorithm="ppo",
            **GRPO,
            **CORRECTED,
            **{"ppo.asynchronous": {"max_staleness": 1}},
            max_num_steps=3,
        )
        assert result.steps == 3
        assert result.history.column("train:asynchronous/staleness_max")[1][-1] == 1.0
        first, *later = RolloutFiles(result.run_dir, 0).read()
        assert first["versions"][0][0] == 0
        # Same weights at first; then the trainer's are one step ahead.
        assert first["trainer_logprobs"] == pytest.approx(first["logprobs"], abs=1e-3)
        assert all(len(r["trainer_logprobs"]) == r["length"] for r in later)

    @pytest.mark.matrix
    def test_refuses_to_leave_prompts_out(self, pool, tiny_model, tmp_path):
        settings = {**GRPO, **CORRECTED, "checkpointing.save_period": 2}
        with pytest.raises(RuntimeError, match="the machine is gone"):
            train(
                pool,
                tiny_model,
                tmp_path / "run",
                **settings,
                **with_staleness(2),
                callbacks=[Broken(4)],
            )
        with pytest.raises(ConfigError, match="prompts in flight"):
            train(pool, tiny_model, tmp_path / "run", resume=True, **settings)
        result = train(
            pool,
            tiny_model,
            tmp_path / "run",
            resume=True,
            **settings,
            **with_staleness(0),
        )
        assert result.steps == 8

    def test_limits_that_change(self, pool, tiny_model, tmp_path):
        class Longer(rl.Callback):
            def on_step_end(self, trainer, step, metrics):
                trainer.update_config({"max_num_steps": 5})

        with pytest.raises(
            ConfigError, match="cannot change while an asynchronous run"
        ):
            train(
                pool,
                tiny_model,
                tmp_path / "run",
                **GRPO,
                **with_staleness(0),
                max_num_steps=3,
                callbacks=[Longer()],
            )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    config = ModelBuildConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return build_model(config, tmp_path_factory.mktemp("teacher") / "model", seed=9)


def distill(pool, student, teacher, folder, staleness=None, **settings):
    ahead = {"max_staleness": staleness, **settings.pop("asynchronous", {})}
    if staleness is not None:
        settings["distillation.asynchronous"] = ahead
    distillation = {
        **{name: GRPO[name] for name in GRPO if name != "reference_policy_kl_penalty"},
        "teacher": str(teacher),
        "topk_logits_k": 6,
        "bucket_outside_topk": True,
        "kl_type": "reverse",
    }
    return train(
        pool,
        student,
        folder,
        algorithm="distillation",
        **{**distillation, **settings},
    )


def calls(run, group, method):
    """Return begin and end in seconds of the calls of a group, or the driver."""
    found = set()
    records, _ = read_timeline(run / TIMELINE, num_first=99, num_newest=0)
    for record in records:
        for row in record["rows"]:
            if row["name"].partition("[")[0] == group:
                for number, start, micros in row["calls"]:
                    if record["methods"][number] == method:
                        begin_s = record["start_s"] + start / 1e6
                        found.add((begin_s, begin_s + micros / 1e6))
    return found


def overlap(some, others):
    return any(a < d and c < b for a, b in some for c, d in others)


class TestDistillation:
    @pytest.mark.parametrize("reward", cells([None, sevens], [None]))
    def test_no_staleness_is_the_run_in_turns(
        self, pool, tiny_model, teacher, tmp_path, reward
    ):
        settings = {
            "max_num_steps": 5,
            "val_period": 2,
            "val_at_start": True,
            "val_dataset": ROWS[:4],
            "reward_fn": reward,
        }
        turns, ahead = (
            distill(pool, tiny_model, teacher, tmp_path / name, staleness, **settings)
            for name, staleness in (("turns", None), ("ahead", 0))
        )
        assert trained(ahead) == trained(turns)
        assert ("train:reward" in ahead.metrics) == (reward is not None)
        assert weights_digest(ahead.checkpoint_path) == weights_digest(
            turns.checkpoint_path
        )
        assert ahead.history.column("train:asynchronous/staleness_max")[1] == [0.0] * 5
        # In turns, so nothing is sampled while the teacher works.
        for run in (turns.run_dir, ahead.run_dir):
            asked = calls(run, "driver", "teacher_logprob_inference")
            assert len(asked) == 5
            assert not overlap(asked, calls(run, "generation", "generate"))

    @pytest.mark.parametrize("staleness", [1, 2])
    def test_comes_closer_to_the_teacher_and_replays(
        self, pool, tiny_model, teacher, tmp_path, staleness
    ):
        result = distill(
            pool,
            tiny_model,
            teacher,
            tmp_path / "run",
            staleness,
            max_num_steps=40,
            max_num_epochs=5,
            val_dataset=ROWS[:16],
            val_at_start=True,
            val_period=20,
            record_training=True,
        )
        column = result.history.column
        losses = column("val:val_loss")[1]
        assert len(losses) == 3
        assert losses[-1] < 0.8 * losses[0]
        oldest = column("train:asynchronous/staleness_max")[1]
        assert oldest[0] == 0.0
        assert max(oldest) == staleness
        assert column("train:asynchronous/num_dropped_groups")[1] == [0.0] * 40
        assert not any("reward" in name for name in result.metrics)
        # The versions of the tokens themselves, and the steps that trained on them.
        recording = Recording.read(result.run_dir)
        for number, step in recording.steps.items():
            (answers,) = (call for call in step.calls if call.model == ANSWERS)
            versions = recording.rows(answers)["weight_version"]
            assert number - 1 - staleness <= versions.min()
            assert versions.max() <= number - 1
        (log,) = logs(result.run_dir)
        assert sorted(trained_prompts(log, up_to=40)) == list(range(160))
        # The student samples for the next step while the teacher works on this one.
        asked = calls(result.run_dir, "driver", "teacher_logprob_inference")
        assert overlap(asked, calls(result.run_dir, "generation", "generate"))
        replayed = rl.replay_run(result.run_dir, pool=pool)
        assert replayed.is_same, replayed.difference
        assert replayed.last_step == 40

    def test_answers_go_on_with_new_weights(self, pool, tiny_model, teacher, tmp_path):
        result = distill(
            pool,
            tiny_model,
            teacher,
            tmp_path / "run",
            1,
            asynchronous={"weight_updates": "between_tokens"},
            max_new_tokens=52,
            max_total_sequence_length=64,
            max_num_steps=8,
            record_training=True,
            **{
                "policy.generation.stop_token_ids": [],
                "policy.generation.max_batch_size": 2,
            },
        )
        column = result.history.column
        mixed = column("train:asynchronous/mixed_version_rate")[1]
        assert len(mixed) == 8
        assert mixed[0] == 0.0
        assert max(mixed) > 0.0
        assert max(column("train:asynchronous/staleness_max")[1]) == 1.0
        replayed = rl.replay_run(result.run_dir, pool=pool)
        assert replayed.is_same, replayed.difference

    @pytest.mark.matrix
    def test_refuses_to_leave_prompts_out(self, pool, tiny_model, teacher, tmp_path):
        keys = {"checkpointing.save_period": 2}
        run = tmp_path / "run"
        with pytest.raises(RuntimeError, match="the machine is gone"):
            distill(pool, tiny_model, teacher, run, 2, **keys, callbacks=[Broken(4)])
        with pytest.raises(ConfigError, match="prompts in flight"):
            distill(pool, tiny_model, teacher, run, resume=True, **keys)
        result = distill(pool, tiny_model, teacher, run, 0, resume=True, **keys)
        assert result.steps == 8
