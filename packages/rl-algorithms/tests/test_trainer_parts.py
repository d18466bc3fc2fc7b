"""The pure parts of the loop: plan, schedule, settings, state, result, folders."""

from __future__ import annotations

import contextlib
import pickle
import re
import signal
import tracemalloc

import pytest
import torch
from hypothesis import given, strategies as st

from rl_algorithms import GRPOConfig, GRPOTrainer, Interrupted, SFTConfig
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.evaluation.config import EvalConfig
from rl_algorithms.ppo.config import PPOConfig
from rl_algorithms.trainers.checkpoints import RunCheckpoints
from rl_algorithms.trainers.run.figures import Figures
from rl_algorithms.trainers.run.history import History, metric_name
from rl_algorithms.trainers.run.result import TrainResult
from rl_algorithms.trainers.run.resume import find_resume
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.schedule import (
    EarlyStop,
    Patience,
    ValidationSchedule,
    count_steps,
    unranked_warning,
)
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.config import EnvConfig
from rl_algorithms.trainers.settings.keywords import build_config, route
from rl_algorithms.trainers.setup.components import Components
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.checkpoint import CheckpointingConfig
from rl_distributed.errors import ConfigError
from rl_distributed.metrics.values import Mean, Sum


class TestBatchPlan:
    def test_says_what_the_sizes_mean(self):
        text = BatchPlan(4, 8, 16, 2, 4).describe()
        assert "4 prompts x 8 generations = 32 samples" in text
        assert "2 optimizer step(s) of 16 rows" in text
        assert "2 training worker(s) with 8 rows each" in text

    def test_refuses_a_batch_that_does_not_divide_the_samples(self):
        with pytest.raises(ConfigError, match=r"got 24; use 16 or 32"):
            BatchPlan(4, 8, 24, 1, 4)

    def test_refuses_a_batch_that_the_workers_cannot_share(self):
        with pytest.raises(ConfigError, match=r"got 8 with 3; use 6 or 9"):
            BatchPlan(1, 8, 8, 3, 4)

    @given(
        steps=st.integers(1, 5),
        ranks=st.integers(1, 4),
        per_rank=st.integers(1, 4),
        data=st.data(),
    )
    def test_fewer_rows_keep_the_optimizer_steps(self, steps, ranks, per_rank, data):
        global_batch_size = ranks * per_rank
        plan = BatchPlan(steps * global_batch_size, 1, global_batch_size, ranks, 1)
        rows = data.draw(st.integers(1, plan.num_samples))
        padded, size = plan.rows_for(rows)
        assert padded >= rows
        assert size % ranks == 0
        assert padded % size == 0
        assert padded // size == min(steps, rows)

    def test_a_full_step_needs_no_padding(self):
        assert BatchPlan(4, 8, 16, 2, 4).rows_for(32) == (32, 16)


def test_sections_may_be_named_like_parts(tiny_model):
    config = GRPOTrainer.from_pretrained(
        tiny_model,
        generation={"max_new_tokens": 5},
        tokenizer={"chat_template": "{{ messages }}"},
    ).config
    assert config.policy.generation.max_new_tokens == 5
    assert config.policy.tokenizer.chat_template == "{{ messages }}"


class TestCheckpoints:
    def make(self, folder, **settings):
        config = CheckpointingConfig(metric_name="val:accuracy", **settings)
        return RunCheckpoints(config, folder, "grpo")

    def test_the_best_is_better_than_all_earlier_ones(self, tmp_path):
        highest = self.make(tmp_path)
        is_best = [highest.is_best({"val:accuracy": v}, [0.2, 0.6])
                   for v in (0.1, 0.4, 0.6, 0.7)]  # fmt: skip
        assert is_best == [False, False, False, True]
        lowest = self.make(tmp_path, higher_is_better=False)
        assert lowest.is_best({"val:accuracy": 0.1}, [0.2, 0.6])
        assert not lowest.is_best({"val:accuracy": 0.4}, [0.2, 0.6])
        assert not highest.is_best({"val:reward": 1.0}, [])

    def test_nan_is_never_the_best(self, tmp_path):
        nan = float("nan")
        for higher in (True, False):
            found = self.make(tmp_path, higher_is_better=higher)
            assert not found.is_best({"val:accuracy": nan}, [])
            assert found.is_best({"val:accuracy": 0.5}, [nan])
            assert not found.is_best({"val:accuracy": 0.5}, [nan, 0.5])

    def test_when_one_is_due(self, tmp_path):
        on = self.make(tmp_path, save_period=3)
        assert [s for s in range(1, 8) if on.due(s, last=False, best=False)] == [3, 6]
        assert on.due(7, last=True, best=False)
        off = self.make(tmp_path, enabled=False, save_period=3)
        assert not off.due(3, last=True, best=True)


