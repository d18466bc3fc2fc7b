"""GRPO steps with real rollouts and models that only count; without Ray."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import rl_algorithms as rl
import rl_models
from rl_algorithms.errors import DataError
from rl_algorithms.seeds import row_seeds
from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles, rollout_parts
from rl_distributed.errors import ConfigError
from rl_envs import FunctionalRewardWrapper
from rl_envs.worlds.second_check import SecondCheckEnvironment

_spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)
Judge, EOS = scripted.Judge, scripted.EOS
ROWS = [{"prompt": "ab" * (1 + n % 3)} for n in range(16)]
SEED = 7


class CountingPolicy:
    """Counts its optimizer steps; the count is its only weight."""

    def __init__(self):
        self.num_steps = 0

    def train(self, rows, loss, *, global_batch_size, timer=None, eval_mode=False):
        steps = rows.size // global_batch_size
        assert steps * global_batch_size == rows.size
        self.num_steps += steps
        ones = torch.ones(steps)
        logprobs = -0.1 * rows["input_ids"][:, 1:].float()
        counts = rows["sample_mask"].sum(), rows["token_mask"].sum()
        _, metrics = loss(rows, *counts, next_token_logprobs=logprobs)
        found = {name: [value] for name, value in metrics.items()}
        return {"loss": ones, "grad_norm": ones, "lr": ones, "all_mb_metrics": found}

    def get_logprobs(self, rows):
        return {"logprobs": torch.zeros(rows["input_ids"].shape)}

    def save_checkpoint(self, weights_path, optimizer_path=None, tokenizer_path=None):
        Path(weights_path).mkdir(parents=True)


class Generator(scripted.TokenGenerator):
    """Samples tokens by seed, and records the weights used."""

    def __init__(self):
        super().__init__(
            lambda call, row, seed: [3 + seed % 10, EOS],
            lambda call: self.weight_version,
        )
        self.weights, self.found = 0, []

    def generate(self, data, greedy=False, *, sampling=None):
        self.found.append((self.weights, self.weight_version))
        return super().generate(data, greedy, sampling=sampling)


class Sync:
    """Hands over the weights on request."""

    def __init__(self, policy, generation):
        self.policy, self.generation, self.is_stale = policy, generation, True

    def mark_stale(self):
        self.is_stale = True

    def sync_weights(self, timer=None, *, version=None):
        assert version > self.generation.weight_version or version == 0
        self.generation.weights = self.policy.num_steps
        self.generation.weight_version = version
        self.is_stale = False

    def take_confirmed(self):
        return []

    def close(self):
        pass


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_models, "WeightSynchronizer", Sync)
    tokenizer = scripted.ambiguous_tokenizer()

    def build(**settings):
        values = {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_new_tokens": 4,
            "max_total_sequence_length": 32,
            "reference_policy_kl_penalty": 0.0,
            "max_num_steps": 3,
            "seed": SEED,
            "output_dir": str(tmp_path / "run"),
            "checkpointing": {"enabled": False},
            **settings,
        }
        return rl.GRPOTrainer.from_pretrained(
            "unused",
            policy=CountingPolicy(),
            generation=Generator(),
            tokenizer=tokenizer,
            **values,
        )

    return build


def by_answer(log, info):
    """Return rewards that differ within a group, as its answers do."""
    return float(sum(map(ord, log[-1]["content"])) % 7), True, ""


@pytest.mark.parametrize("steps_per_batch", [1, 4])
def test_answers_are_sampled_with_the_newest_weights(make, steps_per_batch):
    """Each version is the number of optimizer steps behind the weights."""
    batch = 8 // steps_per_batch
    trainer = make(train_global_batch_size=batch, train_micro_batch_size=batch)
    result = trainer.fit(ROWS, environment=Judge(by_answer))
    policy, generator = trainer.given.policy, trainer.given.generation
    behind = [steps_per_batch * step for step in range(3)]
    assert generator.found == [(steps, steps) for steps in behind]
    assert policy.num_steps == trainer.state.weight_version == 3 * steps_per_batch
    versions = result.history.column("train:weight_version_max")[1]
    assert versions == behind


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_that_nothing_can_judge_are_named_before_the_first_step(make, held_out):
    class Particular(Judge):
        def unusable_rows(self, metadata):
            return {
                place: f"the solution {row['answer']!r} has no meaning"
                for place, row in enumerate(metadata)
                if row["answer"] == "?"
            }

    good = [{"prompt": "ab", "answer": "2"}] * 8
    bad = [{**row, "answer": "?" if i in (1, 5) else "2"} for i, row in enumerate(good)]
    trainer = make()
    with pytest.raises(DataError) as caught:
        trainer.fit(
            good if held_out else bad,
            val_dataset=bad if held_out else None,
            environment=Particular(by_answer),
        )
    assert "2 of 8 rows cannot be judged" in str(caught.value)
    assert "row 1: the solution '?' has no meaning; row 5: " in str(caught.value)
    assert trainer.given.generation.found == []


def test_weights_that_a_validation_got_are_not_sent_again(make):
    """`Sync` rejects a version that the generator already has."""
    trainer = make(val_period=1, max_num_steps=2)
    trainer.fit(ROWS, val_dataset=ROWS, environment=Judge(by_answer))
    validations = [(1, 1), (2, 2)]
    assert sorted({*trainer.given.generation.found}) == [(0, 0), *validations]
    assert not trainer.components.sync.is_stale


def test_a_step_without_training_syncs_nothing(make):
    trainer = make(drop_zero_variance_groups=True)
    trainer.fit(ROWS, environment=Judge(lambda log, info: (1.0, True, "")))
    assert trainer.given.generation.found == [(0, 0)] * 3
    assert trainer.state.weight_version == 0


def test_further_batches_of_dynamic_sampling_have_noise_of_their_own(make):
    """A prompt's index counts over all batches of a step."""
    judged = iter(range(1000))

    def dull_at_first(log, info):
        # Both groups of the first batch of a step, then one of the second.
        reward, done, said = by_answer(log, info)
        return (1.0 if next(judged) % 16 < 12 else reward), done, said

    trainer = make(use_dynamic_sampling=True, max_num_steps=1)
    trainer.fit(ROWS, environment=Judge(dull_at_first))
    calls = [call["seeds"].numpy() for call in trainer.given.generation.calls]
    assert len(calls) >= 3
    samples = np.tile(np.arange(4), 2)
    for number, seeds in enumerate(calls):
        prompts = np.repeat(2 * number + np.arange(2), 4)
        assert seeds.tolist() == row_seeds(SEED, 0, prompts, samples).tolist()
    every = np.concatenate(calls)
    assert len(set(every.tolist())) == len(every)


