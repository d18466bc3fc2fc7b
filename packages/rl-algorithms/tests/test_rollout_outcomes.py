"""How conversations end, what is retried, and what groups receive."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout import (
    ConfiguredRetry,
    Outcome,
    RetryConfig,
    RolloutConfig,
    RolloutEngine,
    mark_stale,
    staleness,
)
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import DeadlineExceededError, WorkerDiedError
from rl_envs import GroupRewardWrapper
from rl_envs.errors import RewardCallError
from rl_envs.interfaces import EnvironmentReturn

_spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)
Judge, EOS = scripted.Judge, scripted.EOS
NAN = math.nan


@pytest.fixture(scope="module")
def tokenizer():
    return scripted.ambiguous_tokenizer()


def by_seed(call, row, seed):
    """Emit one token that depends only on the seed, then the end."""
    return [3 + seed % 10, EOS]


def make(tokenizer, environment, sample=by_seed, versions=lambda call: 0, **settings):
    retry = settings.pop("policy", None)
    generator = scripted.TokenGenerator(sample, versions)
    config = RolloutConfig.from_dict(settings)
    engine = RolloutEngine(generator, environment, tokenizer, config, retry=retry)
    return engine, generator


def run(engine, tokenizer, prompts=("a", "b"), num_generations=2, **kwargs):
    batch = scripted.make_batch(tokenizer, list(prompts))
    return engine.run(batch, num_generations=num_generations, **kwargs)


class Flaky(Judge):
    """Raises `errors` in its first calls, then judges normally."""

    def __init__(self, *errors, judge=lambda log, info: (1.0, True, "")):
        super().__init__(judge)
        self.errors = list(errors)

    def step(self, message_log_batch, metadata):
        if self.errors:
            error = self.errors.pop(0)
            if error is not None:
                raise error
        return super().step(message_log_batch, metadata)


def test_what_the_infrastructure_broke_is_played_again_as_it_was(tokenizer):
    undisturbed, _ = make(tokenizer, Judge(lambda log, info: (1.0, True, "")))
    expected = run(undisturbed, tokenizer)
    for error in (WorkerDiedError("gone"), DeadlineExceededError("late")):
        engine, generator = make(tokenizer, Flaky(error), retry={"max_attempts": 2})
        result = run(engine, tokenizer)
        assert torch.equal(result.rows["input_ids"], expected.rows["input_ids"])
        assert result.rows["rewards"].tolist() == [1.0] * 4
        assert result.rows["outcome"].tolist() == [Outcome.OK] * 4
        assert float(result.metrics["num_retried"]) == 4.0
        assert float(result.metrics["num_dropped/infrastructure_error"]) == 0.0
        assert len(generator.calls) == 2


def test_a_generator_that_fails_once(tokenizer):
    def sample(call, row, seed):
        if not generator.sampled and len(generator.calls) == 1:
            raise WorkerDiedError("gone")
        return by_seed(call, row, seed)

    environment = Judge(lambda log, info: (1.0, True, ""))
    engine, generator = make(tokenizer, environment, sample, retry={"max_attempts": 2})
    assert run(engine, tokenizer).rows["outcome"].tolist() == [Outcome.OK] * 4
    generator.calls.clear()
    generator.sampled.clear()
    once, generator = make(tokenizer, environment, sample)
    with pytest.raises(WorkerDiedError, match="gone"):
        run(once, tokenizer)


def test_one_bad_row_does_not_cost_the_others(tokenizer):
    def judge(log, info):
        if log[0]["content"] == "b":
            raise KeyError("no such thing")
        return 1.0, True, ""

    engine, _ = make(tokenizer, Judge(judge), on_environment_error="drop")
    result = run(engine, tokenizer)
    error = Outcome.ENVIRONMENT_ERROR
    assert result.rows["outcome"].tolist() == [0, 0, error, error]
    assert result.rows["sample_mask"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert float(result.metrics["num_dropped/environment_error"]) == 2.0
    assert float(result.metrics["reward"]) == 1.0
    raising, _ = make(tokenizer, Judge(judge))
    with pytest.raises(KeyError, match="no such thing"):
        run(raising, tokenizer)


def test_an_environment_that_always_fails_is_asked_a_few_times_only(tokenizer):
    environment = Flaky(*[KeyError("oh")] * 1000)
    engine, _ = make(tokenizer, environment, on_environment_error="drop")
    with pytest.raises(RolloutError, match=r"failed for 64 of 64 rows .64 environment"):
        run(engine, tokenizer, prompts=["a"] * 32)
    assert len(environment.errors) > 980


def test_what_the_environment_broke_is_sampled_differently(tokenizer):
    seen = []

    def judge(log, info):
        text = log[-1]["content"]
        again = text in seen
        seen.append(text)
        return (NAN if not again and len(seen) <= 2 else 1.0), True, ""

    settings = {"retry": {"max_attempts": 3}}
    engine, generator = make(tokenizer, Judge(judge), **settings)
    result = run(engine, tokenizer, prompts=["a"])
    assert result.rows["outcome"].tolist() == [Outcome.OK] * 2
    assert len(generator.calls) == 2
    first, second = (call["seeds"].tolist() for call in generator.calls)
    assert set(first).isdisjoint(second)
    assert float(result.metrics["num_retried"]) == 2.0


def test_a_group_may_be_played_again_as_a_whole(tokenizer):
    def judge(log, info):
        failed = environment.num_calls == 1 and log[0]["content"] == "b"
        return (NAN if failed else 1.0), True, ""

    environment = Judge(judge)
    engine, generator = make(
        tokenizer, environment, retry={"max_attempts": 2, "resample": "group"}
    )
    result = run(engine, tokenizer, prompts=["a", "b", "c"])
    assert [len(call["seeds"]) for call in generator.calls] == [6, 2]
    assert result.rows["group_index"].tolist() == [0, 0, 1, 1, 2, 2]
    assert [log[0]["content"] for log in result.message_logs] == list("aabbcc")


class OneMore:
    """A user-defined policy: retry every row once, whatever happened."""

    def rows_to_resample(self, outcome, group_index, attempt, elapsed_s):
        assert elapsed_s >= 0.0
        return torch.arange(len(outcome) if attempt == 1 else 0)


def test_a_policy_of_ones_own(tokenizer):
    environment = Judge(lambda log, info: (1.0, True, ""))
    engine, generator = make(tokenizer, environment, policy=OneMore())
    assert float(run(engine, tokenizer).metrics["num_retried"]) == 4.0
    assert len(generator.calls) == 2


def test_when_the_configured_policy_ends():
    outcome = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int8)
    groups = torch.tensor([0, 0, 0, 1, 1])

    def rows(attempt=1, elapsed=0.0, **settings):
        policy = ConfiguredRetry(RetryConfig(**settings))
        return policy.rows_to_resample(outcome, groups, attempt, elapsed).tolist()

    assert rows() == []
    assert rows(max_attempts=2) == [2, 3, 4]
    assert rows(max_attempts=2, outcomes=["stale"]) == [4]
    assert rows(max_attempts=2, outcomes=["stale"], resample="group") == [3, 4]
    assert rows(attempt=2, max_attempts=2) == []
    assert rows(max_attempts=2, deadline_s=5.0, elapsed=4.9) == [2, 3, 4]
    assert rows(max_attempts=2, deadline_s=5.0, elapsed=5.0) == []


def test_incomplete_groups_may_be_left_out(tokenizer, caplog):
    def judge(log, info):
        return (NAN if log[-1]["content"] == "b" else 1.0), True, ""

    say = scripted.texts_of(tokenizer, lambda call, row: "abcd"[row] + "$")
    for choice, mask in (("keep", [1, 0, 1, 1]), ("drop", [0, 0, 1, 1])):
        caplog.clear()
        engine, _ = make(tokenizer, Judge(judge), say, incomplete_groups=choice)
        result = run(engine, tokenizer)
        assert result.rows["sample_mask"].tolist() == mask
        assert "left out" in caplog.text
        assert "1 environment_error" in caplog.text
    assert float(result.metrics["num_dropped/incomplete_group"]) == 1.0
    assert "2 of 4 rows: 1 environment_error, 1 incomplete_group" in caplog.text
    assert result.rows["outcome"].tolist() == [0, 2, 0, 0]


def test_versions_of_every_turn(tokenizer):
    environment = Judge(lambda log, info: (1.0, len(log) > 4, "ab"))
    engine, generator = make(
        tokenizer, environment, versions=lambda call: [7 + call, 8 + call], max_turns=3
    )
    generator.weight_version = 10
    rows = run(engine, tokenizer, prompts=["a"], num_generations=1).rows
    sampled = rows["token_mask"][0].bool()
    assert rows["token_versions"][0][sampled].tolist() == [7, 8, 8, 9, 9, 10]
    assert (rows["token_versions"][0][~sampled] == -1).all()
    assert rows["weight_version"].tolist() == [7]
    assert staleness(rows, 10).tolist() == [3]


def test_generators_without_versions_of_tokens(tokenizer):
    environment = Judge(lambda log, info: (1.0, True, ""))
    engine, generator = make(tokenizer, environment, versions=lambda call: 4)
    generate = generator.generate

    def plain(data, greedy=False, *, sampling=None):
        output = generate(data, greedy, sampling=sampling)
        del output["token_versions"]
        return output

    generator.generate = plain
    rows = run(engine, tokenizer).rows
    assert rows["token_versions"][rows["token_mask"].bool()].unique().tolist() == [4]


def test_stale_rows_are_typed_and_played_again(tokenizer):
    environment = Judge(lambda log, info: (1.0, True, ""))
    settings = {"max_staleness": 1, "max_failed_rate": 1.0}
    engine, generator = make(
        tokenizer, environment, versions=lambda call: [5, 3][call % 2], **settings
    )
    generator.weight_version = 5
    assert run(engine, tokenizer).rows["outcome"].tolist() == [Outcome.OK] * 4
    with pytest.raises(RolloutError, match="4 stale"):
        run(engine, tokenizer)
    again, generator = make(
        tokenizer,
        environment,
        versions=lambda call: 3 + call,
        retry={"max_attempts": 2},
        **settings,
    )
    generator.weight_version = 5
    result = run(again, tokenizer)
    assert result.rows["outcome"].tolist() == [Outcome.OK] * 4
    assert result.rows["weight_version"].tolist() == [4] * 4
    # Retried answers may be stale as well.
    never, generator = make(
        tokenizer,
        environment,
        versions=lambda call: 3,
        retry={"max_attempts": 2},
        **settings,
    )
    generator.weight_version = 5
    with pytest.raises(RolloutError, match="4 stale"):
        run(never, tokenizer)
    assert len(generator.calls) == 2


def test_rows_become_stale_while_they_wait():
    rows = BatchedDataDict(
        {
            "weight_version": torch.tensor([3, 5, 3]),
            "outcome": torch.tensor([0, 1, 2], dtype=torch.int8),
            "sample_mask": torch.ones(3),
            "rewards": torch.tensor([1.0, 2.0, 0.0]),
        }
    )
    assert mark_stale(rows, 6, 2).tolist() == [True, False, False]
    assert rows["outcome"].tolist() == [Outcome.STALE, Outcome.TRUNCATED, 2]
    assert rows["sample_mask"].tolist() == [0.0, 1.0, 1.0]
    assert rows["outcome"].dtype == torch.int8


def test_the_turn_limit_truncates(tokenizer):
    environment = Judge(lambda log, info: (0.5, log[-1]["content"] == "a", "b"))
    say = scripted.texts_of(tokenizer, lambda call, row: "ac"[max(call, row)] + "$")
    engine, _ = make(tokenizer, environment, say, max_turns=2)
    result = run(engine, tokenizer, num_generations=1)
    assert result.rows["outcome"].tolist() == [Outcome.OK, Outcome.TRUNCATED]
    assert result.rows["truncated"].tolist() == [False, False]
    assert result.rows["sample_mask"].tolist() == [1.0, 1.0]
    assert result.rows["num_turns"].tolist() == [1, 2]
    assert float(result.metrics["max_turns_reached_rate"]) == 0.5


def test_rewards_that_do_not_apply(tokenizer):
    def judge(log, info):
        done = len(log) > 2
        style = NAN if log[0]["content"] == "a" else 0.25
        return {"reward/right": 1.0, "reward/style": style if done else 0.0}, done, "c"

    engine, _ = make(tokenizer, Judge(judge), max_turns=2)
    rows = run(engine, tokenizer, num_generations=1).rows
    assert rows["rewards"].tolist() == [2.0, 2.25]
    assert rows["reward/right"].tolist() == [2.0, 2.0]
    assert rows["reward/style"].isnan().tolist() == [True, False]
    assert rows["outcome"].tolist() == [Outcome.OK] * 2
    assert rows["reward/style"].dtype == torch.float32


def test_rows_that_failed_have_no_reward_by_name(tokenizer):
    def judge(log, info):
        value = NAN if log[0]["content"] == "a" else 1.0
        return {"reward/x": value, "reward/y": value}, True, ""

    engine, _ = make(tokenizer, Judge(judge))
    rows = run(engine, tokenizer).rows
    assert rows["reward/x"].isnan().tolist() == [True, True, False, False]
    assert rows["rewards"].tolist() == [0.0, 0.0, 2.0, 2.0]
    assert rows["sample_mask"].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("how", ["unscored", "raises", "worker died", "generator"])
@pytest.mark.parametrize("named", [False, True])
def test_a_failed_second_turn_keeps_no_reward_of_the_first(tokenizer, how, named):
    """Prompt a ends in its first turn; b earns as much and fails in its second."""

    def judge(log, info):
        second = len(log) > 2
        if second and how == "raises":
            raise KeyError("oh")
        if second and how == "worker died":
            raise WorkerDiedError("gone")
        value = NAN if second and how == "unscored" else 0.75
        reward = {"reward/x": value, "reward/y": value} if named else value
        return reward, second or log[0]["content"] == "a", "c"

    def sample(call, row, seed):
        if how == "generator" and call == 1:
            raise WorkerDiedError("gone")
        return by_seed(call, row, seed)

    settings = {"on_environment_error": "drop", "max_turns": 2}
    engine, _ = make(tokenizer, Judge(judge), sample, **settings)
    result = run(engine, tokenizer, num_generations=1)
    rows = result.rows
    failed = (
        Outcome.ENVIRONMENT_ERROR
        if how in ("unscored", "raises")
        else Outcome.INFRASTRUCTURE_ERROR
    )
    assert rows["outcome"].tolist() == [Outcome.OK, failed]
    assert rows["num_turns"].tolist() == [1, 1 if how == "generator" else 2]
    earned = 1.5 if named else 0.75
    assert rows["rewards"].tolist() == [earned, 0.0]
    assert rows["sample_mask"].tolist() == [1.0, 0.0]
    assert float(result.metrics["reward"]) == earned
    assert result.samples[1].reward == 0.0
    if named:
        for name in ("reward/x", "reward/y"):
            assert rows[name].isnan().tolist() == [False, True]


def test_a_second_turn_played_again_earns_once(tokenizer):
    """Rewards that the first attempt earned before it failed do not count."""

    def judge(log, info):
        second = len(log) > 2
        failed = second and environment.num_calls == 2
        return (NAN if failed else 0.75), second, "c"

    environment = Judge(judge)
    settings = {"max_turns": 2, "retry": {"max_attempts": 2}}
    engine, generator = make(tokenizer, environment, **settings)
    result = run(engine, tokenizer, prompts=["a"], num_generations=1)
    assert len(generator.calls) == 4
    assert result.rows["outcome"].tolist() == [Outcome.OK]
    assert result.rows["rewards"].tolist() == [1.5]


def ranks(responses):
    """Return rank 0 for the smallest text; None for a text unique in the group."""
    order = sorted(set(responses))
    return [
        {"rank": float(order.index(text)), "n": len(responses)} for text in responses
    ]


def test_groups_are_scored_together(tokenizer):
    say = scripted.texts_of(tokenizer, lambda call, row: "abdcaa"[row] + "$")
    base = Judge(
        lambda log, info: (NAN if log[-1]["content"] == "d" else 0.5, True, "")
    )
    engine, _ = make(tokenizer, GroupRewardWrapper(ranks, base), say)
    rows = run(engine, tokenizer, num_generations=3).rows
    assert rows["outcome"].tolist() == [0, 0, Outcome.ENVIRONMENT_ERROR, 0, 0, 0]
    assert rows["reward/rank"][:2].tolist() == [0.0, 1.0]
    assert rows["reward/rank"][3:].tolist() == [1.0, 0.0, 0.0]
    assert rows["reward/rank"].isnan().tolist() == [False] * 2 + [True] + [False] * 3
    # The failed one was not among its prompt's responses.
    assert rows["reward/n"][:2].tolist() == [2.0, 2.0]
    assert rows["rewards"].tolist() == [2.5, 3.5, 0.0, 4.5, 3.5, 3.5]


def test_group_scores_that_fail(tokenizer):
    def broken(responses):
        raise KeyError("oh")

    class Down(Judge):
        def score_groups(self, message_logs, metadata):
            raise ConnectionError("no route")

    class Short(Judge):
        def score_groups(self, message_logs, metadata):
            return [torch.zeros(1) for _ in message_logs]

    def judge(log, info):
        return 1.0, True, ""

    # A function that raises is a user error; a service that is down is not.
    engine, _ = make(tokenizer, GroupRewardWrapper(broken, Judge(judge)))
    with pytest.raises(RewardCallError, match="'broken' raised KeyError"):
        run(engine, tokenizer)
    engine, _ = make(tokenizer, Down(judge))
    with pytest.raises(ConnectionError, match="no route"):
        run(engine, tokenizer)
    engine, _ = make(tokenizer, Down(judge), on_environment_error="drop")
    with pytest.raises(RolloutError, match=r"4 of 4 rows.*ConnectionError: no route"):
        run(engine, tokenizer)
    engine, _ = make(tokenizer, Short(judge))
    with pytest.raises(RolloutError, match=r"groups of \[2, 2\] rows and returned \[1"):
        run(engine, tokenizer)


def test_groups_come_out_as_they_finish(tokenizer):
    """Prompt a ends in the first turn, c in the second, b in the third."""
    turns = {"a": 1, "b": 3, "c": 2}

    def judge(log, info):
        number = sum(message["role"] == "assistant" for message in log)
        return 1.0, number >= turns[log[0]["content"]], "d"

    engine, generator = make(tokenizer, Judge(judge), max_turns=4)
    batch = scripted.make_batch(tokenizer, ["a", "b", "c"])
    results = list(engine.run_iter(batch, num_generations=2, seed=3))
    assert [r.message_logs[0][0]["content"] for r in results] == ["a", "c", "b"]
    assert [len(call["seeds"]) for call in generator.calls] == [6, 4, 2]
    whole = engine.run(batch, num_generations=2, seed=3).rows
    for result in results:
        groups = result.rows["group_index"]
        assert len(groups) == 2
        for row, index in enumerate((whole["group_index"] == groups[0]).nonzero()):
            length = int(result.rows["input_lengths"][row])
            for name in ("input_ids", "token_mask", "generation_logprobs"):
                assert torch.equal(
                    result.rows[name][row, :length], whole[name][index, :length][0]
                )
            assert result.rows["outcome"][row] == Outcome.OK


def test_groups_come_out_whole_after_retries(tokenizer):
    def judge(log, info):
        failed = environment.num_calls == 1 and log[0]["content"] == "b"
        return (NAN if failed else 1.0), True, ""

    environment = Judge(judge)
    engine, _ = make(tokenizer, environment, retry={"max_attempts": 2})
    batch = scripted.make_batch(tokenizer, ["a", "b"])
    [result] = engine.run_iter(batch, num_generations=2)
    assert result.rows["outcome"].tolist() == [Outcome.OK] * 4
    assert float(result.metrics["num_retried"]) == 2.0


def test_a_reward_first_named_in_a_retry(tokenizer):
    class Late(Judge):
        """Names its reward once it works; a failed batch has no names."""

        def step(self, message_log_batch, metadata):
            self.num_calls += 1
            size = len(metadata)
            failed = self.num_calls == 1
            column = torch.full((size,), NAN if failed else 1.0)
            return EnvironmentReturn(
                [{"role": "user", "content": ""}] * size,
                list(metadata),
                [None] * size,
                column if failed else {"reward/x": column},
                torch.ones(size, dtype=torch.bool),
                None,
            )

    engine, _ = make(tokenizer, Late(None), retry={"max_attempts": 2})
    rows = run(engine, tokenizer).rows
    assert rows["reward/x"].tolist() == [1.0] * 4


def test_a_further_answer_needs_its_room(tokenizer):
    """Generators reject prompts that leave less room than their longest answer."""
    for room, num_turns in ((1, 3), (4, 2), (7, 1)):
        engine, generator = make(
            tokenizer,
            Judge(lambda log, info: (0.5, False, "b")),
            max_turns=9,
            max_total_sequence_length=10,
            min_answer_room=room,
        )
        rows = run(engine, tokenizer, prompts=["a"], num_generations=1).rows
        assert rows["num_turns"].tolist() == [num_turns]
        assert rows["outcome"].tolist() == [Outcome.TRUNCATED]
        for call in generator.calls[1:]:
            assert int(call["input_lengths"].max()) + room <= 10