class TestSchedule:
    def test_period_start_and_ends(self):
        schedule = ValidationSchedule(3, start_at=5, at_start=True, at_end=True)
        due = [s for s in range(11) if schedule.due(s, last=s == 10)]
        assert due == [0, 6, 9, 10]
        first = ValidationSchedule(3, start_at=6)
        assert [s for s in range(10) if first.due(s, last=False)] == [6, 9]

    def test_off(self):
        schedule = ValidationSchedule()
        assert not any(schedule.due(s, last=s == 9) for s in range(10))
        assert not schedule.ever

    def test_patience_needs_more_than_the_least_gain(self):
        patience = Patience("val:accuracy", 2)
        state = TrainerState()
        for value in (0.5, 0.5):
            patience.observe(state, {"val:accuracy": value})
        assert (state.best_value, state.validations_since_best) == (0.5, 1)
        patience.observe(state, {"val:accuracy": 0.625})
        assert (state.best_value, state.validations_since_best) == (0.625, 0)
        patience.observe(state, {"val:accuracy": 0.5})
        assert patience.reason(state) is None
        patience.observe(state, {"val:accuracy": 0.5})
        assert "has not improved on 0.625 in 2" in (patience.reason(state) or "")
        patience.observe(state, {"val:accuracy": float("nan")})
        assert (state.best_value, state.validations_since_best) == (0.625, 3)
        choosy = Patience("val:accuracy", 2, min_delta=0.25)
        for value in (0.875, 0.9375):
            choosy.observe(state, {"val:accuracy": value})
        assert (state.best_value, state.validations_since_best) == (0.9375, 0)

    def test_patience_with_nan_at_the_start(self):
        patience, state = Patience("val:accuracy", 2), TrainerState()
        for value in (float("nan"), 0.1, 0.5):
            patience.observe(state, {"val:accuracy": value})
        assert (state.best_value, state.validations_since_best) == (0.5, 0)
        state = TrainerState()
        for _ in range(2):
            patience.observe(state, {"val:accuracy": float("nan")})
        reason = patience.reason(state)
        assert reason == "val:accuracy was not a number in 2 validations"

    def test_early_stop(self):
        stop = EarlyStop("val:accuracy", 0.9)
        assert stop.reason({"val:accuracy": 0.89}) is None
        assert "0.95 >= 0.9" in (stop.reason({"val:accuracy": 0.95}) or "")
        falling = EarlyStop("val:loss", 0.1, higher_is_better=False)
        assert falling.reason({"val:loss": 0.2}) is None
        assert falling.reason({"val:loss": 0.1})

    def test_a_missed_goal_is_told(self):
        stop = EarlyStop("val:accuracy", 0.9)
        said = "the goal was missed: val:accuracy is 0.89, not >= 0.9"
        assert stop.shortfall({"val:accuracy": 0.89}) == said
        assert stop.shortfall({"val:accuracy": 0.9}) == ""
        assert stop.shortfall({"val:accuracy": float("nan")}).endswith("not >= 0.9")
        assert stop.shortfall({}) == EarlyStop().shortfall({"val:accuracy": 0.1}) == ""
        falling = EarlyStop("val:loss", 0.1, higher_is_better=False)
        assert falling.shortfall({"val:loss": 0.2}).endswith("is 0.2, not <= 0.1")

    def test_early_stop_names_the_metrics_there_are(self):
        with pytest.raises(ConfigError, match=r"no 'val:acc'.*val:accuracy"):
            EarlyStop("val:acc", 1.0).reason({"val:accuracy": 1.0})

    @pytest.mark.parametrize(
        ("save_period", "schedule", "total", "said"),
        [
            (10, ValidationSchedule(5), 20, None),
            (10, ValidationSchedule(5, at_end=True), 23, None),
            (
                10,
                ValidationSchedule(4),
                41,
                r"=10 .* 3 of 5 .* \(steps 10, 30, 41\) .* multiple of val_period "
                r"\(4\), and set val_at_end",
            ),
            (
                3,
                ValidationSchedule(10, at_end=True),
                40,
                r"12 of 14 .* \(steps 3, 6, 9, \.\.\.\) .* \(10\)$",
            ),
            (
                5,
                ValidationSchedule(5, start_at=11),
                15,
                r"2 of 3 .* \(steps 5, 10\) will have no val:x",
            ),
            (4, ValidationSchedule(at_end=True), 8, r"1 of 2 .* \(steps 4\) .*period$"),
            (4, ValidationSchedule(), 8, "ranks nothing, because no validation"),
        ],
    )
    def test_checkpoints_that_no_validation_ranks(
        self, save_period, schedule, total, said
    ):
        ranking = CheckpointingConfig(metric_name="val:x", save_period=save_period)
        found = unranked_warning(ranking, schedule, total, has_data=True)
        if said is None:
            assert found is None
        else:
            assert re.search(said, found), found
        for other in ({"metric_name": None}, {"metric_name": "train:x"}):
            quiet = ranking.replace(**other)
            assert unranked_warning(quiet, schedule, total, has_data=True) is None
        assert "ranks nothing" in unranked_warning(
            ranking, schedule, total, has_data=False
        )

    def test_count_steps(self):
        assert count_steps(10, 2, None) == 20
        assert count_steps(10, 2, 7) == 7
        assert count_steps(10, None, 70) == 70
        with pytest.raises(ConfigError, match="never end"):
            count_steps(10, None, None)