class TestAccuracy:
    """`val:accuracy` exists if something marks answers as correct."""

    def fit(self, make, environment=None, reward_fn=None, **settings):
        trainer = make(val_at_end=True, max_num_steps=1, val_batch_size=3, **settings)
        held_out = [{"prompt": "a" * (1 + n), "answer": "a"} for n in range(4)]
        return trainer.fit(
            ROWS, val_dataset=held_out, environment=environment, reward_fn=reward_fn
        )

    def test_a_reward_function_has_none(self, make):
        reward = FunctionalRewardWrapper(lambda prompt, response: 10.0 * len(prompt))
        result = self.fit(make, reward)
        assert result.metrics["val:reward"] == 25.0
        assert not [name for name in result.metrics if name.endswith("accuracy")]
        assert "val:reward" in repr(result)

    def test_a_threshold_makes_one(self, make):
        reward = FunctionalRewardWrapper(lambda prompt, response: 10.0 * len(prompt))
        result = self.fit(make, reward, accuracy_threshold=20.0)
        assert result.metrics["val:accuracy"] == 0.75
        assert result.metrics["val:reward"] == 25.0
        assert "val:accuracy" in repr(result)

    @pytest.mark.parametrize(
        ("goal", "why"),
        [
            (0.7, "val:accuracy reached 0.75 >= 0.7"),
            (
                0.9,
                "max_num_steps (1) reached; the goal was missed: val:accuracy is 0.75, "
                "not >= 0.9",
            ),
        ],
    )
    def test_the_end_of_a_run_says_whether_it_reached_its_goal(self, make, goal, why):
        reward = FunctionalRewardWrapper(lambda prompt, response: 10.0 * len(prompt))
        result = self.fit(
            make,
            reward,
            accuracy_threshold=20.0,
            stop_at_validation_metric="val:accuracy",
            stop_at_validation_threshold=goal,
        )
        assert result.stop_reason == why

    def test_an_environments_own_counts_by_rows(self, make):
        """Batches of three and of one: each of their rows has equal weight."""

        class Measured(Judge):
            def global_post_process_and_metrics(self, batch):
                rewards = torch.as_tensor(batch["rewards"])
                return batch, {"accuracy": float((rewards >= 2).float().mean())}

        judge = Measured(lambda log, info: (float(len(log[0]["content"])), True, ""))
        result = self.fit(make, judge)
        assert result.metrics["val:accuracy"] == pytest.approx(0.75)
        assert result.metrics["val:env/accuracy"] == pytest.approx(0.75)

    @pytest.mark.parametrize(("threshold", "share"), [(2.0, 2 / 3), (-1.0, 1.0)])
    def test_rows_that_were_not_scored_have_no_part_in_it(self, make, threshold, share):
        def judge(log, info):
            length = len(log[0]["content"])
            return (float("nan") if length == 3 else float(length)), True, ""

        result = self.fit(make, Judge(judge), accuracy_threshold=threshold)
        assert result.metrics["val:accuracy"] == pytest.approx(share)

    @pytest.mark.parametrize(
        "settings",
        [
            {"checkpointing": {"metric_name": "val:accuracy"}},
            {"checkpointing": {"metric_name": "val:easy/accuracy"}},
            {"early_stop": {"patience": 1, "metric": "val:accuracy"}},
            {
                "stop_at_validation_metric": "val:accuracy",
                "stop_at_validation_threshold": 0.9,
            },
        ],
    )
    def test_nothing_waits_for_what_a_reward_function_does_not_say(
        self, make, settings
    ):
        reward = lambda prompt, response: 1.0  # noqa: E731
        with pytest.raises(ConfigError, match=r"val:reward, or set accuracy_threshold"):
            self.fit(make, reward_fn=reward, **settings)


