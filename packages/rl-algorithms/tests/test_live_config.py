"""Configuration updates while a run is in progress."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from rl_algorithms import (
    Callback,
    ConfigUpdate,
    GRPOTrainer,
    KeptWorkers,
    update_run,
)
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.trainers.settings.keywords import changeable_settings, changed_config
from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_distributed.security.audit import disable_audit, enable_audit

HERE = Path(__file__).parent
DEADLINE_S = 120.0


def _load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


_load("toy_trainer")
live = _load("live_toy")
At, ROWS = live.At, live.ROWS


def fit(trainer, *callbacks, **arguments):
    return trainer.fit(ROWS, callbacks=callbacks, progress=False, **arguments)


def records(folder):
    return [json.loads(line) for line in (folder / "updates.jsonl").open()]


def change(changes, by="the test"):
    return lambda trainer: trainer.update_config(changes, by=by)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


class TestEffects:
    def test_learning_rate(self, run):
        policy = live.LivePolicy()
        fit(live.make(run, policy), At(2, change({"lr": 3e-5})))
        assert policy.rates == [1e-5] * 2 + [3e-5] * 38
        (record,) = records(run)
        assert record["step"] == 2
        assert record["by"] == "the test"
        assert record["changes"] == {"policy.optimizer.kwargs.lr": 3e-5}
        assert record["before"] == {"policy.optimizer.kwargs.lr": 1e-5}

    def test_other_arguments_of_the_optimizer_stay(self, run):
        policy, seen = live.LivePolicy(), []
        fit(
            live.make(run, policy, toy={"max_num_steps": 4}),
            At(2, change({"weight_decay": 0.5})),
            At(3, lambda t: seen.append(t.config.policy.optimizer.kwargs)),
        )
        assert policy.decays == [0.01, 0.01, 0.5, 0.5]
        assert policy.rates == [1e-5] * 4
        assert seen[0]["betas"] == [0.9, 0.999]

    def test_a_policy_that_was_handed_in_is_left_as_it_was(self, run):
        policy = live.LivePolicy()
        fit(live.make(run, policy), At(2, change({"lr": 3e-5, "max_num_steps": 4})))
        assert policy.settings == {"lr": 1e-5, "weight_decay": 0.01}

    def test_fewer_steps(self, run):
        result = fit(live.make(run), At(3, change({"max_num_steps": 5})))
        assert result.steps == 5
        assert "max_num_steps (5)" in result.stop_reason
        assert result.checkpoint_path.name == "step_5"

    def test_more_steps_in_the_last_one(self, run):
        trainer = live.make(run, toy={"max_num_steps": 4})
        result = fit(trainer, At(4, change({"max_num_steps": 6})))
        assert result.steps == 6

    def test_more_passes(self, run):
        trainer = live.make(run, toy={"max_num_epochs": 1})
        assert fit(trainer, At(3, change({"max_num_epochs": 2}))).steps == 40

    def test_periods_of_checkpoints_and_validations(self, run):
        result = live.make(run, toy={"max_num_steps": 10}).fit(
            ROWS,
            val_dataset=live.ACCURACIES,
            callbacks=[
                At(4, change({"save_period": 3, "val_period": 5})),
            ],
            progress=False,
        )
        saved = {path.name for path in (run / "checkpoints").glob("step_*")}
        assert saved == {"step_6", "step_9", "step_10"}
        assert result.history.column("val:accuracy")[0] == [5, 10]

    def test_time_limit(self, run):
        trainer = live.make(
            run, toy={"max_num_steps": 6}, checkpointing={"save_period": 100}
        )
        fit(trainer, At(2, change({"checkpoint_must_save_by": "00:00:00:00"})))
        saved = {path.name for path in (run / "checkpoints").glob("step_*")}
        assert saved == {"step_2", "step_6"}

    def test_log_level(self, run):
        logger = logging.getLogger("rl_algorithms.trainers")
        before = logger.getEffectiveLevel()
        seen = []
        fit(
            live.make(run, toy={"max_num_steps": 6}),
            At(2, change({"logger.level": "DEBUG"})),
            At(4, lambda t: seen.append(logger.getEffectiveLevel())),
        )
        assert seen == [logging.DEBUG]
        assert logger.getEffectiveLevel() == before

    def test_period_of_samples_of_resources(self, run):
        trainer = live.make(run, toy={"max_num_steps": 4})
        names = []

        def threads(_):
            names.append({t.name for t in threading.enumerate()})

        at = At(1, change({"logger": {"sample_resources_every_s": 500}}))
        fit(trainer, At(1, threads), at, At(2, threads, "on_step_begin"))
        assert len(names[1] - names[0]) == 1

    def test_an_update_between_two_steps_comes_after_their_checkpoint(self, run):
        trainer = live.make(run, checkpointing={"save_period": 1})
        policy = trainer.given.policy
        at = At(3, change({"lr": 2e-5, "max_num_steps": 6}), "on_checkpoint")
        fit(trainer, at)
        assert policy.rates == [1e-5] * 3 + [2e-5] * 3
        assert records(run)[0]["moment"] == "step_begin"
        info = run / "checkpoints" / "step_3" / "training_info.json"
        assert json.loads(info.read_text())["state"]["updates"] == []

    def test_the_trainer_begins_again_with_its_own_configuration(self, run):
        trainer = live.make(run)
        first = trainer.config
        fit(trainer, At(3, change({"max_num_steps": 5})))
        assert trainer.config == first

    def test_metrics_and_checkpoints_say_it(self, run):
        fit(live.make(run), At(3, change({"max_num_steps": 5})))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        (event,) = [line for line in lines if "text" in line]
        assert event["step"] == 3
        assert "toy.max_num_steps None -> 5" in event["text"]["config_update"]
        kept = (run / "checkpoints" / "step_5" / "config.yaml").read_text()
        assert "max_num_steps: 5" in kept

    def test_the_audit_log_has_who_and_when(self, run, tmp_path):
        enable_audit(tmp_path / "audit.jsonl")
        try:
            fit(live.make(run), At(3, change({"max_num_steps": 5}, by="alice")))
        finally:
            disable_audit()
        lines = map(json.loads, (tmp_path / "audit.jsonl").open())
        (entry,) = [line for line in lines if line["action"] == "run.update"]
        assert (entry["by"], entry["step"], entry["outcome"]) == ("alice", 3, "ok")
        assert entry["changes"] == {"toy.max_num_steps": 5}


class TestRefusals:
    def refusal(self, run, changes, **settings):
        found = []

        def attempt(trainer):
            with pytest.raises(ConfigError) as error:
                trainer.update_config(changes)
            found.append(str(error.value))

        policy = live.LivePolicy()
        result = fit(live.make(run, policy, **settings), At(2, attempt))
        assert result.steps == 40
        assert set(policy.rates) == {1e-5}
        assert not (run / "updates.jsonl").exists()
        return found[0]

    @pytest.mark.parametrize("key", ["seed", "policy.model_name", "data.shuffle"])
    def test_a_key_that_cannot_change_names_those_that_can(self, run, key):
        said = self.refusal(run, {key: 3})
        assert f"{key} cannot change while the run goes on" in said
        assert "toy.max_num_steps" in said
        assert "policy.optimizer.kwargs.lr" in said
        assert "critic" not in said

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"max_num_steps": 0}, "toy.max_num_steps must be greater than 0: got 0"),
            ({"val_period": "often"}, "toy.val_period must be an integer"),
            ({"lr": -1.0}, "lr must be a number >= 0: got -1.0"),
            ({"save_perod": 3}, "did you mean 'save_period'"),
            ({"logger.level": "LOUD"}, "log level must be one of"),
            ({"checkpoint_must_save_by": "soon"}, "DD:HH:MM:SS"),
            ({"stop_at_validation_metric": "val:x"}, "belong together"),
            ({"toy": {"max_num_epochs": None}, "seed": 3}, "seed cannot change"),
            ({"val_at_end": True}, "there are no held-out data"),
            ({}, "changes nothing"),
        ],
    )
    def test_wrong_values_are_found_as_at_the_start(self, run, changes, words):
        assert words in self.refusal(run, changes)

    def test_all_or_none(self, run):
        said = self.refusal(run, {"lr": 1.0, "max_num_steps": -3})
        assert "max_num_steps" in said

    def test_a_policy_that_cannot(self, run):
        trainer = live.make(run, live.ToyPolicy(), toy={"max_num_steps": 3})
        with pytest.raises(ConfigError, match="has no method change_optimizer"):
            fit(trainer, At(2, change({"lr": 1.0})))

    def test_nothing_runs(self, run):
        with pytest.raises(ConfigError, match="there is none"):
            live.make(run).update_config({"lr": 1.0})

    def test_another_thread(self, run):
        found = []

        def attempt(trainer):
            with pytest.raises(ConfigError, match="update_run") as error:
                trainer.update_config({"lr": 1.0})
            found.append(error)

        def beside(trainer):
            thread = threading.Thread(target=attempt, args=(trainer,))
            thread.start()
            thread.join()

        fit(live.make(run, toy={"max_num_steps": 3}), At(2, beside))
        assert found

    def test_a_change_that_fails_half_way_leaves_nothing(self, run, monkeypatch):
        policy = live.LivePolicy()
        trainer = live.make(run, policy, toy={"max_num_steps": 6})

        def full(*_):
            raise OSError(28, "no space left")

        outputs = []

        def fill(_):
            monkeypatch.setattr(trainer._updates._file, "append", full)
            outputs.append(trainer._updates._outputs)

        at = At(2, change({"lr": 1.0, "save_period": 1}))
        with pytest.raises(OSError, match="no space"):
            fit(trainer, At(2, fill), at)
        assert policy.settings["lr"] == 1e-5
        assert outputs[0].checkpoints._config.save_period == 4


class TestResume:
    def test_after_sigkill_the_run_is_bitwise_that_without_it(self, tmp_path):
        undisturbed = live.LivePolicy()
        fit(
            live.make(tmp_path / "a", undisturbed),
            At(3, live.updating),
            At(9, change({"lr": 4e-5}, by="later")),
        )
        killed = tmp_path / "b"
        command = [sys.executable, str(HERE / "live_toy.py"), str(killed)]
        ended = subprocess.run(command, timeout=DEADLINE_S, check=False)
        assert ended.returncode == -signal.SIGKILL
        newest = max(
            (killed / "checkpoints").glob("step_*"), key=lambda p: int(p.name[5:])
        )
        assert newest.name == "step_8"

        resumed = live.LivePolicy()
        result = fit(live.make(killed, resumed), resume=True)
        assert result.steps == 12
        assert resumed.rates == [2e-5, 4e-5, 4e-5, 4e-5]
        assert undisturbed.rates[8:] == resumed.rates
        assert resumed.weight == undisturbed.weight
        assert [r["by"] for r in records(killed)] == ["the test", "later"]

    def test_from_an_earlier_checkpoint_all_updates_come_again(self, tmp_path):
        run = tmp_path / "run"
        first = live.LivePolicy()
        fit(live.make(run, first), At(6, change({"lr": 2e-5, "max_num_steps": 10})))
        again = live.LivePolicy()
        trainer = live.make(run, again)
        fit(trainer, resume=run / "checkpoints" / "step_4")
        assert again.rates == [1e-5] * 2 + [2e-5] * 4
        assert again.weight == first.weight
        assert len(records(run)) == 1

    def test_a_callback_that_updates_again_is_recorded_once(self, tmp_path):
        run = tmp_path / "run"
        at = At(6, change({"lr": 2e-5, "max_num_steps": 10}))
        fit(live.make(run), at)
        fit(live.make(run), at, resume=run / "checkpoints" / "step_4")
        assert len(records(run)) == 1

    def test_a_line_that_was_cut_off_counts_for_nothing(self, tmp_path):
        run = tmp_path / "run"
        fit(live.make(run), At(6, change({"max_num_steps": 10})))
        with (run / "updates.jsonl").open("a") as file:
            file.write('{"number": 2, "step"')
        fit(live.make(run), resume=run / "checkpoints" / "step_4")
        assert len(records(run)) == 1

    def test_a_new_run_in_the_folder_has_none(self, run):
        fit(live.make(run), At(6, change({"max_num_steps": 10})))
        assert fit(live.make(run), overwrite=True).steps == 40
        assert not (run / "updates.jsonl").exists()


SEND = """
import json, sys
from rl_algorithms import update_run
run, changes, by = sys.argv[1:]
update = update_run(run, json.loads(changes), by=by, deadline_s=120.0)
print(json.dumps(update.to_dict()))
"""


class TestRequests:
    def test_of_another_process(self, run):
        sent = []

        def send(trainer):
            command = [sys.executable, "-c", SEND, str(run)]
            arguments = [json.dumps({"lr": 2e-5, "max_num_steps": 9}), "alice"]
            process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE)
            sent.append(process)

        def wait(trainer):
            # Toy steps finish faster than a Python process starts.
            asked = run / "requests"
            with_deadline(lambda: any(asked.glob("*.request.json")))

        policy = live.LivePolicy()
        result = fit(live.make(run, policy), At(2, send), At(5, wait))
        said, _ = sent[0].communicate(timeout=DEADLINE_S)
        update = ConfigUpdate.from_dict(json.loads(said))
        assert update.by == "alice"
        assert update.step == 5
        assert result.steps == 9
        assert policy.rates == [1e-5] * 5 + [2e-5] * 4
        assert (run / "requests").stat().st_mode & 0o077 == 0

    def test_two_at_once(self, run):
        answers, threads = {}, []

        def ask(name, changes):
            answers[name] = update_run(run, changes, by=name, deadline_s=DEADLINE_S)

        def send(trainer):
            for name, rate in (("a", 2e-5), ("b", 3e-5)):
                thread = threading.Thread(target=ask, args=(name, {"lr": rate}))
                threads.append(thread)
                thread.start()
            waiting = run / "requests"
            with_deadline(lambda: len([*waiting.glob("*.request.json")]) == 2)

        policy = live.LivePolicy()
        fit(live.make(run, policy), At(2, send))
        for thread in threads:
            thread.join(DEADLINE_S)
        assert {a.number for a in answers.values()} == {1, 2}
        last = max(answers.values(), key=lambda a: a.number)
        assert policy.rates[2:] == [last.changes["policy.optimizer.kwargs.lr"]] * 38
        assert [r["by"] for r in records(run)] == [
            a.by for a in sorted(answers.values(), key=lambda a: a.number)
        ]

    def test_one_that_is_refused(self, run):
        errors, threads = [], []

        def ask():
            with pytest.raises(ConfigError) as error:
                update_run(run, {"seed": 3}, by="bob", deadline_s=DEADLINE_S)
            errors.append(str(error.value))

        def send(trainer):
            threads.append(threading.Thread(target=ask))
            threads[0].start()
            with_deadline(lambda: any((run / "requests").glob("*.request.json")))

        assert fit(live.make(run), At(2, send)).steps == 40
        threads[0].join(DEADLINE_S)
        assert "seed cannot change while the run goes on" in errors[0]
        assert "the update by bob" in errors[0]

    @pytest.mark.parametrize(
        ("changes", "error", "shown"),
        [
            ({"seed": 3}, "seed cannot change while the run goes on", {"seed": 3}),
            ({"lr": "much"}, "lr", {"lr": "much"}),
            (
                {"env": {"settings": {"api_key": "hunter22"}}},
                "cannot change while the run goes on",
                {"env": {"settings": {"api_key": "***"}}},
            ),
            (
                {"lr": 1e-6, "logger.api_key": "hunter22"},
                "logger.api_key",
                {"lr": 1e-6, "logger.api_key": "***"},
            ),
            (
                {"lr": {"api_key": "hunter22" * 20}},
                "lr",
                {"lr": {"api_key": "***"}},
            ),
        ],
    )
    def test_what_is_refused_is_audited_with_its_keys_and_error(
        self, run, tmp_path, caplog, changes, error, shown
    ):
        threads = []

        def ask():
            with pytest.raises(ConfigError):
                update_run(run, changes, by="bob", deadline_s=DEADLINE_S)

        def send(trainer):
            threads.append(threading.Thread(target=ask))
            threads[0].start()
            with_deadline(lambda: any((run / "requests").glob("*.request.json")))

        log = tmp_path / "audit.jsonl"
        enable_audit(log)
        try:
            fit(live.make(run), At(2, send))
        finally:
            disable_audit()
        threads[0].join(DEADLINE_S)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        refused = [e for e in entries if e["action"] == "run.update"]
        assert [e["outcome"] for e in refused] == ["refused"]
        assert refused[0]["by"] == "bob"
        assert refused[0]["changes"] == shown
        assert error in refused[0]["error"]
        assert "hunter22" not in log.read_text() + caplog.text

    def test_of_a_run_that_has_ended(self, run):
        fit(live.make(run, toy={"max_num_steps": 2}))
        with pytest.raises(ConfigError, match="no process carries out the run"):
            update_run(run, {"lr": 1.0}, deadline_s=DEADLINE_S)

    def test_of_a_run_that_ends_meanwhile(self, run):
        errors, threads = [], []

        def ask():
            with pytest.raises(ConfigError) as error:
                update_run(run, {"lr": 1.0}, deadline_s=DEADLINE_S)
            errors.append(str(error.value))

        def send(trainer):
            threads.append(threading.Thread(target=ask))
            threads[0].start()
            with_deadline(lambda: any((run / "requests").glob("*.request.json")))

        at = At(2, send, "on_train_end")
        fit(live.make(run, toy={"max_num_steps": 2}), at)
        threads[0].join(DEADLINE_S)
        assert "the run has ended" in errors[0]

    def test_no_run(self, tmp_path):
        with pytest.raises(ConfigError, match="there is no run in"):
            update_run(tmp_path / "none", {"lr": 1.0})

    def test_a_deadline_that_passes(self, run):
        def ask(trainer):
            # The run is inside this very hook and cannot answer.
            with pytest.raises(DeadlineExceededError, match="taken back"):
                update_run(run, {"max_num_steps": 3}, deadline_s=0.05)

        assert fit(live.make(run), At(2, ask)).steps == 40


def with_deadline(holds):
    condition = threading.Condition()
    with condition:
        for _ in range(int(DEADLINE_S / 0.02)):
            if holds():
                return
            condition.wait(0.02)
    raise AssertionError("the condition did not come true")


class TestKeys:
    def test_the_copy_is_the_same_but_for_the_changes(self):
        config = GRPOConfig(
            policy={"model_name": "x", "generation": {"max_new_tokens": 4}},
            grpo={"num_prompts_per_step": 4, "num_generations_per_prompt": 2},
        )
        changes = {"lr": 2e-6, "val_period": 3, "num_replicas": 2}
        new, flat = changed_config(config, changes, by="me")
        assert flat == {
            "policy.optimizer.kwargs.lr": 2e-6,
            "grpo.val_period": 3,
            "policy.generation.num_replicas": 2,
        }
        earlier = {"lr": 1e-5, "val_period": 10, "num_replicas": None}
        back, _ = changed_config(new, earlier, by="me")
        assert back.to_dict() == config.to_dict()

    def test_keys_of_a_run(self):
        config = GRPOConfig(policy={"model_name": "x"})
        keys = changeable_settings(config)
        assert {
            "grpo.max_num_steps",
            "grpo.max_num_epochs",
            "grpo.val_period",
            "checkpointing.save_period",
            "checkpointing.checkpoint_must_save_by",
            "logger.level",
            "logger.sample_resources_every_s",
            "policy.optimizer.kwargs.lr",
            "policy.generation.num_replicas",
        } <= set(keys)
        assert not {"seed", "policy.model_name", "output_dir"} & set(keys)


class TestWithWorkers:
    """GRPO on two ranks, each colocated with a replica."""

    SETTINGS: ClassVar[dict[str, object]] = {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 2,
        "max_new_tokens": 3,
        "max_total_sequence_length": 16,
        "reference_policy_kl_penalty": 0.0,
        "max_num_steps": 4,
        "save_period": 2,
        "lr": 1e-3,
        "cluster": {"workers_per_node": 2},
        "policy": {"scheduler": {"warmup_steps": 3}},
    }

    def train(self, pool, model, folder, *callbacks, **arguments):
        made = GRPOTrainer.from_pretrained(
            model, **self.SETTINGS, output_dir=str(folder)
        )
        return GRPOTrainer(made.config, pool=pool).fit(
            [{"prompt": f"{a}+1="} for a in range(8)],
            reward_fn=lambda prompt, response: float("1" in response),
            callbacks=callbacks,
            progress=False,
            **arguments,
        )

    @pytest.mark.usefixtures("ray_cluster")
    def test_learning_rate_and_replicas(self, tiny_model, tmp_path):
        counts = []

        def count(trainer, *_):
            counts.append(trainer.components.generation.num_replicas)

        rate = At(2, change({"lr": 5e-3}), "on_step_begin")
        seen = Always("on_step_begin", count)
        with KeptWorkers() as pool:
            plain = self.train(pool, tiny_model, tmp_path / "a", rate, seen)
            fewer = At(1, change({"num_replicas": 1}))
            more = At(3, change({"num_replicas": 2}))
            folder = tmp_path / "b"
            result = self.train(pool, tiny_model, folder, rate, fewer, more, seen)
            # One replica is active at this checkpoint; rate and number come again.
            again = self.train(
                pool, tiny_model, folder, seen, resume=folder / "checkpoints" / "step_2"
            )
        assert plain.history.column("train:lr")[1] == pytest.approx(
            [1e-3 / 3, 2e-3 / 3, 5e-3, 5e-3]
        )
        assert counts == [2, 2, 2, 2, 2, 1, 1, 2, 1, 2]
        assert result.history.column("train:lr") == plain.history.column("train:lr")
        weights = [
            load_file(found.checkpoint_path / "policy/weights/model.safetensors")
            for found in (plain, result, again)
        ]
        for name, value in weights[0].items():
            assert torch.equal(value, weights[1][name])
            assert torch.equal(value, weights[2][name])
        assert len(records(folder)) == 3


class Always(Callback):
    """Runs a function in every call of one hook."""

    def __init__(self, hook, do):
        setattr(self, hook, do)
