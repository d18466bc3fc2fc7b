"""The loop with a toy policy: hooks, schedules, checkpoints, resume, signals."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import logging
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from rl_algorithms import Interrupted, LoggingCallback
from rl_algorithms.data.streaming import RowStream, StreamLoader
from rl_algorithms.data.validation_sets import ValidationParts
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers import training_run
from rl_algorithms.trainers.callback_number import CountWithState
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.sampling.validation_samples import ValidationSamples
from rl_distributed.cluster import watch as cluster_watch
from rl_distributed.errors import (
    CheckpointError,
    ClusterLostError,
    ConfigError,
    WorkerDiedError,
)
from rl_distributed.failures.cluster_loss import ClusterLoss
from rl_distributed.failures.worker import WorkerFailure
from rl_distributed.metrics.sinks.jsonl import read_metrics
from rl_distributed.runs.folder import begin_run, own_run_folder

_SPEC = importlib.util.spec_from_file_location(
    "toy_trainer", Path(__file__).with_name("toy_trainer.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
toy = importlib.util.module_from_spec(_SPEC)
sys.modules["toy_trainer"] = toy
_SPEC.loader.exec_module(toy)

ROWS = [3, 1, 4, 1, 5, 9]  # three steps per epoch


@pytest.fixture
def make(tmp_path):
    """Make a trainer, each in a folder of its own unless one is named."""
    number = itertools.count(1)

    def build(policy=None, checkpointing=None, early_stop=None, *, at=None, **settings):
        config = {
            "policy": toy.POLICY,
            "output_dir": str(at or tmp_path / f"run-{next(number)}"),
            "checkpointing": {"save_period": 100, **(checkpointing or {})},
            "early_stop": early_stop,
            "toy": settings,
        }
        policy = policy or toy.ToyPolicy()
        return toy.ToyTrainer(config, policy=policy, tokenizer=object())

    return build


def values(rows, name):
    return [row["value"] for row in rows]


def weight(path):
    policy = toy.ToyPolicy()
    policy.load_checkpoint(path / "policy" / "weights")
    return policy.weight


class TestHooks:
    def test_order(self, make):
        recorder = toy.Recorder()
        trainer = make(max_num_steps=4, val_period=2, checkpointing={"save_period": 3})
        trainer.fit(ROWS, val_dataset=[0.0] * 9, callbacks=[recorder])
        step = lambda n: [  # noqa: E731
            f"step_begin {n}",
            f"generation {n}/4",
            f"policy_training {n}/4",
            f"step_end {n}",
        ]
        validation = ["validation_begin", "validation {}/4", "validation_end 0.0"]
        assert recorder.calls == [
            "data 0/0",
            "setup 0/4",
            "train_begin",
            "epoch_begin 1",
            *step(1),
            *step(2),
            *[line.format(3) for line in validation],
            *step(3),
            "checkpointing 4/4",
            "checkpoint step_3",
            "epoch_end 1",
            "epoch_begin 2",
            *step(4),
            *[line.format(4) for line in validation],
            "checkpointing 4/4",
            "checkpoint step_4",
            "train_end",
        ]

    def test_what_a_hook_raises_names_it(self, make):
        class Bad(toy.Callback):
            def on_step_end(self, trainer, step, metrics):
                raise RuntimeError("oh")

        with pytest.raises(RuntimeError, match="oh") as caught:
            make().fit(ROWS, callbacks=[Bad()])
        assert "raised by Bad.on_step_end" in caught.value.__notes__

    def test_only_callbacks_are_taken(self, make):
        with pytest.raises(ConfigError, match=r"callbacks\[0\].*got function"):
            make().fit(ROWS, callbacks=[lambda: None])

    def test_a_hook_can_stop_the_run(self, make):
        class Stop(toy.Callback):
            def on_step_end(self, trainer, step, metrics):
                if step == 2:
                    trainer.request_stop("enough")

        result = make().fit(ROWS, callbacks=[Stop(), LoggingCallback()])
        assert (result.steps, result.stop_reason) == (2, "enough")
        assert result.checkpoint_path.name == "step_2"

    def test_metrics_have_plain_names_too(self, make):
        seen = []

        class Look(toy.Callback):
            def on_step_end(self, trainer, step, metrics):
                seen.append((step, metrics["loss"] == metrics["train:loss"]))

            def on_epoch_end(self, trainer, epoch, metrics):
                last = trainer.history[-1]["train:loss"]
                seen.append(("epoch", epoch, metrics["loss"] == last))

            def on_validation_end(self, trainer, step, metrics):
                seen.append((step, metrics["accuracy"]))

        result = make(val_at_end=True).fit(
            ROWS, val_dataset=[0, 1, 2, 3, 4, 5, 6], callbacks=[Look()]
        )
        steps = [(n, True) for n in range(1, 7)]
        epochs = [("epoch", 1, True), ("epoch", 2, True)]
        assert seen == [*steps[:3], epochs[0], *steps[3:], (6, 6.0), epochs[1]]
        assert "loss" not in result.metrics  # written under one name only

    def test_a_step_that_trained_nothing_has_nan_for_loss(self, make, monkeypatch):
        seen = []

        class Look(toy.Callback):
            def on_step_end(self, trainer, step, metrics):
                seen.append(metrics["loss"])

        monkeypatch.setattr(toy.ToyTrainer, "_train_step", lambda self, batch: {})
        make(max_num_steps=1).fit(ROWS, callbacks=[Look()])
        assert math.isnan(seen[0])

    def test_hooks_of_the_earlier_form_work_and_warn(self, make):
        seen = []

        class Old(toy.Callback):
            def on_step_end(self, trainer, state, metrics):
                seen.append((state.step, state.total_steps, state is trainer.state))
                state.stop_reason = "enough" if state.step == 4 else None

            def on_epoch_end(self, trainer, state):
                seen.append(("epoch", state.epoch))

        with pytest.warns(DeprecationWarning, match="in th|next") as caught:
            result = make().fit(ROWS, callbacks=[Old()])
        texts = {str(warning.message) for warning in caught}
        assert any(
            text.endswith(
                "trainer.state.total_steps; the next release has no other way"
            )
            for text in texts
        )
        assert any("Old.on_epoch_end must take" in text for text in texts)
        assert {
            Path(w.filename).name for w in caught if "number" in str(w.message)
        } == {Path(__file__).name}
        steps = [(n, 6, False) for n in (1, 2, 3, 4)]
        assert seen == [*steps[:3], ("epoch", 1), steps[3]]
        assert result.stop_reason == "enough"

    def test_the_number_of_a_hook_is_one(self):
        number = CountWithState(100, TrainerState(step=100))
        assert number % 100 == 0
        assert json.dumps({"step": number}) == '{"step": 100}'
        assert type(pickle.loads(pickle.dumps(number))) is int
        with pytest.raises(AttributeError, match="number of the step or epoch, which"):
            _ = number.stepp

    def test_a_stop_at_the_end_of_an_epoch_saves_its_last_step(self, make):
        class Stop(toy.Callback):
            def on_epoch_end(self, trainer, epoch, metrics):
                trainer.request_stop("enough")

        result = make().fit(ROWS, callbacks=[Stop()])
        assert (result.steps, result.checkpoint_path.name) == (3, "step_3")

    def test_steps_of_an_epoch_count_from_its_beginning(self, make):
        trainer = make(max_num_steps=4)
        trainer.fit(ROWS)
        assert (trainer.state.epoch, trainer.state.step_in_epoch) == (1, 1)

    def test_exception_hook(self, make):
        recorder = toy.Recorder()
        trainer = make()
        trainer.in_step = lambda _: 1 / 0
        with pytest.raises(ZeroDivisionError) as caught:
            trainer.fit(ROWS, callbacks=[recorder])
        assert recorder.calls[-1] == "exception ZeroDivisionError"
        assert "in step 1: generation" in caught.value.__notes__


@pytest.fixture
def lose(monkeypatch):
    """Make Ray's process of this name appear to have exited."""

    def end(name):
        loss = ClusterLoss(name, 4711, "h:1", "was ended by SIGKILL", time.monotonic())
        for module in (cluster_watch, training_run):
            monkeypatch.setattr(module, "find_loss", lambda: loss)

    return end