def kept(trainer):
    return list(RolloutFiles(trainer.run_dir, 1 << 20).read())


class TestKeptAnswers:
    """A few answers of each step are stored in the run folder for inspection."""

    def test_they_are_those_of_the_step(self, make):
        trainer = make()
        trainer.fit(ROWS, environment=Judge(by_answer))
        records = kept(trainer)
        assert [record["step"] for record in records] == [1] * 4 + [2] * 4 + [3] * 4
        assert [next(iter(record)) for record in records] == ["step"] * 12
        for record in records:
            assert record["reward"] == sum(map(ord, record["response"])) % 7
            assert "".join(record["tokens"]).startswith(record["response"])
            assert record["versions"] == [[record["step"] - 1, 2]]
            assert len(record["logprobs"]) == record["length"] == 2
            assert all(value < 0 for value in record["logprobs"])
            assert record["outcome"] == "ok"
            assert set(record["prompt"]) == {"a", "b"}
            assert "messages" not in record
        assert all("advantage" in record for record in records)

    @pytest.mark.parametrize("batch", [8, 2])
    def test_they_have_log_probs_of_the_trainer(self, make, batch):
        """They predate the step; the loss computes them if the batch lacks them."""
        trainer = make(train_global_batch_size=batch, train_micro_batch_size=batch)
        trainer.fit(ROWS, environment=Judge(by_answer))
        records = kept(trainer)
        tokenizer = scripted.ambiguous_tokenizer()
        ids = {tokenizer.decode([n]): n for n in range(len(tokenizer))}
        assert len(records) == 12
        for record in records:
            known = [-0.1 * ids[text] for text in record["tokens"]]
            expected = [0.0] * len(known) if batch == 2 else known
            assert record["trainer_logprobs"] == pytest.approx(expected)
            assert "advantage" in record

    def test_they_are_the_best_and_the_worst_of_a_group(self, make):
        trainer = make(max_num_steps=1)
        judged = []

        def noted(log, info):
            judged.append(by_answer(log, info)[0])
            return by_answer(log, info)

        trainer.fit(ROWS, environment=Judge(noted))
        for group in (0, 1):
            of_group = [r for r in kept(trainer) if r["group"] == group]
            rewards = judged[4 * group : 4 * group + 4]
            found = [record["reward"] for record in of_group]
            assert sorted(found) == [min(rewards), max(rewards)]
            high, low = sorted(of_group, key=lambda r: -r["reward"])
            assert high["advantage"] >= low["advantage"]

    @pytest.mark.parametrize(("kept_per_step", "expected"), [(1, 1), (3, 3), (99, 8)])
    def test_their_number_is_a_setting(self, make, kept_per_step, expected):
        rollout = {"kept_per_step": kept_per_step}
        trainer = make(max_num_steps=2, rollout=rollout)
        trainer.fit(ROWS, environment=Judge(by_answer))
        assert [r["step"] for r in kept(trainer)] == [1] * expected + [2] * expected

    def test_rejected_ones_are_kept_and_warned_of(self, make):
        trainer = make(max_num_steps=4, rollout={"kept_per_step": 1})
        result = trainer.fit(
            ROWS,
            environment=SecondCheckEnvironment(
                {"min_reward": -1e9},
                environment=Judge(by_answer),
                check=lambda response: 0.0,
            ),
        )
        assert all(r["second_check"] == "rejected" for r in kept(trainer))
        [warning] = [w for w in result.warnings if "may be hacked" in w]
        assert "rejected 24 of 24 high-scoring answers of the last 3 steps" in warning
        assert result.metrics["train:env/second_check_rejected_rate"] == 1.0

    def test_none_are_kept_if_none_are_wanted(self, make):
        trainer = make(rollout={"kept_per_step": 0})
        trainer.fit(ROWS, environment=Judge(by_answer))
        assert rollout_parts(trainer.run_dir) == []

    @pytest.mark.parametrize(("tables_every", "steps"), [(2, [1, 2, 4]), (0, [])])
    def test_trackers_get_them_as_tables(self, make, tables_every, steps):
        trainer = make(
            max_num_steps=5,
            rollout={"tables_every": tables_every},
            logger={"sinks": ["jsonl", "mlflow"]},
        )
        trainer.fit(ROWS, environment=Judge(by_answer))
        found = sorted((trainer.run_dir / "mlruns").rglob("tables/train/rollouts/*"))
        assert [int(path.stem) for path in found] == steps
        for path in found:
            table = json.loads(path.read_text())
            answers = [r for r in kept(trainer) if r["step"] == int(path.stem)]
            place = table["columns"].index("response")
            assert [row[place] for row in table["data"]] == [
                record["response"] for record in answers
            ]

    def test_a_resumed_run_has_each_step_once(self, make):
        settings = {"checkpointing": {"enabled": True, "save_period": 2}}
        whole = make(output_dir=str(make().run_dir) + "-whole", max_num_steps=4)
        whole.fit(ROWS, environment=Judge(by_answer))
        first = make(max_num_steps=2, **settings)
        first.fit(ROWS, environment=Judge(by_answer))
        # As left by a run killed in the step after its checkpoint.
        RolloutFiles(first.run_dir, 1 << 20).add(3, [{"reward": 9.0}])
        with open(rollout_parts(first.run_dir)[-1], "ab") as file:
            file.write(b'{"step": 3, "pro')
        again = make(max_num_steps=4, **settings)
        again.given.policy.load_checkpoint = lambda *args, **kwargs: None
        again.fit(ROWS, environment=Judge(by_answer), resume=True)
        assert [r["step"] for r in kept(again)] == [r["step"] for r in kept(whole)]
        assert [r["response"] for r in kept(again)] == [
            r["response"] for r in kept(whole)
        ]

    def test_parts_of_rewards_and_further_turns_are_there(self, make):
        def talk(log, info):
            parts = {"reward/form": 0.25, "reward/right": float("nan")}
            return parts, len(log) > 2, "more"

        trainer = make(max_num_steps=1, max_rollout_turns=2)
        trainer.fit(ROWS, environment=Judge(talk))
        for record in kept(trainer):
            assert record["rewards"] == {"form": 0.5}
            roles = [message["role"] for message in record["messages"]]
            assert roles == ["user", "assistant", "user", "assistant"]
            assert record["messages"][2]["content"] == "more"
            assert len(record["tokens"]) == record["length"] == 4

    def test_a_full_disk_does_not_end_the_run(self, make, caplog):
        trainer = make()
        trainer.run_dir.mkdir(parents=True)
        (trainer.run_dir / "rollouts").write_text("in the way")
        result = trainer.fit(ROWS, environment=Judge(by_answer))
        assert result.steps == 3
        said = [r.message for r in caplog.records if "no longer kept" in r.message]
        assert len(said) == 1


