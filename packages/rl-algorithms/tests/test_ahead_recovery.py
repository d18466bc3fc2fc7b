"""Sampling ahead when the trainer is lost and returns at an earlier step."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from rl_algorithms.errors import ScheduleError
from rl_models.errors import GenerationError, WeightSyncError

spec = importlib.util.spec_from_file_location(
    "ahead_runs", Path(__file__).with_name("test_ahead.py")
)
ahead = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = ahead
spec.loader.exec_module(ahead)

DEADLINE_S, LETTERS = ahead.DEADLINE_S, ahead.LETTERS
tokenizer = ahead.tokenizer


def go_back(run, saved, number):
    assert run.sampler.lose_trainer("rank 0 is gone")
    run.number = number
    run.sampler.trainer_is_back(saved, number)


class TestGoesBack:
    @pytest.mark.parametrize("staleness", [0, 1, 2])
    @pytest.mark.parametrize("lost_in", [1, 2])
    @pytest.mark.parametrize("updates", ["between_answers", "between_tokens"])
    def test_each_prompt_comes_once(
        self, tokenizer, tmp_path, staleness, lost_in, updates
    ):
        with ahead.Run(
            tokenizer,
            tmp_path,
            ahead.good,
            max_staleness=staleness,
            weight_updates=updates,
        ) as run:
            seen = run.step()[0]
            saved = run.sampler.state()
            for _ in range(1, lost_in):
                run.step()
            run.sampler.next_step()  # lost in this step
            go_back(run, saved, 1)
            for _ in range(3):
                letters, metrics = run.step()
                seen += letters
                assert metrics["asynchronous/staleness_max"].value <= staleness
            assert sorted(seen) == list(LETTERS)
            assert run.step() == (None, {})

    def test_to_the_beginning_with_the_same_seeds(self, tokenizer, tmp_path):
        with ahead.Run(tokenizer, tmp_path, ahead.good, max_staleness=0) as run:
            run.step()
            run.sampler.next_step()
            go_back(run, None, 0)
            seen = [run.step()[0] for _ in range(4)]
            calls = [call["seeds"].tolist() for call in run.generation.calls]
        assert "".join(seen) == LETTERS
        assert calls[2:4] == calls[:2]
        assert len(calls) == 6

    def test_answers_of_weights_that_exist_are_kept(self, tokenizer, tmp_path):
        release = threading.Event()

        def judge(log, info):
            if log[0]["content"] == "d":
                assert release.wait(DEADLINE_S)
            return 1.0, True, ""

        with ahead.Run(
            tokenizer, tmp_path, judge, calls_at_once=4, max_staleness=0
        ) as run:
            seen = run.step()[0]
            saved = run.sampler.state()
            # "c" is scored and "d" is in flight when the trainer is lost.
            end_s = time.monotonic() + DEADLINE_S
            while len(run.sampler.state().answers) < 2:
                assert time.monotonic() < end_s
            go_back(run, saved, 1)
            release.set()
            seen += run.step()[0]
            num_calls = len(run.generation.calls)
            saved = run.sampler.state()
            result, _ = run.sampler.next_step()  # lost in this step
            go_back(run, saved, 2)
            again, _ = run.sampler.next_step()
            assert again.message_logs == result.message_logs
            assert torch.equal(again.rows["rewards"], result.rows["rewards"])
            assert again.metrics["num_retried"].value == 0.0
            assert len(run.generation.calls) == num_calls + 1
            seen += "".join(run.step()[0] for _ in range(2))
        assert num_calls == 2
        assert seen == LETTERS

    def test_weights_are_those_of_the_new_trainer(self, tokenizer, tmp_path):
        with ahead.Run(tokenizer, tmp_path, ahead.good, max_staleness=0) as run:
            run.step()
            saved = run.sampler.state()
            run.step()
            assert run.sampler.wait_for_weights()
            go_back(run, saved, 1)
            assert run.sampler.wait_for_weights()
            assert run.sync.loads == [1, 2, 1]
            run.step()
            assert run.sampler.wait_for_weights()
        assert run.sync.loads == [1, 2, 1, 2]

    def test_not_after_its_end(self, tokenizer, tmp_path):
        with ahead.Run(
            tokenizer, tmp_path, ahead.good, max_staleness=0, max_num_steps=1
        ) as run:
            run.step()
            assert run.step() == (None, {})
            assert not run.sampler.lose_trainer("rank 0 is gone")


class TestWeightsOfALostTrainer:
    def test_a_load_that_fails_costs_only_the_step(self, tokenizer, tmp_path):
        with ahead.Run(tokenizer, tmp_path, ahead.good, max_staleness=0) as run:
            load, lost = run.sync.load, []

            def fail_once(published):
                if not lost:
                    lost.append(published)
                    raise WeightSyncError("rank 0 is gone")
                load(published)

            run.sync.load = fail_once
            seen = run.step()[0]
            saved = run.sampler.state()
            with pytest.raises(WeightSyncError, match="rank 0 is gone"):
                run.sampler.next_step()
            go_back(run, saved, 1)
            seen += "".join(run.step()[0] for _ in range(3))
        assert seen == LETTERS
        assert run.sync.loads == [1, 2, 3]

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_load_that_comes_too_late(self, tokenizer, tmp_path, fails):
        begun, release = threading.Event(), threading.Event()
        with ahead.Run(tokenizer, tmp_path, ahead.good, max_staleness=0) as run:
            load = run.sync.load

            def slow(published):
                if not begun.is_set():
                    begun.set()
                    assert release.wait(DEADLINE_S)
                    if fails:
                        raise WeightSyncError("rank 0 is gone")
                load(published)

            run.sync.load = slow
            seen = run.step()[0]
            assert begun.wait(DEADLINE_S)
            saved = run.sampler.state()
            assert run.sampler.lose_trainer("rank 0 is gone")
            run.sampler.trainer_is_back(saved, 1)
            release.set()
            # A late load is not confirmed: the weights are loaded again.
            seen += "".join(run.step()[0] for _ in range(3))
        assert seen == LETTERS
        assert run.sync.loads == ([1, 2, 3] if fails else [1, 1, 2, 3])

    @pytest.mark.parametrize("turns", [1, 2])
    @pytest.mark.parametrize("lost_first", ["trainer", "replicas"])
    def test_replicas_that_are_lost_as_well(
        self, tokenizer, tmp_path, lost_first, turns
    ):
        begun, release, given_up = (threading.Event() for _ in range(3))
        text = ahead.scripted.texts_of(tokenizer, lambda call, row: "ab$")

        def sample(call, row, seed):
            if call == 1 and not given_up.is_set():
                begun.set()
                assert release.wait(DEADLINE_S)
                raise WeightSyncError("the weights cannot be had again")
            return text(call, row, seed)

        with ahead.Run(
            tokenizer,
            tmp_path,
            ahead.good,
            sample=sample,
            rollout={"max_turns": turns},
            max_staleness=0,
        ) as run:
            desk = run.sampler._answers._generator
            wait_for_weights = desk._wait_for_weights

            def noted(*arguments):
                wait_for_weights(*arguments)
                given_up.set()

            desk._wait_for_weights = noted
            seen = run.step()[0]
            saved = run.sampler.state()
            assert begun.wait(DEADLINE_S)
            if lost_first == "replicas":
                release.set()
                with pytest.raises(WeightSyncError, match="cannot be had again"):
                    run.sampler.next_step()
            assert run.sampler.lose_trainer("rank 0 is gone")
            release.set()
            assert given_up.wait(DEADLINE_S)
            run.number = 1
            run.sampler.trainer_is_back(saved, 1)
            seen += "".join(run.step()[0] for _ in range(3))
            calls = [call["seeds"].tolist() for call in run.generation.calls]
        assert seen == LETTERS
        # The same answers; the loss of the trainer has cost them no attempt.
        assert calls[1] == calls[2]
        assert len(calls) == 5

    def test_answers_that_the_generator_does_not_know_of_yet(self, tokenizer, tmp_path):
        with ahead.Run(tokenizer, tmp_path, ahead.good, max_staleness=0) as run:
            answers = run.sampler._answers
            desk, order = answers._generator, []
            send, take_stranded = answers.send, desk.take_stranded

            def look(schedule):
                answers.send = lambda: (order.append("send"), send())
                desk.take_stranded = lambda: (order.append("take"), take_stranded())[1]
                answers.end_going_back()
                return list(order)

            # Passed on later, they would wait for weights that wait for them.
            assert run.sampler._controller.ask(look) == ["send", "take"]
            assert run.step()[0] == "ab"

    def test_replicas_that_lose_their_weights_while_they_sample(
        self, tokenizer, tmp_path
    ):
        begun, loading, lost = (threading.Event() for _ in range(3))
        text = ahead.scripted.texts_of(tokenizer, lambda call, row: "ab$")

        def sample(call, row, seed):
            if call == 1:
                begun.set()
                assert lost.wait(DEADLINE_S)
                raise GenerationError("its last weight update failed")
            return text(call, row, seed)

        with ahead.Run(
            tokenizer,
            tmp_path,
            ahead.good,
            sample=sample,
            max_staleness=1,
            weight_updates="between_tokens",
        ) as run:
            load = run.sync.load

            def broken(published):
                if published == [2] and not lost.is_set():
                    loading.set()
                    assert lost.wait(DEADLINE_S)
                    raise WeightSyncError("rank 0 is gone")
                load(published)

            run.sync.load = broken
            seen = run.step()[0]
            saved = run.sampler.state()
            run.sampler.next_step()
            assert begun.wait(DEADLINE_S)
            run.sampler.end_step(2)
            assert loading.wait(DEADLINE_S)
            assert run.sampler.lose_trainer("rank 0 is gone")
            lost.set()
            run.number = 1
            run.sampler.trainer_is_back(saved, 1)
            seen += "".join(run.step()[0] for _ in range(3))
        assert sorted(seen) == list(LETTERS)

    def test_a_generator_that_fails_otherwise_ends_the_run(self, tokenizer, tmp_path):
        def sample(call, row, seed):
            raise GenerationError("the logits are not finite numbers")

        with (
            ahead.Run(
                tokenizer,
                tmp_path,
                ahead.good,
                sample=sample,
                max_staleness=1,
                weight_updates="between_tokens",
            ) as run,
            pytest.raises(GenerationError, match="not finite"),
        ):
            run.step()

    def test_a_trainer_that_hangs_ends_the_run(self, tokenizer, tmp_path):
        with ahead.Run(
            tokenizer, tmp_path, ahead.good, max_staleness=0, progress_limit_s=1.0
        ) as run:
            run.sampler.next_step()
            end = threading.Event()
            while run.sampler._failure is None:
                assert not end.wait(0.01)
            with pytest.raises(ScheduleError, match="cannot continue"):
                run.sampler.next_step()