class TestLostCluster:
    def run(self, make, lose, name, where, **checkpointing):
        trainer = make(checkpointing=checkpointing)

        def act(running):
            if running.state.step == 2:
                lose(name)
                if where == "in_training":
                    while running._tools._signals.pending is None:
                        time.sleep(0.01)  # a poll; pytest's time limit ends it
                else:
                    threading.Event().wait(600)

        setattr(trainer, where, act)
        recorder = toy.Recorder()
        with pytest.raises(ClusterLostError) as caught:
            trainer.fit(ROWS, callbacks=[recorder])
        assert recorder.calls[-1] == "exception ClusterLostError"
        assert caught.value.loss.pid == 4711
        assert f"({name}, pid 4711, cluster h:1) was ended by SIGKILL" in str(
            caught.value
        )
        assert not [t for t in threading.enumerate() if t.name == "cluster-watch"]
        return str(caught.value), trainer.run_dir / "checkpoints"

    def test_between_updates_the_last_step_is_saved(self, make, lose, caplog):
        message, folder = self.run(make, lose, "gcs_server", "in_step")
        said = f"The checkpoint of step 2, the last one done, is kept in {folder}/step_"
        assert said in message
        assert (folder / "step_2").is_dir()
        assert "The run ends now; newest checkpoint: none" in caplog.text

    def test_an_update_comes_to_its_end_first(self, make, lose):
        message, folder = self.run(make, lose, "gcs_server", "in_training")
        assert "The checkpoint of step 3, the last one done, is kept in" in message
        assert (folder / "step_3").is_dir()

    def test_what_was_saved_before_is_named(self, make, lose):
        message, _ = self.run(make, lose, "raylet", "in_step", save_period=1)
        assert "The checkpoint of step 2, the last one done, is kept in" in message

    def test_workers_that_cannot_be_reached_save_nothing(self, make, lose):
        message, folder = self.run(make, lose, "raylet", "in_training", save_period=2)
        kept = f"in {folder}/step_2"
        assert message.endswith(
            (
                f"The newest whole checkpoint is that of step 2, {kept}; step 3, the "
                "last one done, could not be saved",
                # On a busy machine the watch notices the loss before step 3 counts.
                f"The checkpoint of step 2, the last one done, is kept {kept}",
            )
        )
        assert not (folder / "step_3").exists()

    def test_what_a_wait_raised_is_behind_it(self, make, lose):
        trainer = make()

        def act(running):
            lose("raylet")
            raise WorkerDiedError("worker 0 is gone")

        trainer.in_step = act
        with pytest.raises(ClusterLostError, match="No checkpoint was kept") as caught:
            trainer.fit(ROWS)
        # Or the watch's signal came first.
        assert isinstance(caught.value.__cause__, WorkerDiedError | None)


