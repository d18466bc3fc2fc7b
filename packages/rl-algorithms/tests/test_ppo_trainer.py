"""PPO on Ray with a tiny model, and the rows that it trains on."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

import rl_algorithms as rl
from rl_algorithms.ppo.config import PPOConfig, PPOSettings
from rl_algorithms.ppo.rows import (
    add_advantages,
    add_nll_weights,
    rows_of_epoch,
    trainable_rows,
)
from rl_algorithms.testing import check_trainer
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError, UserError

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(4)]
PPO = {
    "num_prompts_per_step": 8,
    "num_generations_per_prompt": 4,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_global_batch_size": 16,
    "train_micro_batch_size": 16,
    "ppo_epochs": 2,
    "lr": 1e-2,
}


def reward(prompt, response):
    return float(response[:1] == "7")


def make(model, folder, steps, pool=None, **settings):
    trainer = rl.PPOTrainer.from_pretrained(
        model, max_num_steps=steps, output_dir=str(folder), **{**PPO, **settings}
    )
    return rl.PPOTrainer(trainer.config, pool=pool)


def weights(result, name="policy"):
    return load_file(result.checkpoint_path / name / "weights" / "model.safetensors")


class TestTraining:
    def test_raises_the_reward(self, tiny_model, tmp_path, pool):
        result = make(
            tiny_model,
            tmp_path / "run",
            40,
            pool,
            num_generations_per_prompt=8,
            train_global_batch_size=32,
            val_at_end=True,
            val_period=5,
            val_greedy=False,
            val_num_generations_per_prompt=8,
            accuracy_threshold=1.0,
            stop_at_validation_metric="val:accuracy",
            stop_at_validation_threshold=0.8,
        ).fit(ROWS, val_dataset=ROWS[:4], reward_fn=reward)
        rewards = result.history.column("train:reward")[1]
        assert rewards[0] < 0.2
        assert rewards[-1] > 0.5
        assert "val:accuracy reached" in result.stop_reason
        # From two passes with two optimizer steps each.
        assert result.metrics["train:weight_version_max"] == 4 * (result.steps - 1)
        errors = result.history.column("train:critic/value_error")[1]
        assert max(errors) < 2
        folder = result.checkpoint_path / "critic" / "weights"
        critic = AutoModelForTokenClassification.from_pretrained(folder)
        assert critic.config.num_labels == 1

    def test_warm_up_trains_the_critic_alone(self, tiny_model, tmp_path, pool):
        def fit(steps, **settings):
            folder = tmp_path / f"run{steps}{len(settings)}"
            trainer = make(tiny_model, folder, steps, pool, **settings)
            return trainer.fit(ROWS, reward_fn=reward)

        first = fit(2, critic_warmup_steps=1, save_period=1)
        after_one = load_file(
            first.run_dir / "checkpoints/step_1/policy/weights/model.safetensors"
        )
        start = load_file(tiny_model / "model.safetensors")
        assert all(torch.equal(after_one[name], start[name]) for name in start)
        assert any(not torch.equal(weights(first)[n], start[n]) for n in start)
        _, losses = first.history.column("train:loss")
        assert len(losses) == 1, "the first step trains no policy"
        assert len(first.history.column("train:critic/loss")[1]) == 2

    @pytest.mark.matrix
    def test_passes_end_where_the_policy_has_moved_far(
        self, tiny_model, tmp_path, pool
    ):
        def fit(target_kl):
            trainer = make(
                tiny_model,
                tmp_path / f"run{target_kl}",
                1,
                pool,
                ppo_epochs=3,
                target_kl=target_kl,
                bootstrap_truncated=True,
                positive_nll_coef=0.1,
            )
            return trainer.fit(ROWS, reward_fn=reward).metrics

        strict, lax = fit(1e-9), fit(1e9)
        assert strict["train:policy_passes"] == 1
        assert lax["train:policy_passes"] == 3
        assert 1e-9 < strict["train:approx_kl"] < lax["train:approx_kl"] < 1e9
        assert strict["train:critic/loss"] == lax["train:critic/loss"]
        assert "train:positive_nll" in strict

    @pytest.mark.matrix
    def test_kl_in_the_reward(self, tiny_model, tmp_path, pool):
        result = make(
            tiny_model,
            tmp_path / "run",
            2,
            pool,
            use_kl_in_reward=True,
            reference_policy_kl_penalty=0.1,
            reference_policy_kl_type="k1",
            entropy_coef=0.01,
            cliprange=0.2,
            gae_lambda_value=1.0,
        ).fit(ROWS, reward_fn=reward)
        kl = result.history.column("train:kl_penalty")[1]
        assert kl[0] == pytest.approx(0.0, abs=1e-6)
        assert kl[1] != 0.0
        assert "train:critic/value_clip_fraction" in result.metrics

    def test_keeps_the_contract(self, tiny_model, tmp_path, pool):
        def fit(trainer, callbacks, resume):
            return trainer.fit(
                ROWS[:20], reward_fn=reward, callbacks=callbacks, resume=resume
            )

        check_trainer(
            lambda steps, folder: make(tiny_model, folder, steps, pool), fit, tmp_path
        )

    @pytest.mark.matrix
    def test_two_workers_equal_one(self, tiny_model, tmp_path, pool):
        def fit(name, pool, **more):
            trainer = make(tiny_model, tmp_path / name, 1, pool, lr=1e-3, **more)
            return trainer.fit(ROWS, reward_fn=lambda prompt, response: len(response))

        one = fit("one", pool)
        two = fit("two", pool, cluster={"workers_per_node": 2})
        for name in ("policy", "critic"):
            mine = weights(two, name)
            for key, value in weights(one, name).items():
                # AdamW's first steps are +- lr where a gradient is nearly 0.
                close = (mine[key] - value).abs() < 1e-5
                assert close.float().mean() > 0.98, (name, key)
        for key in ("train:critic/loss", "train:returns/mean", "train:num_samples"):
            assert two.metrics[key] == pytest.approx(one.metrics[key], rel=1e-4)


def rollout_rows(rewards=(1.0, 0.0, 2.0), valid=(1, 1, 1)):
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    return BatchedDataDict(
        input_ids=torch.arange(12).view(3, 4),
        input_lengths=torch.tensor([3, 4, 4]),
        token_mask=mask.float(),
        sample_mask=torch.tensor(valid, dtype=torch.float32),
        generation_logprobs=torch.zeros(3, 4),
        rewards=torch.tensor(rewards),
        truncated=torch.tensor([False, True, False]),
        generation_lengths=mask.sum(1),
    )


class TestRows:
    def test_failed_and_filtered_rows_are_left_out(self):
        rows, metrics = trainable_rows(
            rollout_rows(valid=(1, 1, 0)), PPOSettings(overlong_filtering=True)
        )
        assert rows["final_rewards"].tolist() == [1.0]
        assert metrics["overlong_filtered_rate"] == pytest.approx(1 / 3)
        assert trainable_rows(rollout_rows(valid=(0, 0, 0)), PPOSettings())[0] is None

    def test_advantages_of_two_turns(self):
        """Row 3 has a gap: what the environment said is not a step."""
        rows, _ = trainable_rows(rollout_rows(), PPOSettings())
        rows["values"] = torch.tensor(
            [[0.5, 1.0, 9.0, 9.0], [9.0, 0.25, 0.5, 9.0], [1.0, 9.0, 2.0, 9.0]]
        )
        rows["kl_penalty"] = 0.1 * rows["token_mask"]
        settings = PPOSettings(
            gae_gamma=0.5,
            gae_lambda=0.5,
            gae_lambda_value=1,
            normalize_advantages=False,
        )
        metrics = add_advantages(rows, settings)
        last = [1.0 - 0.1 - 1.0, 0.0 - 0.1 - 0.5, 2.0 - 0.1 - 2.0]
        first = [-0.1 + 0.5 * 1.0 - 0.5, -0.1 + 0.5 * 0.5 - 0.25, -0.1 + 0.5 * 2 - 1]
        a = [f + 0.25 * g for f, g in zip(first, last, strict=True)]
        expected = [
            [0, a[0], last[0], 0],
            [0, 0, a[1], last[1]],
            [0, a[2], 0, last[2]],
        ]
        torch.testing.assert_close(rows["advantages"], torch.tensor(expected))
        gained = [-0.1 + 0.5 * 0.9, -0.1 + 0.5 * -0.1, -0.1 + 0.5 * 1.9]
        returns = [
            [0, gained[0], 0.9, 0],
            [0, 0, gained[1], -0.1],
            [0, gained[2], 0, 1.9],
        ]
        torch.testing.assert_close(rows["returns"], torch.tensor(returns))
        assert metrics["returns/mean"] == pytest.approx(
            sum(map(sum, returns)) / 6, abs=1e-6
        )
        of_actions = torch.tensor(returns)[rows["token_mask"] != 0]
        states = torch.tensor([0.5, 1.0, 0.25, 0.5, 1.0, 2.0])
        left = (of_actions - states).var(correction=0) / of_actions.var(correction=0)
        explained = metrics["critic/explained_variance"]
        assert explained == pytest.approx(1 - left.item(), abs=1e-6)

    def test_a_cut_off_row_goes_on_with_the_value_of_its_last_state(self):
        values = torch.tensor([[0.0] * 4, [9.0, 0.25, 0.5, 0.75], [0.0] * 4])
        found = []
        for bootstrap in (False, True):
            rows, _ = trainable_rows(rollout_rows(), PPOSettings())
            rows["values"] = values
            settings = PPOSettings(
                gae_gamma=0.5,
                gae_lambda=0.5,
                gae_lambda_value=0.25,
                normalize_advantages=False,
                bootstrap_truncated=bootstrap,
            )
            add_advantages(rows, settings)
            found.append((rows["advantages"], rows["returns"]))
        (advantages, returns), (with_value, with_value_returns) = found
        # Only row 2 is cut off by the limit; its actions are tokens 2 and 3.
        gained = 0.5 * 0.75
        expected = torch.zeros(3, 4)
        expected[1, 2:] = torch.tensor([0.25 * gained, gained])
        torch.testing.assert_close(with_value - advantages, expected)
        expected[1, 2] = 0.125 * gained
        torch.testing.assert_close(with_value_returns - returns, expected)

    def test_successes_weigh_as_much_as_all_tokens_of_an_optimizer_step(self):
        rows = BatchedDataDict(
            rewards=torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 3.0]),
            sample_mask=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
            token_mask=torch.tensor(
                [[1, 1, 1], [0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 0], [0, 1, 1]]
            ).float(),
        )
        add_nll_weights(rows, 0.0, 3)
        # Tokens 2 + 1 + 1, of which 3 belong to successes; then none do.
        assert rows["nll_weights"].tolist() == pytest.approx([4 / 3, 0, 4 / 3, 0, 0, 0])
        add_nll_weights(rows, 0.5, 3)
        assert rows["nll_weights"].tolist() == pytest.approx([2, 0, 0, 0, 0, 0])

    def test_rows_that_do_not_count_do_not_normalise(self):
        rows, _ = trainable_rows(rollout_rows(), PPOSettings())
        rows["values"] = torch.zeros(3, 4)
        rows["sample_mask"][2] = 0
        add_advantages(rows, PPOSettings())
        counted = rows["advantages"][:2][rows["token_mask"][:2] != 0]
        assert counted.mean().abs() < 1e-6
        assert not rows["advantages"][2].any()

    def test_order_is_a_function_of_seed_step_and_pass(self):
        rows = BatchedDataDict(at=torch.arange(50))

        def order(seed, step, epoch):
            return rows_of_epoch(rows, seed=seed, step=step, epoch=epoch)["at"].tolist()

        assert order(1, 2, 3) == order(1, 2, 3)
        orders = [order(1, 2, 3), order(2, 2, 3), order(1, 3, 3), order(1, 2, 4)]
        assert len({tuple(o) for o in orders}) == 4
        assert all(sorted(o) == list(range(50)) for o in orders)


class TestConfig:
    def config(self, **settings):
        return PPOConfig.from_dict({"policy": {"model_name": "m"}, **settings})

    def test_the_critic_is_as_the_policy_unless_told_otherwise(self):
        policy = {
            "model_name": "m",
            "max_total_sequence_length": 32,
            "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 0.1}},
            "dynamic_batching": {"train_mb_tokens": 64},
        }
        config = self.config(
            policy=policy,
            critic={
                "optimizer": {"kwargs": {"lr": 1e-2}},
                "sequence_packing": {"train_mb_tokens": 64},
            },
        )
        critic = config.critic
        assert critic.head == "value"
        assert critic.model_name == "m"
        assert critic.max_total_sequence_length == 32
        assert critic.generation is None
        assert critic.optimizer.kwargs == {"lr": 1e-2, "weight_decay": 0.1}
        assert critic.dynamic_batching is None
        assert config.policy.generation.max_new_tokens == 16
        assert PPOConfig.from_dict(config.to_dict()) == config
        sgd = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}}
        assert self.config(policy=policy, critic=sgd).critic.optimizer.kwargs == {
            "lr": 1.0
        }

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"critic": {"head": "lm"}}, "critic.head must be value"),
            (
                {
                    "policy": {"model_name": "m", "max_total_sequence_length": 16},
                    "critic": {"max_total_sequence_length": 8},
                },
                r"at least that of policy \(16\): got 8",
            ),
            (
                {"ppo": {"critic_warmup_steps": 3, "max_num_steps": 3}},
                "never be trained",
            ),
            ({"ppo": {"gae_lambda": 1.5}}, "gae_lambda"),
            ({"ppo": {"ppo_epochs": 1, "target_kl": 0.1}}, "got ppo_epochs=1"),
            (
                {
                    "ppo": {"target_kl": 0.1},
                    "loss_fn": {"force_on_policy_ratio": True},
                },
                "leave one of them out",
            ),
            (
                {"loss_fn": {"positive_nll_coef": 0.1, "token_level_loss": False}},
                "mean over tokens",
            ),
            ({"critic": {"modle_name": "x"}}, "modle_name"),
            ({"value_loss_fn": {"cliprange": -1}}, "cliprange"),
        ],
    )
    def test_bad_input(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            self.config(**settings)

    def test_found_before_anything_starts(self, tiny_model, tmp_path):
        with pytest.raises(UserError, match="nowhere"):
            make(
                tiny_model, tmp_path / "run", 1, **{"critic.model_name": "/nowhere"}
            ).fit(ROWS, reward_fn=reward)
        with pytest.raises(ConfigError, match="reward_fn"):
            make(tiny_model, tmp_path / "run", 1).fit(ROWS)
        assert not (tmp_path / "run").exists()

    def test_names_without_a_path_mean_the_policy(self, tiny_model, tmp_path):
        trainer = make(tiny_model, tmp_path, 1, **{"critic.train_micro_batch_size": 2})
        assert trainer.config.policy.train_micro_batch_size == 16
        assert trainer.config.critic.train_micro_batch_size == 2
        assert json.dumps(trainer.config.to_dict())
