"""The asynchronous driver with a function-based generator and environments."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.distillation.config import DistillationConfig
from rl_algorithms.errors import AlgorithmError, RolloutError, ScheduleError
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.ppo.config import PPOConfig
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.engine import RolloutEngine
from rl_algorithms.rollout.judge import Judge
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.rollout.trajectories import PlayedRow
from rl_algorithms.trainers.ahead import scoring
from rl_algorithms.trainers.ahead.answer_files import read_answers, write_answers
from rl_algorithms.trainers.ahead.jobs import Job, Scoring
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.sampler import AheadSampler
from rl_algorithms.trainers.ahead.saved import SavedAhead
from rl_algorithms.trainers.ahead.scoring import (
    EnvironmentDesk,
    OneCallAtATime,
    calls_of,
    for_several_threads,
)
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_algorithms.trainers.ahead.start import check_ahead
from rl_algorithms.trainers.settings.asynchronous_config import AsynchronousConfig
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_distributed.errors import ConfigError, WorkerDiedError
from rl_envs import AgentEnvironment, EnvironmentInterface

spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)

DEADLINE_S = 30.0
LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def tokenizer():
    return scripted.ambiguous_tokenizer()


class Sync:
    """Publishes and loads numbers instead of weights."""

    def __init__(self, generation):
        self.generation, self.loads = generation, []

    def publish(self, number):
        return [number]

    def load(self, published):
        (number,) = published
        self.loads.append(number)
        self.generation.weight_version = number


def loader_of(tokenizer, prompts=LETTERS, size=2, **options):
    rows = process_prompts([{"prompt": prompt} for prompt in prompts], tokenizer)
    return BatchedDataLoader(
        rows,
        size,
        collate_fn=lambda batch: rl_collate_fn(
            batch, pad_token_id=tokenizer.pad_token_id
        ),
        **{"drop_last": True, **options},
    )


class Run:
    """A sampler with its parts, and a trainer that steps it."""

    def __init__(
        self,
        tokenizer,
        tmp_path,
        judge,
        *,
        sample=None,
        calls_at_once=1,
        rollout=None,
        saved=None,
        first_step=0,
        max_num_steps=4,
        **config,
    ):
        if sample is None:
            sample = scripted.texts_of(tokenizer, lambda call, row: "ab$")
        self.generation = scripted.TokenGenerator(
            sample, lambda call: self.generation.weight_version
        )
        self.generation.weight_version = first_step
        self.environment = judge
        if not isinstance(judge, EnvironmentInterface):
            self.environment = scripted.Judge(judge)
            self.environment.calls_at_once = calls_at_once
        rollout = RolloutConfig(**(rollout or {}))
        self.rollouts = RolloutEngine(
            self.generation, for_several_threads(self.environment), tokenizer, rollout
        )
        self.loader = loader_of(tokenizer)
        self.sync = Sync(self.generation)
        self.number = first_step
        self.sampler = AheadSampler(
            AsynchronousConfig(**config),
            RunShape(
                num_prompts=2,
                num_generations=2,
                max_num_steps=max_num_steps,
                max_num_epochs=None,
                first_step=first_step,
                max_turns=rollout.max_turns if self.rollouts.agents is None else 2,
                max_attempts=rollout.retry.max_attempts,
                seed=7,
                max_trainer_restarts=3,
                updates_in_flight=config.get("weight_updates") == "between_tokens",
            ),
            PromptSource(self.loader, 2),
            self.rollouts,
            self.generation,
            self.sync,
            calls_at_once=calls_at_once,
            pad_token_id=tokenizer.pad_token_id,
            check=lambda: None,
            saved=saved,
            log_folder=tmp_path,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.sampler.close()
        self.rollouts.close()
        self.environment.shutdown()

    def step(self):
        """Take a step; return the letters of its prompts and the metrics."""
        result, metrics = self.sampler.next_step()
        self.number += 1
        self.sampler.end_step(self.number)
        if result is None:
            return None, metrics
        prompts = [log[0]["content"][:1] for log in result.message_logs]
        assert prompts[::2] == prompts[1::2]  # groups are complete and contiguous
        return "".join(prompts[::2]), metrics


def good(log, info):
    return 1.0, True, ""


class Keeping(scripted.Judge):
    """Records which conversations begin and end."""

    def __init__(self):
        super().__init__(lambda log, info: (1.0, info["number"] % 2 == 0, "cde"))
        self.begun, self.closed, self.seeds = [], [], []

    def reset(self, metadata, seeds):
        self.seeds += seeds
        first = len(self.begun)
        self.begun += range(first, first + len(seeds))
        return [{**row, "number": first + i} for i, row in enumerate(metadata)]

    def close(self, metadata):
        self.closed += [row["number"] for row in metadata]


class TestStep:
    def test_rows_are_those_of_a_rollout(self, tokenizer, tmp_path):
        def judge(log, info):
            # The first prompt ends after a turn, the others continue.
            return float(len(log)), log[0]["content"] == "a", "cde"

        def sample(call, row, seed):
            return [3 + seed % 7, scripted.EOS]

        with Run(
            tokenizer,
            tmp_path,
            judge,
            sample=sample,
            rollout={"max_turns": 3, "max_total_sequence_length": 32},
            max_staleness=0,
        ) as run:
            result, _ = run.sampler.next_step()
            expected = run.rollouts.run(
                run.loader.batch_at(0, [0, 1]), num_generations=2, seed=7
            )
        assert result.message_logs == expected.message_logs
        assert result.metrics == expected.metrics
        assert set(result.rows) == set(expected.rows)
        for name, column in expected.rows.items():
            found = result.rows[name]
            if isinstance(column, torch.Tensor) and column.dim() == 2:
                column = column[:, : found.shape[1]]
            same = torch.equal if isinstance(column, torch.Tensor) else list.__eq__
            assert same(found, column), name

    def test_each_conversation_is_closed(self, tokenizer, tmp_path):
        environment = Keeping()
        with Run(
            tokenizer,
            tmp_path,
            environment,
            rollout={"max_turns": 3},
            max_staleness=1,
        ) as run:
            [run.step() for _ in range(4)]
            run.sampler.next_step()
        # Half of them end on their own, the others at the turn limit.
        assert len(environment.begun) == 16
        assert sorted(environment.begun) == sorted(environment.closed)
        assert len(set(environment.seeds)) == 8

    def test_conversations_in_flight_are_closed_at_the_end(self, tokenizer, tmp_path):
        second, release = threading.Event(), threading.Event()

        def sample(call, row, seed):
            if call:
                second.set()
                assert release.wait(DEADLINE_S)
            return [3, scripted.EOS]

        environment = Keeping()
        with Run(
            tokenizer,
            tmp_path,
            environment,
            sample=sample,
            rollout={"max_turns": 3},
            max_staleness=0,
        ):
            assert second.wait(DEADLINE_S)
            # Long after the desk of the generator takes no more.
            threading.Timer(0.5, release.set).start()
        assert sorted(set(environment.closed)) == environment.begun

    def test_each_prompt_comes_once_and_none_too_old(self, tokenizer, tmp_path):
        with Run(tokenizer, tmp_path, good, max_staleness=2) as run:
            steps = [run.step() for _ in range(4)]
            ends = run.sampler.next_step()
        assert sorted("".join(prompts for prompts, _ in steps)) == list(LETTERS)
        ages = [metrics["asynchronous/staleness_max"].value for _, metrics in steps]
        assert ages[0] == 0.0
        assert 1.0 <= max(ages) <= 2.0
        assert ends == (None, {})
        assert run.sampler.end_reason == "max_num_steps (4) reached"

    def test_a_slow_reward_holds_up_nobody_else(self, tokenizer, tmp_path):
        release = threading.Event()

        def judge(log, info):
            if log[0]["content"] == "a":
                assert release.wait(DEADLINE_S)
            return 1.0, True, ""

        with Run(tokenizer, tmp_path, judge, calls_at_once=4, max_staleness=1) as run:
            first, _ = run.step()
            release.set()
            rest = [run.step()[0] for _ in range(3)]
        assert "a" not in first
        assert sorted(first + "".join(rest)) == list(LETTERS)

    @pytest.mark.parametrize("max_turns", [1, 3])
    def test_what_arrives_together_is_judged_in_one_call(
        self, tokenizer, tmp_path, max_turns
    ):
        sizes = []

        class Counting(scripted.Judge):
            def step(self, message_log_batch, metadata):
                sizes.append(len(metadata))
                return super().step(message_log_batch, metadata)

        environment = Counting(lambda log, info: (1.0, False, "cde"))
        with Run(
            tokenizer,
            tmp_path,
            environment,
            rollout={"max_turns": max_turns, "max_total_sequence_length": 64},
            max_staleness=0,
        ) as run:
            [run.step() for _ in range(4)]
            calls = [call.size for call in run.generation.calls]
        assert sizes == calls == [4] * 4 * max_turns

    def test_weights_come_between_answers(self, tokenizer, tmp_path):
        with Run(tokenizer, tmp_path, good, max_staleness=1) as run:
            for _ in range(3):
                run.step()
            assert run.sampler.wait_for_weights()
        assert run.sync.loads == [1, 2, 3]

    def test_weights_of_somebody_else(self, tokenizer, tmp_path):
        def sample(call, row, seed):
            self.run.generation.versions = lambda call: 5
            return [3, scripted.EOS]

        with (
            Run(tokenizer, tmp_path, good, sample=sample, max_staleness=0) as self.run,
            pytest.raises(AlgorithmError, match="while it served 0"),
        ):
            self.run.step()


class TestWeightsInFlight:
    def run(self, tokenizer, tmp_path, judge=good, **options):
        return Run(
            tokenizer,
            tmp_path,
            judge,
            max_staleness=1,
            weight_updates="between_tokens",
            **options,
        )

    def test_weights_do_not_wait_for_answers(self, tokenizer, tmp_path):
        begun = threading.Event()
        text = scripted.texts_of(tokenizer, lambda call, row: "ab$")

        def sample(call, row, seed):
            # The call for step 2, which begins with weights 1.
            if call == 1:
                begun.set()
                end_s = time.monotonic() + DEADLINE_S
                while 2 not in run.sync.loads:
                    assert time.monotonic() < end_s
            return text(call, row, seed)

        def versions(call):
            return [1, 2] if call == 1 else run.generation.weight_version

        with self.run(tokenizer, tmp_path, sample=sample) as run:
            run.generation.versions = versions
            found = []
            for number in range(1, 5):
                found.append(run.sampler.next_step())
                if number == 2:
                    assert begun.wait(DEADLINE_S)
                run.sampler.end_step(number)
        names = ("mixed_version_rate", "staleness_max")
        mixed, oldest = (
            [metrics[f"asynchronous/{name}"].value for _, metrics in found]
            for name in names
        )
        assert mixed[:3] == [0.0, 0.0, 1.0]
        assert oldest[:3] == [0.0, 1.0, 1.0]
        result = found[2][0]
        sampled = result.rows["token_versions"]
        assert {tuple(row[row >= 0].tolist()) for row in sampled} == {(1, 2)}
        assert result.rows["weight_version"].tolist() == [1] * 4

    def test_weights_of_somebody_else(self, tokenizer, tmp_path):
        with self.run(tokenizer, tmp_path) as run:
            run.generation.versions = lambda call: [0, 5]
            with pytest.raises(AlgorithmError, match="with weights 5 while it served"):
                run.step()

    def test_weights_that_were_replaced_before_the_call(self, tokenizer, tmp_path):
        def versions(call):
            number = run.generation.weight_version
            return [number - 1, number] if number == 2 else number

        with self.run(tokenizer, tmp_path) as run:
            run.generation.versions = versions
            with pytest.raises(AlgorithmError, match="with weights 1 while it served"):
                [run.step() for _ in range(4)]

    def test_steps_without_training_share_a_number(self, tokenizer, tmp_path):
        with self.run(tokenizer, tmp_path) as run:
            steps = []
            for number in (1, 1, 1, 2):
                _, metrics = run.sampler.next_step()
                steps.append(metrics["asynchronous/staleness_max"].value)
                run.sampler.end_step(number)
        assert max(steps) <= 1.0
        assert set(run.sync.loads) <= {1, 2}

    def test_an_agent_may_note_versions_in_any_order(self):
        job = Job(None, None)
        for version in (3, 4, 2):
            job.note_version(version)
        assert (job.oldest_version, job.newest_version) == (2, 4)


class TestFailures:
    def test_what_never_gets_its_reward_is_left_out(self, tokenizer, tmp_path, caplog):
        release = threading.Event()

        def judge(log, info):
            if log[0]["content"] == "b":
                assert release.wait(DEADLINE_S)
            return 1.0, True, ""

        with Run(
            tokenizer,
            tmp_path,
            judge,
            calls_at_once=4,
            max_staleness=1,
            score_limit_s=0.3,
            max_tries=1,
            max_num_steps=3,
        ) as run:
            steps = [run.step() for _ in range(3)]
            release.set()
        trained = "".join(prompts for prompts, _ in steps)
        assert sorted(trained) == list("acdefg")
        dropped = [m["asynchronous/num_dropped_groups"].value for _, m in steps]
        assert sum(dropped) == 1.0
        assert "prompt 1 (row 1 of pass 0) is not trained on" in caplog.text

    def test_an_environment_that_hangs_ends_the_run(self, tokenizer, tmp_path):
        release = threading.Event()

        def judge(log, info):
            assert release.wait(DEADLINE_S)
            return 1.0, True, ""

        with Run(tokenizer, tmp_path, judge, max_staleness=0, score_limit_s=0.2) as run:
            with pytest.raises(ScheduleError, match=r"no sign of life for 0\.2 s"):
                run.step()
            release.set()

    def test_a_failure_during_a_step_is_told_by_the_checkpoint(
        self, tokenizer, tmp_path
    ):
        def fail():
            raise ScheduleError("the cause")

        with Run(tokenizer, tmp_path, good, max_staleness=1) as run:
            run.sampler.next_step()
            run.sampler._controller.do(fail)
            with pytest.raises(ScheduleError, match="the cause"):
                run.sampler.state()
            with pytest.raises(ScheduleError, match="the cause"):
                run.sampler.lose_trainer("killed")

    def test_an_environment_that_fails_ends_the_run(self, tokenizer, tmp_path):
        def judge(log, info):
            raise ZeroDivisionError("reward of nothing")

        with (
            Run(tokenizer, tmp_path, judge, max_staleness=1) as run,
            pytest.raises(ZeroDivisionError, match="reward of nothing"),
        ):
            run.step()

    def test_or_leaves_rows_out_as_in_turns(self, tokenizer, tmp_path):
        def judge(log, info):
            if log[0]["content"] == "a":
                raise ZeroDivisionError("reward of nothing")
            return 1.0, True, ""

        with Run(
            tokenizer,
            tmp_path,
            judge,
            max_staleness=0,
            rollout={"on_environment_error": "drop"},
        ) as run:
            result, _ = run.sampler.next_step()
        assert result.rows["sample_mask"].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert result.metrics["num_dropped/environment_error"].value == 2.0

    def test_what_failed_is_played_again_with_another_seed(self, tokenizer, tmp_path):
        seeds = []

        def sample(call, row, seed):
            seeds.append(seed)
            return [3 + call, scripted.EOS]

        def judge(log, info):
            failed = judge.first and log[0]["content"] == "a"
            judge.first = judge.first and not failed
            return (float("nan") if failed else 1.0), True, ""

        judge.first = True
        with Run(
            tokenizer,
            tmp_path,
            judge,
            sample=sample,
            max_staleness=0,
            max_num_steps=1,
            rollout={"retry": {"max_attempts": 2}},
        ) as run:
            result, _ = run.sampler.next_step()
        assert result.metrics["num_retried"].value == 1.0
        assert result.rows["sample_mask"].tolist() == [1.0] * 4
        assert len(set(seeds)) == 5

    @pytest.mark.parametrize("attempts", [1, 2])
    def test_a_generator_that_is_lost(self, tokenizer, tmp_path, attempts):
        def sample(call, row, seed):
            if call == 0:
                raise WorkerDiedError("replica 0 is gone")
            return [3, scripted.EOS]

        with Run(
            tokenizer,
            tmp_path,
            good,
            sample=sample,
            max_staleness=0,
            rollout={"retry": {"max_attempts": attempts}},
        ) as run:
            if attempts == 1:
                with pytest.raises(WorkerDiedError, match="replica 0 is gone"):
                    run.step()
            else:
                assert run.step()[0] == "ab"
                first, *again = [c["seeds"].tolist() for c in run.generation.calls]
                found = [seed for seeds in again for seed in seeds]
                assert set(first) <= set(found)


class TestResume:
    def test_no_prompt_is_lost_or_repeated(self, tokenizer, tmp_path):
        release = threading.Event()

        def slow(log, info):
            if log[0]["content"] == "a":
                assert release.wait(DEADLINE_S)
            return 1.0, True, ""

        with Run(tokenizer, tmp_path, slow, calls_at_once=4, max_staleness=1) as run:
            first, _ = run.step()
            saved = run.sampler.state()
            release.set()
        assert "a" not in first
        with Run(
            tokenizer, tmp_path, good, max_staleness=1, saved=saved, first_step=1
        ) as run:
            rest = [run.step()[0] for _ in range(3)]
        assert sorted(first + "".join(rest)) == list(LETTERS)

    def test_finished_answers_are_not_sampled_again(self, tokenizer, tmp_path):
        def judge(log, info):
            if log[0]["content"] == "b":
                assert release.wait(DEADLINE_S)
            return 1.0, True, ""

        release = threading.Event()
        with Run(tokenizer, tmp_path, judge, calls_at_once=4, max_staleness=0) as run:
            end_s = time.monotonic() + DEADLINE_S
            while len((saved := run.sampler.state()).answers) < 2:
                assert time.monotonic() < end_s
            release.set()
        (odd, answer), *_ = saved.answers.items()
        strange = PlayedRow(replace(answer.played.alone(), metadata=[object()]))
        more = {**saved.answers, 99: replace(answer, played=strange)}
        # Only values that are not plain are left out.
        assert write_answers(tmp_path, more) == {99}
        again = read_answers(tmp_path)
        assert set(again) == set(saved.answers)
        row, found = (held.played.alone().rows() for held in (answer, again[odd]))
        assert torch.equal(row["input_ids"], found["input_ids"])
        assert torch.equal(row["token_mask"], found["token_mask"])
        assert (row["texts"], row["ending"]) == (found["texts"], found["ending"])
        held = SavedAhead.read(json.loads(json.dumps(saved.state)), tmp_path)
        assert sorted(a.prompt for a in held.answers.values()) == [0, 0]
        with Run(tokenizer, tmp_path, good, max_staleness=0, saved=held) as run:
            assert run.step()[0] == "ab"
            first = run.generation.calls[0]
        # Only those of the prompt with a missing reward.
        assert first.size == 2

    def test_after_a_run_in_turns(self, tokenizer, tmp_path):
        with Run(tokenizer, tmp_path, good, max_staleness=0) as run:
            loader = run.loader
        batches = iter(loader)
        next(batches)
        assert PromptSource(loader, 2).position() == 2

    def test_a_state_of_another_step(self, tokenizer, tmp_path):
        with Run(tokenizer, tmp_path, good, max_staleness=0) as run:
            run.step()
            saved = run.sampler.state()
        with pytest.raises(ScheduleError, match="schedule after 1 steps and weights"):
            Run(tokenizer, tmp_path, good, max_staleness=0, saved=saved, first_step=2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "core"),
        [
            ({"grpo.asynchronous": {"max_groups": 2}}, "max_groups must be at least"),
            (
                {"loss_fn.use_importance_sampling_correction": False},
                "use_importance_sampling_correction=true",
            ),
            ({"loss_fn.force_on_policy_ratio": True}, "force_on_policy_ratio=true"),
            ({"grpo.use_dynamic_sampling": True}, "exclude each other"),
            ({"rollout.max_staleness": 2}, "set asynchronous.max_staleness"),
            (
                {"rollout.retry": {"max_attempts": 2, "resample": "group"}},
                "set it to row",
            ),
            ({"data.streaming": True}, "data.streaming=false"),
            ({"data.pass_rate_filter": {}}, "pass_rate_filter needs: leave it out"),
            (
                {
                    "grpo.asynchronous": {
                        "max_staleness": 0,
                        "weight_updates": "between_tokens",
                    }
                },
                "needs max_staleness above 0: got 0",
            ),
        ],
    )
    def test_what_cannot_be_asynchronous(self, settings, core):
        good_run = {
            "policy": {"model_name": "model", "max_total_sequence_length": 32},
            "grpo": {"num_prompts_per_step": 4, "asynchronous": {}},
            "loss_fn": {"use_importance_sampling_correction": True},
        }
        assert GRPOConfig.from_dict(good_run).asynchronous.max_staleness == 1
        for path, value in settings.items():
            section, name = path.split(".")
            good_run.setdefault(section, {})
            good_run[section] = {**good_run[section], name: value}
        with pytest.raises(ConfigError, match=core):
            GRPOConfig.from_dict(good_run)

    @pytest.mark.parametrize(
        ("backend", "generator", "core"),
        [
            ({"backend": "huggingface"}, None, ""),
            ({"backend": "auto"}, None, ""),
            ({"backend": "vllm", "vllm": {"async_engine": True}}, None, ""),
            ({"backend": "vllm"}, None, r"vllm\.async_engine=false loads weights"),
            ({"backend": "openai"}, None, "backend 'openai' loads weights between two"),
            ({}, SimpleNamespace(updates_in_flight=True), ""),
            (
                {},
                SimpleNamespace(),
                r"GenerationPolicy\(\.\.\., updates_in_flight=True",
            ),
        ],
    )
    def test_generators_that_load_weights_between_calls_only(
        self, backend, generator, core
    ):
        config = GRPOConfig.from_dict(
            {
                "policy": {
                    "model_name": "model",
                    "max_total_sequence_length": 32,
                    "generation": {"max_new_tokens": 4, **backend},
                },
                "grpo": {"asynchronous": {"weight_updates": "between_tokens"}},
                "loss_fn": {"use_importance_sampling_correction": True},
            }
        )
        given, needs = Components(generation=generator), Needs(generation=True)
        if core:
            with pytest.raises(ConfigError, match=core):
                check_ahead(config, given, needs)
        else:
            check_ahead(config, given, needs)

    @pytest.mark.parametrize(
        ("settings", "core"),
        [
            (
                {"distillation.on_policy": False},
                "with on_policy=false nothing is sampled: leave it out",
            ),
            ({"distillation.asynchronous": {"max_groups": 2}}, "max_groups must be at"),
            ({"rollout.max_staleness": 2}, "set asynchronous.max_staleness"),
            ({"data.streaming": True}, "data.streaming=false"),
            (
                {
                    "policy.backend": "megatron",
                    "policy.generation": {"backend": "megatron"},
                },
                "the workers that train sample as well",
            ),
            (
                {
                    "distillation.asynchronous": {"weight_updates": "between_tokens"},
                    "policy.generation": {"backend": "openai"},
                },
                "backend 'openai' loads weights between two",
            ),
        ],
    )
    def test_what_distillation_cannot_be(self, settings, core):
        good_run = {
            "policy": {"model_name": "model", "max_total_sequence_length": 32},
            "teacher": "teacher",
            "distillation": {"num_prompts_per_step": 4, "asynchronous": {}},
        }
        given, needs = Components(), Needs(generation=True)
        # No correction is asked for: the divergence has no ratio to correct.
        good = DistillationConfig.from_dict(good_run)
        assert good.asynchronous.max_staleness == 1
        check_ahead(good, given, needs)
        for path, value in settings.items():
            section, name = path.split(".")
            good_run[section] = {**good_run.get(section, {}), name: value}

        def begin():
            config = DistillationConfig.from_dict(good_run)
            check_ahead(config, given, needs)

        with pytest.raises(ConfigError, match=core):
            begin()

    def test_without_staleness_no_correction_is_needed(self):
        config = PPOConfig.from_dict(
            {
                "policy": {"model_name": "model", "max_total_sequence_length": 32},
                "ppo": {"asynchronous": {"max_staleness": 0}},
            }
        )
        assert config.asynchronous.max_staleness == 0

    @pytest.mark.parametrize(
        ("options", "core"),
        [({"drop_last": False, "size": 3}, "a last step of 2"), ({}, "")],
    )
    def test_data_that_leave_a_step_short(self, tokenizer, options, core):
        size = options.get("size", 2)
        loader = loader_of(tokenizer, **options)
        if core:
            with pytest.raises(ConfigError, match=core):
                PromptSource(loader, size)
        else:
            assert PromptSource(loader, size).prompts_per_epoch == len(LETTERS)

    def test_too_many_failures(self, tokenizer, tmp_path):
        with (
            Run(
                tokenizer,
                tmp_path,
                lambda log, info: (float("nan"), True, ""),
                max_staleness=0,
            ) as run,
            pytest.raises(RolloutError, match="failed for 4 of 4 rows"),
        ):
            run.step()


class TestEnvironmentOfSeveralThreads:
    def test_one_call_at_a_time(self):
        running, most = [], []

        def judge(log, info):
            running.append(1)
            most.append(len(running))
            running.pop()
            return 1.0, True, ""

        environment = for_several_threads(scripted.Judge(judge))
        assert calls_of(environment) == 1
        logs = [[{"role": "assistant", "content": "x"}]] * 50
        threads = [
            threading.Thread(target=environment.step, args=(logs, [{}] * 50))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert set(most) == {1}
        assert len(most) == 200

    def test_one_that_takes_several_is_left_alone(self):
        environment = scripted.Judge(good)
        environment.calls_at_once = 3
        assert for_several_threads(environment) is environment


def test_no_thread_wakes_where_nothing_is_to_be_closed():
    kept, simple = Keeping(), scripted.Judge(good)
    for environment, waiting in ((kept, [{}]), (simple, [])):
        for each in (environment, OneCallAtATime(environment)):
            desk = EnvironmentDesk(Judge(each), 1, pytest.fail, pytest.fail)
            desk.close(DEADLINE_S)
            desk.end([{}])
            assert desk._ended == waiting


def test_a_call_that_hangs_does_not_hang_the_close(tokenizer):
    hangs, release = threading.Event(), threading.Event()

    class Hanging(Keeping):
        def step(self, message_log_batch, metadata):
            hangs.set()
            assert release.wait(DEADLINE_S)
            return super().step(message_log_batch, metadata)

    environment = Hanging()
    judge = Judge(OneCallAtATime(environment))
    desk = EnvironmentDesk(judge, 1, lambda *judged: None, pytest.fail)
    conversation = SimpleNamespace(log=[{}], metadata={"number": 1})
    job = SimpleNamespace(
        conversation=conversation, is_cancelled=False, begin=lambda: None
    )
    desk.ask([Scoring(job, 0)])
    assert hangs.wait(DEADLINE_S)
    desk.end([{"number": 0}])
    closing = threading.Thread(target=desk.close, args=(0.2,), daemon=True)
    closing.start()
    closing.join(5.0)
    try:
        assert not closing.is_alive()
    finally:
        release.set()


@pytest.mark.parametrize(("keeps", "num_seeds"), [(True, 16), (False, 0)])
def test_seeds_are_computed_for_environments_that_begin(
    tokenizer, tmp_path, monkeypatch, keeps, num_seeds
):
    seeds, start_seeds = [], RowNames.start_seeds

    def counted(names, *place):
        seeds.extend(start_seeds(names, *place).tolist())
        return start_seeds(names, *place)

    monkeypatch.setattr(RowNames, "start_seeds", counted)
    environment = Keeping() if keeps else scripted.Judge(good)
    with Run(tokenizer, tmp_path, environment, max_staleness=1) as run:
        [run.step() for _ in range(4)]
    assert len(seeds) == num_seeds


class Clocked:
    """A judge whose verdicts take as long as the test sets."""

    begins = False
    row_s = None

    def __init__(self, clock):
        self.clock, self.sizes, self.verdict_s = clock, [], 0.0

    def step(self, logs, metadata, seeds):
        self.sizes.append(len(logs))
        self.clock.now_s += self.verdict_s * len(logs)


def test_calls_of_a_quick_environment_take_several_answers(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(scoring.time, "monotonic", lambda: clock.now_s)
    judge = Clocked(clock)
    failures = []
    desk = EnvironmentDesk(judge, 4, lambda *judged: None, failures.append)
    desk.close(DEADLINE_S)
    conversation = SimpleNamespace(log=[], metadata=None)
    job = SimpleNamespace(
        conversation=conversation, is_cancelled=False, begin=lambda: None
    )
    answer = SimpleNamespace(job=job, is_cancelled=False)

    def size_of_call(count, verdict_s):
        judge.verdict_s = verdict_s
        desk._waiting = [answer] * count
        size = desk._size_of_call()
        desk._call(desk._waiting[:size])
        return size

    # Nothing is known at first; then a share, so that all threads have work.
    assert size_of_call(64, 0.004) == 1
    for _ in range(30):
        size_of_call(64, 0.004)
    assert size_of_call(64, 0.004) == 16
    assert size_of_call(5, 0.004) == 2
    # What takes no time is no work for several threads.
    for _ in range(30):
        size_of_call(64, 0.0001)
    assert size_of_call(64, 0.0001) == 64
    assert size_of_call(5, 0.0001) == 5
    assert size_of_call(1, 5.0) == 1
    # A slow one counts for a while.
    assert size_of_call(64, 0.0001) == 1
    assert judge.sizes[-1] == 1
    # An environment may know its time better than the calls tell.
    judge.row_s = 0.0001
    assert size_of_call(64, 0.004) == 64
    judge.row_s = 0.004
    assert size_of_call(64, 0.0001) == 16
    judge.row_s = 5.0
    assert size_of_call(64, 0.0001) == 1
    assert not failures


class TestAgents:
    @staticmethod
    async def ask(client, text):
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}]
        )
        return answer.choices[0].message.content

    def test_a_slow_tool_holds_up_nobody_else(self, tokenizer, tmp_path):
        release = threading.Event()

        async def agent(task, client):
            await self.ask(client, task.prompt)
            while task.prompt == "a" and not release.is_set():
                await asyncio.sleep(0.01)
            await self.ask(client, f"{task.prompt}b")
            return 1.0

        with Run(tokenizer, tmp_path, AgentEnvironment(agent), max_staleness=1) as run:
            first, _ = run.step()
            release.set()
            steps = [run.step() for _ in range(3)]
            loads = run.sync.loads
        assert "a" not in first
        assert sorted(first + "".join(prompts for prompts, _ in steps)) == list(LETTERS)
        ages = [metrics["asynchronous/staleness_max"].value for _, metrics in steps]
        assert max(ages) == 1.0
        assert loads[:2] == [1, 2]

    def test_tokens_know_the_weights_of_their_turn(self, tokenizer, tmp_path):
        """Weights change while an agent uses a tool, between two of its requests."""
        moved = threading.Event()

        async def agent(task, client):
            await self.ask(client, task.prompt)
            while task.prompt == "a" and not moved.is_set():
                await asyncio.sleep(0.01)
            await self.ask(client, f"{task.prompt}b")
            return 1.0

        with Run(tokenizer, tmp_path, AgentEnvironment(agent), max_staleness=2) as run:
            run.step()
            assert run.sampler.wait_for_weights()
            moved.set()
            found = {}
            for _ in range(3):
                rows = run.sampler.next_step()[0]
                run.number += 1
                run.sampler.end_step(run.number)
                for row, log in enumerate(rows.message_logs):
                    (part,) = rows.rows["branches"][row]
                    main = rows.rows["token_versions"][row]
                    versions = int(part.token_versions.max()), int(main.max())
                    assert int(rows.rows["weight_version"][row]) == min(versions)
                    found.setdefault(log[0]["content"][0], set()).add(versions)
        # The first request of the held agents came before the weights, the second
        # after: two requests without a common history, the older one first.
        assert found["a"] <= {(0, 1), (0, 2)}
        assert all(first <= second for pair in found.values() for first, second in pair)

    def test_failures_are_those_of_a_rollout(self, tokenizer, tmp_path):
        async def agent(task, client):
            if task.prompt == "a":
                raise ZeroDivisionError("a tool of nothing")
            if task.prompt != "b":
                await self.ask(client, "b")
            return 1.0

        with (
            Run(
                tokenizer,
                tmp_path,
                AgentEnvironment(agent),
                max_staleness=0,
                rollout={"on_environment_error": "drop", "max_failed_rate": 1.0},
            ) as run,
            pytest.raises(RolloutError, match="4 environment error"),
        ):
            run.sampler.next_step()

    def test_one_that_takes_too_long_is_ended(self, tokenizer, tmp_path):
        ended = []

        async def agent(task, client):
            await self.ask(client, task.prompt)
            if task.prompt == "a":
                try:
                    await asyncio.sleep(DEADLINE_S)
                finally:
                    ended.append(True)
            return 1.0

        with Run(
            tokenizer,
            tmp_path,
            AgentEnvironment(agent),
            max_staleness=1,
            answer_limit_s=1.0,
            max_tries=1,
            max_num_steps=3,
        ) as run:
            steps = [run.step() for _ in range(3)]
        assert "a" not in "".join(prompts for prompts, _ in steps)
        assert ended == [True, True]