def test_where_memory_ran_out_the_settings_to_turn_down_are_named(make):
    trainer = make()
    cause = "memory ran out on node 10.0.0.1"

    def die(_):
        error = WorkerDiedError(cause)
        error.failure = WorkerFailure("policy", 0, "10.0.0.1", 7, "died", cause=cause)
        raise error

    trainer.in_step = die
    with pytest.raises(WorkerDiedError) as caught:
        trainer.fit(ROWS)
    (hint, phase) = caught.value.__notes__
    assert hint.startswith("To use less memory, lower some of: policy.train_mi")
    assert phase == "in step 1: generation"


class TestEnds:
    def test_epochs(self, make):
        result = make(max_num_epochs=3).fit(ROWS)
        assert (result.steps, result.stop_reason) == (9, "max_num_epochs (3) reached")

    def test_data_that_can_be_read_only_once_end_the_run(self, make):
        class Iterated(toy.ToyTrainer):
            def _limits(self):
                return None, 9

            def _load_data(self, dataset, val_dataset):
                return StreamLoader(dataset, 2, process=values), None

        trainer = make()
        trainer.__class__ = Iterated
        result = trainer.fit(RowStream({"value": v} for v in ROWS))
        assert result.steps == 3
        assert result.stop_reason.startswith("the training data are used up")
        assert "give the function that creates it" in result.stop_reason
        trainer = make()
        trainer.__class__ = Iterated
        result = trainer.fit(RowStream(lambda: ({"value": v} for v in ROWS)))
        assert (result.steps, result.stop_reason) == (9, "max_num_steps (9) reached")

    def test_result(self, make):
        policy = toy.ToyPolicy()
        result = make(policy, val_at_start=True, val_at_end=True).fit(
            ROWS, val_dataset=[0.1 * s for s in range(9)]
        )
        assert result.steps == 6
        assert result.history.column("val:accuracy")[0] == [0, 6]
        assert [r["step"] for r in result.history] == list(range(7))
        assert result.metrics["train:loss"] == policy.weight
        assert result.metrics["performance:tokens_per_sec"] > 0
        assert result.metrics["timing:policy_training"] >= 0
        assert weight(result.checkpoint_path) == policy.weight
        assert (result.run_dir / "metrics.jsonl").is_file()
        assert not policy.closed, "what was handed in stays open"

    def test_early_stop(self, make):
        trainer = make(val_period=1, goal=0.5)
        result = trainer.fit(ROWS, val_dataset=[0, 0.2, 0.4, 0.6, 0.8, 1, 1])
        assert result.steps == 3
        assert "val:accuracy reached 0.6" in result.stop_reason
        assert result.checkpoint_path.name == "step_3"

    def test_patience(self, make):
        settings = {"metric": "val:accuracy", "patience": 2, "min_delta": 0.05}
        trainer = make(val_period=1, early_stop=settings, max_num_epochs=9)
        result = trainer.fit(ROWS, val_dataset=[0, 0.2, 0.4, 0.44, 0.3, 0.9, 1, 1])
        assert result.steps == 4
        assert result.stop_reason == (
            "val:accuracy has not improved on 0.4 in 2 validations"
        )

    def test_patience_goes_over_a_resume(self, make):
        settings = {"metric": "val:accuracy", "patience": 3}
        values = [0, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4]
        first = make(val_period=1, early_stop=settings, max_num_steps=3)
        first.fit(ROWS, val_dataset=values)
        trainer = make(val_period=1, early_stop=settings, at=first.run_dir)
        result = trainer.fit(ROWS, val_dataset=values, resume=True)
        assert result.steps == 4

    def test_patience_needs_a_metric(self, make):
        with pytest.raises(ConfigError, match=r"early_stop\.metric"):
            make(early_stop={"patience": 2}).fit(ROWS)

    def test_a_run_that_stopped_early_stays_stopped_when_resumed(self, make):
        values = [0, 0.2, 0.6, 0.6, 0.8, 1, 1]
        first = make(val_period=1, goal=0.5).fit(ROWS, val_dataset=values)
        at = first.run_dir
        trainer = make(val_period=1, goal=0.5, at=at)
        again = trainer.fit(ROWS, val_dataset=values, resume=True)
        assert (again.steps, again.stop_reason) == (2, first.stop_reason)
        trainer = make(val_period=1, goal=0.8, at=at)
        more = trainer.fit(ROWS, val_dataset=values, resume=True)
        assert more.steps == 4

    def test_several_held_out_sets(self, make):
        trainer = make(val_at_end=True, max_num_steps=2)
        trainer._load_data = lambda train, val: (
            toy.ToyLoader(train, 2),
            ValidationParts(val, {"a": 1, "b": 3}),
        )
        result = trainer.fit(ROWS, val_dataset={"a": [0] * 3, "b": [1.0] * 3})
        assert result.metrics["val:a/accuracy"] == 0.0
        assert result.metrics["val:b/accuracy"] == 1.0
        assert result.metrics["val:accuracy"] == 0.75

    def test_timers_have_their_names(self, make):
        result = make(max_num_steps=2).fit(ROWS)
        timing = {name for name in result.metrics if name.startswith("timing:")}
        assert timing == {
            "timing:total_step_time",
            "timing:data_processing",
            "timing:generation",
            "timing:policy_training",
            "timing:checkpointing",
        }
        step_s = result.metrics["timing:total_step_time"]
        assert step_s >= result.metrics["timing:data_processing"]

    def test_a_run_that_has_reached_its_end_trains_no_more(self, make):
        result = make(max_num_steps=3).fit(ROWS)
        again = make(max_num_steps=3, at=result.run_dir).fit(ROWS, resume=True)
        assert again.steps == 3
        assert again.run_dir == result.run_dir