class TestSettings:
    def test_leaf_names_find_their_section(self):
        config = build_config(
            GRPOConfig,
            {
                "policy.model_name": "m",
                "num_prompts_per_step": 4,
                "num_generations_per_prompt": 2,
                "lr": 1e-3,
                "max_new_tokens": 7,
                "seed": 3,
                "save_period": 5,
                "checkpointing": {"keep_top_k": 2},
            },
        )
        assert config.grpo.num_prompts_per_step == 4
        assert config.policy.optimizer.kwargs["lr"] == 1e-3
        assert config.policy.optimizer.kwargs["weight_decay"] == 0.01
        assert config.policy.generation is not None
        assert config.policy.generation.max_new_tokens == 7
        assert config.seed == 3
        assert config.checkpointing.save_period == 5
        assert config.checkpointing.keep_top_k == 2

    def test_unknown_name_gives_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean 'num_prompts_per_step'"):
            route(GRPOConfig, "num_prompt_per_step")

    def test_ambiguous_name_gives_the_paths(self):
        with pytest.raises(
            ConfigError, match=r"policy\.precision or policy\.generation"
        ):
            route(GRPOConfig, "precision")

    def test_backend_is_that_of_training(self):
        assert route(GRPOConfig, "backend") == "policy.backend"
        assert route(PPOConfig, "backend") == "policy.backend"
        assert route(EvalConfig, "backend") == "generation.backend"

    def test_wrong_dotted_path_gives_the_nearest(self):
        with pytest.raises(ConfigError, match="max_grad_norm"):
            build_config(
                GRPOConfig, {"policy.model_name": "m", "policy.max_grad_nrm": 1.0}
            )

    def test_base_is_kept(self):
        base = build_config(SFTConfig, {"policy.model_name": "m", "lr": 0.5})
        config = build_config(SFTConfig, {"max_num_steps": 3}, base=base)
        assert config.policy.optimizer.kwargs["lr"] == 0.5
        assert config.sft.max_num_steps == 3