class TestPassRates:
    """Prompts that are always or never solved are skipped for a few epochs."""

    ROWS: ClassVar = [{"prompt": "ab" * (1 + n % 3), "number": n} for n in range(8)]
    FILTER: ClassVar = {
        "num_visits": 1,
        "revisit_epochs": 3,
        "difficulty_key": "number",
    }

    def fit(self, make, resume=False, until=9, **settings):
        """Return the prompt numbers of each step, and the result."""
        asked = []

        def judge(log, info):
            number = info["number"]
            asked.append(number)
            sometimes = float(sum(map(ord, log[-1]["content"])) % 2)
            return {0: 1.0, 1: 0.0, 2: 0.0}.get(number, sometimes), True, ""

        settings = {"max_num_epochs": None, "max_num_steps": until, **settings}
        trainer = make(checkpointing={"enabled": True, "save_period": 1}, **settings)
        trainer.given.policy.load_checkpoint = lambda *args, **kwargs: None
        result = trainer.fit(self.ROWS, environment=Judge(judge), resume=resume)
        steps = [asked[i : i + 8 : 4] for i in range(0, len(asked), 8)]
        return steps, result

    def test_they_are_skipped_and_reported(self, make):
        steps, result = self.fit(make, **{"data.pass_rate_filter": self.FILTER})
        first, second = steps[:4], steps[4:6]
        assert sorted(number for step in first for number in step) == list(range(8))
        assert not {0, 1, 2} & {number for step in second for number in step}

        def column(name):
            return result.history.column(f"train:pass_rate_filter_{name}")[1]

        assert column("num_too_easy")[:4] == column("num_too_hard")[:4] == [0.0] * 4
        assert column("num_too_easy")[4] >= 1
        assert column("num_too_hard")[4] >= 2
        assert column("difficulty_kept")[0] == 3.5
        assert column("difficulty_kept")[4] > 3.5

    def test_off_they_are_as_without(self, make, tmp_path):
        plain, _ = self.fit(make, output_dir=str(tmp_path / "plain"))
        never = {**self.FILTER, "num_visits": 99}
        steps, _ = self.fit(make, **{"data.pass_rate_filter": never})
        assert plain == steps

    @pytest.mark.parametrize("until", [1, 4, 5, 6])
    def test_a_resumed_run_goes_on_bitwise(self, make, tmp_path, until):
        settings = {"data.pass_rate_filter": self.FILTER}
        whole, result = self.fit(make, output_dir=str(tmp_path / "w"), **settings)
        head, _ = self.fit(make, until=until, **settings)
        tail, again = self.fit(make, resume=True, **settings)
        assert head + tail == whole
        for name in result.metrics:
            if name.startswith("train:"):
                assert again.history.column(name) == result.history.column(name)

    def test_dynamic_sampling_notes_each_batch_that_it_draws(self, make):
        settings = {"data.pass_rate_filter": self.FILTER, "use_dynamic_sampling": True}
        steps, result = self.fit(make, until=6, **settings)
        drawn = result.history.column("train:dynamic_sampling_num_gen_batches")[1]
        assert len(steps) == sum(drawn) > 6
        assert result.metrics["train:pass_rate_filter_num_too_hard"] >= 0
        seen = [number for step in steps for number in step]
        assert seen.count(5) > seen.count(0)