class TestCheckpoints:
    def test_the_best_one_is_kept_and_returned(self, make):
        settings = {"metric_name": "val:accuracy", "keep_top_k": 1}
        trainer = make(val_period=1, checkpointing=settings)
        result = trainer.fit(ROWS, val_dataset=[0, 0.1, 0.9, 0.3, 0.2, 0.1, 0.4])
        assert result.checkpoint_path.name == "step_2"
        names = sorted(p.name for p in result.checkpoint_path.parent.glob("step_*"))
        assert names == ["step_2", "step_6"]

    def test_a_metric_of_an_earlier_step_ranks_no_newer_policy(self, make):
        """Steps 3 and 5 are not validated: results of steps 2 and 4 are not theirs."""
        settings = {"metric_name": "val:accuracy", "save_period": 1}
        trainer = make(max_num_steps=5, val_period=2, checkpointing=settings)
        result = trainer.fit(ROWS, val_dataset=[0, 0, 0.9, 0, 0.4])
        assert result.checkpoint_path.name == "step_2"
        found = {}
        for path in result.checkpoint_path.parent.glob("step_*"):
            info = json.loads((path / "training_info.json").read_text())
            found[path.name] = info["val:accuracy"]
            assert (
                info["train:loss"]
                == result.history.at(info["state"]["step"])["train:loss"]
            )
        assert found == {
            "step_1": None,
            "step_2": 0.9,
            "step_3": None,
            "step_4": 0.4,
            "step_5": None,
        }

    def test_a_step_that_measured_nothing_is_not_ranked_by_the_one_before(self, make):
        trainer = make(
            max_num_steps=4,
            checkpointing={
                "metric_name": "train:loss",
                "higher_is_better": False,
                "save_period": 1,
            },
        )
        losses = iter([{"loss": 3.0}, {"loss": 1.0}, {}, {"loss": 2.0}])
        trainer._train_step = lambda batch: next(losses)
        assert trainer.fit(ROWS).checkpoint_path.name == "step_2"

    @pytest.mark.parametrize(
        ("settings", "warnings"),
        [
            (
                {"val_period": 2, "checkpointing": {"save_period": 1}},
                ["3 of 6 checkpoints (steps 1, 3, 5) will have no val:accuracy"],
            ),
            ({"val_period": 2, "checkpointing": {"save_period": 2}}, []),
            (
                {"val_period": 4, "checkpointing": {"save_period": 4}},
                ["1 of 2 checkpoints (steps 6) .* set val_at_end for the last one"],
            ),
            (
                {"checkpointing": {"save_period": 2}},
                ["ranks nothing, because no validation", "no checkpoint in"],
            ),
            (
                {"val_period": 2, "checkpointing": {"metric_name": "val:acuracy"}},
                ["step 2 lacks its ranking metric 'val:acuracy'", "no checkpoint in"],
            ),
            (
                {"val_period": 2, "checkpointing": {"enabled": False}},
                ["without effect"],
            ),
        ],
    )
    def test_what_ranks_nothing_is_said_once(self, make, caplog, settings, warnings):
        checkpointing = {
            "metric_name": "val:accuracy",
            "save_period": 2,
            **settings["checkpointing"],
        }
        trainer = make(**{**settings, "checkpointing": checkpointing})
        data = [0.1 * step for step in range(7)] if "val_period" in settings else None
        with caplog.at_level("WARNING"):
            trainer.fit(ROWS, val_dataset=data)
        said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(said) == len(warnings)
        for line, wanted in zip(said, warnings, strict=True):
            pattern = re.escape(wanted).replace(r"\.\*", ".*")
            assert re.search(pattern, line), line

    def test_one_is_saved_before_the_time_is_up(self, make):
        recorder = toy.Recorder()
        settings = {"checkpoint_must_save_by": "00:00:00:00", "keep_latest_k": 9}
        make(checkpointing=settings).fit(ROWS, callbacks=[recorder])
        saved = [call for call in recorder.calls if call.startswith("checkpoint ")]
        assert saved == ["checkpoint step_1", "checkpoint step_6"]

    def test_off(self, make):
        result = make(checkpointing={"enabled": False}).fit(ROWS)
        assert result.checkpoint_path is None

    def test_full_disk(self, make):
        trainer = make(max_num_steps=4, checkpointing={"save_period": 2})
        save, calls = trainer.given.policy.save_checkpoint, itertools.count()

        def fail(*args, **kwargs):
            if next(calls) == 1:
                raise OSError(28, "No space left on device")
            save(*args, **kwargs)

        trainer.given.policy.save_checkpoint = fail
        with pytest.raises(CheckpointError, match=r"step_4"):
            trainer.fit(ROWS)
        folder = trainer.run_dir / "checkpoints"
        assert [p.name for p in folder.glob("*step_*")] == ["step_2"]