class TestConfigs:
    def make(self, **settings):
        return build_config(GRPOConfig, {"policy.model_name": "m", **settings})

    def test_defaults_fit_each_other(self):
        config = self.make()
        plan = GRPOTrainer(config).plan
        assert plan.num_optimizer_steps == 1
        assert plan.global_batch_size == 32 * 8
        assert config.policy.generation.max_new_tokens == 256

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_generations_per_prompt": 1}, "at least 2"),
            (
                {"max_new_tokens": 512, "max_total_sequence_length": 512},
                "leave room for the prompt",
            ),
            ({"stop_at_validation_metric": "val:accuracy"}, "belong together"),
            (
                {"use_dynamic_sampling": True, "drop_zero_variance_groups": True},
                "exclude each other",
            ),
            (
                {"skip_reference_policy_logprobs_calculation": True},
                "reference_policy_kl_penalty=0",
            ),
        ],
    )
    def test_impossible_combinations(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            self.make(**settings)

    @pytest.mark.parametrize(
        ("settings", "limits"),
        [
            ({}, (1, None)),
            ({"max_num_steps": 3}, (None, 3)),
            ({"max_num_steps": 3, "max_num_epochs": 2}, (2, 3)),
            ({"max_num_epochs": 2}, (2, None)),
        ],
    )
    def test_a_limit_that_is_set_replaces_the_default_one(self, settings, limits):
        section = self.make(**settings).grpo
        assert (section.epoch_limit, section.max_num_steps) == limits


class TestState:
    def test_restore_keeps_where_this_run_ends(self):
        old = TrainerState(step=4, total_steps=5, stop_reason="x", epoch=1)
        new = TrainerState(total_steps=10)
        new.restore(old.to_dict())
        assert (new.step, new.epoch, new.total_steps) == (4, 1, 10)
        assert new.stop_reason is None


class TestResult:
    def test_files_have_the_names_of_code_and_config(self):
        for name in ("train:loss", "val:accuracy", "timing:a/b", "performance:x"):
            assert metric_name(name) == name
        assert metric_name("system/cpu_percent") is None
        assert metric_name("val:") is None

    def test_names_of_files_of_earlier_versions(self):
        assert metric_name("train/loss") == "train:loss"
        assert metric_name("validation/low/accuracy") == "val:low/accuracy"
        assert metric_name("timing/train/a/b") == "timing:a/b"
        assert metric_name("timing/validation/x") is None

    def test_history_reads_what_counts(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text(
            '{"step": 0, "metrics": {"system/cpu_percent": 5.0}}\n'
            '{"step": 1, "metrics": {"train/loss": 3.0}}\n'
            '{"step": 2, "metrics": {"train/loss": 2.0}}\n'
            '{"step": 3, "metrics": {"train/loss": 9.0}}\n'
            '{"step": 2, "metrics": {"train/loss": 1.0, "validation/accuracy": 0.5}}\n'
            '{"step": 2, "metr'
        )
        history = History.read(path, up_to=2)
        assert history == [
            {"step": 1, "train:loss": 3.0},
            {"step": 2, "train:loss": 1.0, "val:accuracy": 0.5},
        ]
        assert history.column("val:accuracy") == ([2], [0.5])
        assert History.read(tmp_path / "none", up_to=2) == []

    def test_history_is_read_like_a_list(self):
        records = [{"step": s, "train:loss": s / 2} for s in (1, 2, 3)]
        history = History(records)
        history.add(3, {"val:accuracy": 1.0, "train:loss": 0.5})
        records[2] |= {"train:loss": 0.5, "val:accuracy": 1.0}
        assert history == records
        assert list(reversed(history)) == records[::-1]
        assert (history[-1], history[:2]) == (records[2], records[:2])
        assert history.at(3) == {"train:loss": 0.5, "val:accuracy": 1.0}
        assert history.at(4) == {}
        assert history.column("train:loss") == ([1, 2, 3], [0.5, 1.0, 0.5])
        assert history.names == {"train:loss", "val:accuracy"}

    def test_history_takes_little_memory_per_step(self):
        history = History()

        def add(steps):
            for step in steps:
                history.add(step, {f"train:{n}": step + n / 7 for n in range(100)})

        add(range(10))
        tracemalloc.start()
        try:
            add(range(10, 210))
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        # 8 bytes per value, and what a record needs besides.
        assert taken / 200 < 2 * 8 * 100

    def test_data_frame(self):
        history = History([{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0, "b": 3.0}])
        frame = history.to_pandas()
        assert list(frame.index) == [1, 2]
        assert list(frame.columns) == ["a", "b"]
        assert frame["b"].isna().tolist() == [True, False]
        assert History().to_pandas().empty

    def test_says_what_came_of_it(self, tmp_path):
        history = History([{"step": s, "train:reward": s / 4} for s in (1, 2)])
        path = tmp_path / "step_2"
        result = TrainResult({}, history, path, tmp_path, 2, "enough")
        assert repr(result).splitlines() == [
            "TrainResult: 2 steps, enough",
            "  train:reward   0.25 -> 0.5",
            "  history        History(2 records, 1 metrics)",
            f"  checkpoint     {path}",
        ]

    def test_plot_draws_a_picture(self, tmp_path):
        history = History([{"step": s, "train:loss": 1.0 / s} for s in (1, 2, 3)])
        result = TrainResult({}, history, None, tmp_path, 3, "")
        path = result.plot()
        assert path.read_bytes().startswith(b"\x89PNG")
        svg = result.plot(tmp_path / "new" / "a.svg").read_text()
        assert svg.count("<!-- train:loss -->") == 1
        with pytest.raises(ValueError, match="has none of nope"):
            result.plot(metrics=["nope"])


class TestFigures:
    def of(self, **columns):
        steps = range(max(len(values) for values in columns.values()))
        return Figures.of(
            History(
                {
                    "step": s,
                    **{n.replace("_", ":", 1): v[s] for n, v in columns.items()},
                }
                for s in steps
            )
        )

    def test_of_the_most_telling_measure(self):
        found = self.of(val_accuracy=[0.25, 0.75, 0.5], train_reward=[1.0, 2.0, 3.0])
        assert (found.measure, found.start, found.best, found.end) == (
            "val:accuracy",
            0.25,
            0.75,
            0.5,
        )
        assert (found.start_step, found.best_step) == (0, 1)
        assert found.nothing_learnt is None

    def test_held_out_data_tell_more_than_training_and_answers_more_than_losses(self):
        order = ["val_accuracy", "val_reward", "val_val_loss", "val_loss"]
        order += ["train_reward", "train_loss"]
        for i, first in enumerate(order):
            columns = {name: [1.0] for name in reversed(order[i:])}
            assert self.of(**columns).measure == first.replace("_", ":", 1)

    def test_nan_is_not_the_best(self):
        nan = float("nan")
        found = self.of(val_accuracy=[nan, 0.25, nan, 0.75])
        assert (found.best, found.best_step) == (0.75, 3)
        assert self.of(val_accuracy=[nan, nan]).best_step == 0

    def test_the_best_loss_is_the_lowest(self):
        found = self.of(val_val_loss=[2.0, 1.0, 1.5])
        assert (found.best, found.best_step, found.nothing_learnt) == (1.0, 1, None)

    def test_a_plain_sentence_where_nothing_was_learnt(self):
        found = self.of(val_accuracy=[0.5, 0.25, 0.5])
        assert found.nothing_learnt == (
            "Nothing was learnt: val:accuracy is 50.0% at the start and 50.0% at best "
            "afterwards."
        )
        falling = self.of(train_reward=[2.0, 2.0, 1.0, 1.0]).nothing_learnt
        assert falling == (
            "Nothing was learnt: train:reward is 2 in the first half of the steps and "
            "1 in the second."
        )
        assert self.of(train_reward=[1.0, 1.0, 1.0, 2.0]).nothing_learnt is None
        assert "Nothing" in self.of(val_val_loss=[1.0, 2.0]).nothing_learnt

    def test_nan_does_not_hide_that_nothing_was_learnt(self):
        nan = float("nan")
        assert "Nothing" in self.of(val_accuracy=[nan, 0.5, 0.5]).nothing_learnt
        assert "Nothing" in self.of(train_reward=[nan, 2.0, 2.0, nan]).nothing_learnt
        assert self.of(val_accuracy=[0.5, nan, nan]).nothing_learnt is None
        assert self.of(val_accuracy=[0.5, nan, 0.75]).nothing_learnt is None

    def test_of_a_run_that_measured_nothing(self):
        assert Figures.of(History()) == Figures()
        assert (
            Figures.of(History([{"step": 1, "val:reward": 1.0}])).nothing_learnt is None
        )


class TestEnvConfig:
    def test_variables_that_are_passed(self, monkeypatch):
        monkeypatch.setenv("JUDGE_API_KEY", "k")
        config = EnvConfig(name="mine", pass_env=["JUDGE_API_KEY"])
        assert config.passed() == {"JUDGE_API_KEY": "k"}
        assert "'k'" not in str(config.to_dict())
        missing = EnvConfig(name="mine", pass_env=["NO_SUCH_KEY"])
        with pytest.raises(ConfigError, match=r"env.pass_env names NO_SUCH_KEY, which"):
            missing.passed()


class TestRunFolder:
    def test_nothing_to_resume(self, tmp_path):
        settings = CheckpointingConfig()
        with pytest.raises(ConfigError, match="no checkpoint in"):
            find_resume(tmp_path / "run", True, settings)
        assert find_resume(tmp_path / "run", "auto", settings) is None
        with pytest.raises(ConfigError, match="not a folder"):
            find_resume(tmp_path, tmp_path / "nope", settings)


class TestSignals:
    def test_raises_at_once(self):
        with pytest.raises(Interrupted) as caught, SignalGuard():
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.exit_code == 143

    def test_raises_again_what_was_swallowed(self):
        with SignalGuard() as guard:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted):
                guard.check()
            guard.acknowledge()
            guard.check()

    def test_what_comes_too_late_reaches_the_outer_guard(self):
        def close_too_late():
            with SignalGuard() as inner:
                inner.close()
                signal.raise_signal(signal.SIGINT)

        with SignalGuard() as outer:
            with pytest.raises(Interrupted):
                close_too_late()
            assert outer.pending == signal.SIGINT
            outer.acknowledge()

    def test_waits_for_a_protected_stretch(self):
        done = []

        def run(guard):
            with guard.protected():
                signal.raise_signal(signal.SIGINT)
                done.append(1)
            done.append(2)

        with pytest.raises(Interrupted), SignalGuard() as guard:
            run(guard)
        assert done == [1]

    def test_a_second_signal_does_not_wait(self):
        with SignalGuard() as guard:
            guard.hold()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGINT)
            guard.acknowledge()

    def test_one_closed_terminal_sends_several_hangups(self):
        with SignalGuard() as guard:
            guard.hold()
            for _ in range(3):
                signal.raise_signal(signal.SIGHUP)
            with pytest.raises(Interrupted) as caught:
                guard.release()
            assert caught.value.exit_code == 129
            guard.acknowledge()
            # While the run is being saved.
            signal.raise_signal(signal.SIGHUP)
            guard.check()

    def test_a_hangup_after_ctrl_c_is_no_wish_to_leave_at_once(self):
        with SignalGuard() as guard:
            guard.hold()
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
            assert guard.pending == signal.SIGINT
            guard.acknowledge()

    def test_a_program_that_outlives_its_terminal_goes_on(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with SignalGuard() as guard:
                signal.raise_signal(signal.SIGHUP)
                guard.check()
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_handlers_are_put_back(self):
        before = signal.getsignal(signal.SIGINT)
        with SignalGuard():
            assert signal.getsignal(signal.SIGINT) != before
        assert signal.getsignal(signal.SIGINT) == before

    def test_crosses_processes(self):
        error = pickle.loads(pickle.dumps(Interrupted(2, "/x")))
        assert (error.signum, str(error.checkpoint_path)) == (2, "/x")
        assert "SIGINT" in str(error)
        assert "/x" in str(error)


def rows_of(num_rows):
    """Return rows of three tokens, of which the first and the last are masked in."""
    return BatchedDataDict(
        {
            "input_ids": torch.ones(num_rows, 3, dtype=torch.int64),
            "input_lengths": torch.full((num_rows,), 3),
            "token_mask": torch.tensor([[1.0, 0.0, 1.0]] * num_rows),
            "sample_mask": torch.ones(num_rows),
        }
    )


class TestTrainingRows:
    def test_rows_that_fill_a_step_up_do_not_count(self):
        plan = BatchPlan(4, 1, 2, 2, 1)
        rows, per_step = pad_to_plan(rows_of(3), plan)
        assert (rows.size, per_step) == (4, 2)
        assert rows["sample_mask"].tolist() == [1.0, 1.0, 1.0, 0.0]
        # The first token of a row has no prediction.
        assert count_tokens(rows) == {
            "num_samples": 3.0,
            "num_tokens": 12.0,
            "num_valid_tokens": 3.0,
        }

    def test_sums_are_averaged_over_the_optimizer_steps(self):
        values = {"share": [Sum(1.0), Sum(3.0)], "ratio": [Mean(2.0, 4.0), Mean(1, 4)]}
        found = train_metrics({"loss": [1.0, 2.0], "all_mb_metrics": values})
        assert float(found["share"]) == 2.0
        assert float(found["ratio"]) == 3 / 8
        assert found["loss"] == 1.5


def test_a_part_that_no_algorithm_has_asked_for_is_named():
    policy = object()
    parts = Components(policy=policy)
    assert parts.required.policy is policy
    assert parts.critic is None
    with pytest.raises(AlgorithmError, match=r"components\.critic .* _needs"):
        _ = parts.required.critic