class TestResume:
    @pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
    def test_equals_the_unbroken_run(self, make, stop_at):
        whole = toy.ToyPolicy()
        make(whole, max_num_steps=5).fit(ROWS)
        first = toy.Recorder()
        make(max_num_steps=stop_at, checkpointing={"save_period": 1}).fit(
            ROWS, callbacks=[first]
        )
        policy, second = toy.ToyPolicy(), toy.Recorder()
        trainer = make(policy, max_num_steps=5)
        folder = trainer.run_dir.with_name("run-2")
        assert folder.is_dir()
        result = trainer.fit(ROWS, callbacks=[second], resume=folder)
        assert policy.weight == whole.weight
        assert result.steps == 5
        assert second.steps_seen == 5
        assert [r["step"] for r in result.history] == [1, 2, 3, 4, 5]
        assert trainer.state.consumed_samples == 10

    def test_an_earlier_checkpoint(self, make):
        whole = toy.ToyPolicy()
        done = make(whole, checkpointing={"save_period": 2}).fit(ROWS)
        policy = toy.ToyPolicy()
        path = done.run_dir / "checkpoints" / "step_2"
        result = make(policy).fit(ROWS, resume=path)
        assert policy.weight == whole.weight
        assert len(result.history) == 6

    def test_what_an_earlier_run_did_later_is_forgotten(self, make):
        done = make(checkpointing={"save_period": 2}).fit(ROWS)
        seen = []

        class Look(toy.Callback):
            def on_train_begin(self, trainer, step):
                seen.extend(row["step"] for row in trainer.history)

        path = done.run_dir / "checkpoints" / "step_2"
        samples = ValidationSamples(done.run_dir)
        for step in (2, 6):
            samples.add(step, [{"prompt": "1+3="}])
        trainer = make(max_num_steps=3)
        trainer.fit(ROWS, resume=path, callbacks=[Look()])
        assert seen == [1, 2]
        assert [record["step"] for record in samples.read()] == [2]
        logged = read_metrics(done.run_dir / "metrics.jsonl")
        assert {step for step, found in logged if "train:loss" in found} == {1, 2, 3}

    def test_another_algorithm(self, make):
        done = make(max_num_steps=1).fit(ROWS)
        trainer = make(at=done.run_dir)
        trainer.algorithm = "other"
        with pytest.raises(ConfigError, match=r"not written by.*'other'"):
            trainer.fit(ROWS, resume=True)


class TestWarnings:
    def test_they_are_in_the_result_once_also_after_a_resume(self, make, caplog):
        def warn(trainer):
            logging.getLogger("rl_algorithms.mine").warning("the data are odd")

        trainer = make(max_num_steps=2)
        trainer.in_step = warn
        first = trainer.fit(ROWS)
        assert first.warnings == ("the data are odd",)
        assert "warned: the data are odd" in repr(first)
        resumed = make(at=first.run_dir).fit(ROWS, resume=True)
        assert (resumed.steps, resumed.warnings) == (6, first.warnings)
        assert make().fit(ROWS).warnings == ()

    def test_those_before_there_is_a_folder_are_in_its_log(self, make):
        trainer = make(max_num_steps=1)
        load = trainer._load_data

        def warn(*data):
            logging.getLogger("rl_algorithms.mine").warning("few rows")
            return load(*data)

        trainer._load_data = warn
        result = trainer.fit(ROWS)
        assert result.warnings == ("few rows",)
        lines = (result.run_dir / "logs" / "run.jsonl").read_text()
        assert "earlier warning: few rows" in lines


class TestFolder:
    def test_a_named_one_is_used_for_one_run(self, make):
        done = make(max_num_steps=2).fit(ROWS)
        kept = sorted(done.run_dir.rglob("*"))
        unread = make(at=done.run_dir)
        unread._load_data = None  # it is rejected before the data are read
        with pytest.raises(
            ConfigError, match=r"holds a run already \(it has a result\)"
        ):
            unread.fit(ROWS)
        with pytest.raises(ConfigError, match="give one of them"):
            make(at=done.run_dir).fit(ROWS, overwrite=True, resume="auto")
        assert sorted(done.run_dir.rglob("*")) == kept
        again = make(max_num_steps=1, at=done.run_dir).fit(ROWS, overwrite=True)
        assert (again.run_dir, again.steps) == (done.run_dir, 1)
        assert len(again.history) == 1
        steps = [path.name for path in (again.run_dir / "checkpoints").glob("step*")]
        assert steps == ["step_1"]

    def test_it_says_what_the_run_is_and_what_it_came_to(self, make):
        done = make(max_num_steps=2).fit(ROWS)
        record, result = (
            json.loads((done.run_dir / name).read_text())
            for name in ("run.json", "result.json")
        )
        assert (record["kind"], record["name"]) == ("trainer", "toy")
        assert record["config"]["toy"]["max_num_steps"] == 2
        assert (result["measure"], result["steps"]) == ("train:loss", 2)
        assert list(result)[:3] == ["measure", "start", "start_step"]
        assert result["best_checkpoint"] == str(done.checkpoint_path)
        assert result["metrics"]["train:loss"] == result["end"]
        log = (done.run_dir / "logs" / "run.jsonl").read_text().splitlines()
        assert any("; 2 steps" in json.loads(line)["message"] for line in log)

    def test_the_result_of_a_run_that_goes_on_is_gone(self, make):
        done = make(max_num_steps=1).fit(ROWS)
        trainer = make(max_num_steps=2, at=done.run_dir)
        there = []
        trainer.in_step = lambda t: there.append((t.run_dir / "result.json").exists())
        trainer.fit(ROWS, resume=True)
        assert there == [False]
        assert (done.run_dir / "result.json").exists()

    def test_a_folder_that_another_one_owns_is_used_and_left_open(self, make, tmp_path):
        claim = begin_run(tmp_path / "owned")
        trainer = make(max_num_steps=1)
        trainer._claim = claim
        result = trainer.fit(ROWS)
        assert result.run_dir == tmp_path / "owned"
        assert not (result.run_dir / "run.json").exists()  # its owner writes it
        with pytest.raises(ConfigError, match="another process carries this run out"):
            own_run_folder(result.run_dir)
        trainer = make(max_num_steps=2)
        trainer._claim = claim
        assert trainer.fit(ROWS, resume="auto").steps == 2
        claim.release()

    def test_one_that_is_not_named_is_new(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        def fit(steps, **options):
            settings = {"max_num_steps": steps}
            trainer = toy.ToyTrainer(
                {"policy": toy.POLICY, "toy": settings},
                policy=toy.ToyPolicy(),
                tokenizer=object(),
            )
            trainer.run_name = "mine"
            return trainer.fit(ROWS, **options)

        for number in (1, 2):
            assert fit(2).run_dir == tmp_path / "runs" / f"mine-00{number}"
        (tmp_path / "runs" / "mine-003").mkdir()  # it has no checkpoint
        resumed = fit(4, resume=True)
        assert (resumed.run_dir.name, resumed.steps) == ("mine-002", 4)
        with pytest.raises(ConfigError, match="add output_dir=FOLDER"):
            fit(1, overwrite=True)

    @pytest.mark.parametrize("name", ["kept", "checkpoints"])
    def test_checkpoints_on_another_disk_are_of_their_run(self, make, tmp_path, name):
        kept = {"checkpoint_dir": str(tmp_path / "disk" / name)}
        first = make(checkpointing=kept, max_num_steps=2).fit(ROWS)
        assert first.checkpoint_path.parent == tmp_path / "disk" / name
        longer = make(checkpointing=kept, max_num_steps=4, at=first.run_dir)
        with pytest.raises(ConfigError, match="holds a run already"):
            longer.fit(ROWS)
        with pytest.raises(ConfigError, match="holds checkpoints of another run"):
            make(checkpointing=kept).fit(ROWS)
        resumed = longer.fit(ROWS, resume=True)
        assert (resumed.run_dir, resumed.steps) == (first.run_dir, 4)
        at = {"at": first.run_dir, "max_num_steps": 1}
        again = make(checkpointing=kept, **at).fit(ROWS, overwrite=True)
        assert again.checkpoint_path.name == "step_1"
        assert len(list(again.checkpoint_path.parent.glob("step_*"))) == 1

    def test_a_failure_before_the_first_checkpoint_blocks_nothing(self, make):
        def fail(trainer):
            raise WorkerDiedError("gone")

        trainer = make()
        trainer.in_step = fail
        with pytest.raises(WorkerDiedError):
            trainer.fit(ROWS)
        at = trainer.run_dir
        assert (at / "metrics.jsonl").exists()
        assert make(at=at).fit(ROWS).steps == 6

    def test_a_mistake_before_the_first_step_leaves_nothing(self, make):
        trainer = make()

        def refuse():
            assert trainer.run_dir.is_dir()
            raise ConfigError("the model is none")

        trainer._setup_algorithm = refuse
        with pytest.raises(ConfigError, match="is none"):
            trainer.fit(ROWS)
        assert not trainer.run_dir.exists()


class TestOwner:
    def test_a_run_that_lives_cannot_be_resumed(self, make):
        trainer = make(checkpointing={"save_period": 1})
        refused = []

        def resume(trainer):
            if trainer.state.step == 2:
                with pytest.raises(ConfigError) as caught:
                    make().fit(ROWS, resume=trainer.run_dir)
                refused.append(str(caught.value))

        trainer.in_step = resume
        result = trainer.fit(ROWS)
        (message,) = refused
        assert "another process carries this run out" in message
        assert f"this very process ({os.getpid()} on " in message
        assert "SIGTERM saves it" in message
        # It has lost nothing, and a later run can continue it.
        assert result.steps == 6
        assert len(result.history) == 6
        assert make().fit(ROWS, resume=trainer.run_dir).steps == 6


class TestSignals:
    @pytest.mark.parametrize(("place", "done"), [("in_step", 1), ("in_training", 2)])
    @pytest.mark.parametrize(
        ("signum", "code"),
        [
            (signal.SIGINT, 130),
            (signal.SIGTERM, 143),
            (signal.SIGUSR1, 138),
            (signal.SIGHUP, 129),
        ],
    )
    def test_keeps_a_checkpoint_and_resumes(self, make, place, done, signum, code):
        whole = toy.ToyPolicy()
        make(whole, checkpointing={"enabled": False}).fit(ROWS)
        recorder = toy.Recorder()
        trainer = make()

        def interrupt(trainer):
            if trainer.state.step == 1:
                signal.raise_signal(signum)

        setattr(trainer, place, interrupt)
        with pytest.raises(Interrupted) as caught:
            trainer.fit(ROWS, callbacks=[recorder])
        assert caught.value.exit_code == code
        assert caught.value.checkpoint_path.name == f"step_{done}"
        assert recorder.calls[-1] == "exception Interrupted"
        policy = toy.ToyPolicy()
        result = make(policy).fit(ROWS, resume=trainer.run_dir)
        assert policy.weight == whole.weight
        assert result.steps == 6

    def test_a_second_signal_in_training_keeps_the_last_checkpoint(self, make):
        trainer = make(checkpointing={"save_period": 1})

        def interrupt(trainer):
            if trainer.state.step == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

        trainer.in_training = interrupt
        with pytest.raises(Interrupted) as caught:
            trainer.fit(ROWS)
        assert caught.value.checkpoint_path.name == "step_2"

    def test_a_step_that_is_half_trained_is_not_saved(self, make):
        recorder = toy.Recorder()
        trainer = make()

        def interrupt(trainer):
            if trainer.state.step == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

        trainer.in_training = interrupt
        with pytest.raises(Interrupted) as caught:
            trainer.fit(ROWS, callbacks=[recorder])
        assert caught.value.checkpoint_path is None
        assert not [call for call in recorder.calls if call.startswith("checkpoint")]

    def test_before_anything_was_trained(self, make):
        trainer = make()
        trainer.in_step = lambda _: signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            trainer.fit(ROWS)
        assert caught.value.checkpoint_path.name == "step_0"


def test_a_step_before_there_are_workers_says_so(make):
    trainer = make()
    with pytest.raises(AlgorithmError, match=r"ToyTrainer has no workers yet.*fit"):
        trainer.sync_weights()
    with pytest.raises(AlgorithmError, match="has no workers yet"):
        trainer._train_step([1])


def test_a_trainer_goes_with_its_last_reference(make):
    """Its cluster and the policy passed to it go too: others wait for the resources."""
    trainer = make(max_num_steps=2)
    trainer.fit(ROWS)
    left = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert left() is None
    finally:
        gc.enable()
