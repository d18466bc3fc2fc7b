"""`policy.train(batch, rewards)`: REINFORCE on the sampled batch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.policy.reward_rows import ReinforceLoss, baselines, reinforce_rows
from rl_models.tokens.tokenizer import load_tokenizer

NAN = math.nan


def sampled(num_rows=4):
    """Return rows of three prompts, as from `generate`; the first two are equal."""
    return BatchedDataDict(
        output_ids=torch.tensor(
            [[5, 6, 7, 8], [5, 6, 9, 0], [4, 7, 3, 0], [5, 3, 0, 0]]
        )[:num_rows],
        generation_lengths=torch.tensor([2, 1, 2, 1])[:num_rows],
        unpadded_sequence_lengths=torch.tensor([4, 3, 3, 2])[:num_rows],
    )


class TestBaselines:
    def test_of_groups_where_each_prompt_has_several(self):
        rewards = torch.tensor([1.0, 3.0, 10.0, 20.0, NAN])
        found = baselines(rewards, ["a", "a", "b", "b", "b"])
        assert found.tolist()[:4] == [2.0, 2.0, 15.0, 15.0]

    def test_of_the_batch_where_one_stands_alone(self):
        rewards = torch.tensor([1.0, 3.0, 11.0, NAN])
        assert baselines(rewards, ["a", "a", "b", "b"]).tolist() == [5.0] * 4


class TestRows:
    def test_gradient_is_that_of_the_formula(self):
        rewards = [1.0, 0.0, NAN, 3.0]
        rows = reinforce_rows(sampled(), rewards)
        assert rows["sample_mask"].tolist() == [1, 1, 0, 1]
        assert rows["token_mask"].tolist() == [
            [0, 0, 1, 1],
            [0, 0, 1, 0],
            [0, 1, 1, 0],
            [0, 1, 0, 0],
        ]
        torch.manual_seed(0)
        logprobs = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        mean = 4.0 / 3
        spans = [(1, 3), (1, 2), None, (0, 1)]  # of the answers, in next-token columns
        expected = (
            -sum(
                (reward - mean) * logprobs[row, span[0] : span[1]].sum()
                for row, (reward, span) in enumerate(zip(rewards, spans, strict=True))
                if span is not None
            )
            / 3
        )
        # As two micro-batches, whose values add up.
        loss = sum(
            ReinforceLoss()(
                rows.slice(start, start + 2),
                torch.tensor(3.0),
                torch.tensor(4.0),
                next_token_logprobs=logprobs[start : start + 2],
            )[0]
            for start in (0, 2)
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        (found,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, logprobs)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize(
        "rewards",
        [
            torch.tensor([1.0, 0.0, 2.0, 3.0]),
            np.array([1.0, 0.0, 2.0, 3.0]),
            (1, 0, 2, 3),
            {"a": [1.0, 0.0, 1.0, 1.0], "b": [NAN, NAN, 1.0, 2.0]},
            SimpleNamespace(
                rewards=torch.tensor([1.0, 0.0, 2.0, 3.0]), terminateds=[True] * 4
            ),
        ],
    )
    def test_forms_of_rewards(self, rewards):
        rows = reinforce_rows(sampled(), rewards)
        assert rows["advantages"].sum(1).tolist() == [-1.0, -1.5, 1.0, 1.5]

    @pytest.mark.parametrize(
        ("rewards", "message"),
        [
            ([1.0, 2.0], "rewards must be 4 numbers, one per row .* got list of 2"),
            (torch.ones(4, 1), r"got shape \(4, 1\)"),
            ("high", "must be 4 numbers"),
            (None, "must be 4 numbers"),
            ([1.0, math.inf, 0.0, 0.0], r"rewards\[1\] must be a finite number"),
            ([NAN] * 4, "all are NaN"),
            (
                SimpleNamespace(
                    rewards=[1.0] * 4, terminateds=[True, False, True, True]
                ),
                "1 of 4 go on",
            ),
        ],
    )
    def test_wrong_rewards(self, rewards, message):
        with pytest.raises(BatchError, match=message):
            reinforce_rows(sampled(), rewards)

    def test_rows_that_were_not_sampled(self):
        with pytest.raises(BatchError, match="lacks output_ids"):
            reinforce_rows(BatchedDataDict(prompt=["a"]), [1.0])


@pytest.fixture(scope="module")
def policy(ray_cluster, tiny_folder):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        made = HuggingFacePolicy(
            tiny_folder,
            cluster,
            generation={"max_new_tokens": 4, "stop_token_ids": []},
            optimizer={"kwargs": {"lr": 0.01}},
            scheduler=None,
        )
        yield made
        assert made.shutdown()


@pytest.fixture(scope="module")
def generator(ray_cluster, tiny_folder):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        made = GenerationPolicy(
            cluster,
            GenerationConfig(
                backend="huggingface", max_new_tokens=4, stop_token_ids=[]
            ),
            model_name=tiny_folder,
        )
        yield made
        assert made.shutdown()


def texts(*prompts):
    numbers = list(range(len(prompts)))
    return BatchedDataDict(prompt=list(prompts), answer=numbers)


def rewards_of(output, wanted):
    """Return the share of sampled tokens that are the wanted one."""
    starts = output["unpadded_sequence_lengths"] - output["generation_lengths"]
    return [
        float((row[start:end] == wanted).float().mean())
        for row, start, end in zip(
            output["output_ids"],
            starts,
            output["unpadded_sequence_lengths"],
            strict=True,
        )
    ]


class TestTexts:
    def test_texts_in_and_out(self, policy, tiny_folder):
        output = policy.generate(texts("12", "3", "456"), greedy=True)
        assert output["answer"] == [0, 1, 2]
        assert output["prompt"] == ["12", "3", "456"]
        tokenizer = load_tokenizer(tiny_folder)
        for row, prompt in enumerate(output["prompt"]):
            ids = tokenizer(prompt)["input_ids"]
            end = int(output["unpadded_sequence_lengths"][row])
            assert output["output_ids"][row, : len(ids)].tolist() == ids
            answer = output["output_ids"][row, len(ids) : end]
            expected = tokenizer.decode(answer, skip_special_tokens=True)
            assert output["response"][row] == expected

    def test_tokens_stay_without_texts(self, policy):
        output = policy.generate(
            BatchedDataDict(
                input_ids=torch.tensor([[5, 6]]), input_lengths=torch.tensor([2])
            )
        )
        assert "response" not in output

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([], "has no rows"),
            (["1", 7], r"prompt\[1\] must be text, or a list of messages"),
            (["1", ""], r"prompt\[1\] has no tokens"),
        ],
    )
    def test_wrong_texts(self, policy, prompts, message):
        with pytest.raises(BatchError, match=message):
            policy.generate(texts(*prompts))


class TestLoop:
    def test_the_generator_follows_and_the_reward_rises(self, policy, generator):
        generator.follow(policy)
        batch = texts(*(str(n) for n in range(8)), *(str(n) for n in range(8)))
        means = []
        for _ in range(20):
            output = generator.generate(batch)
            rewards = rewards_of(output, wanted=7)
            before = policy.weight_version
            result = policy.train(output, rewards)
            assert policy.weight_version == before + 1
            assert len(result["loss"]) == 1
            means.append(sum(rewards) / len(rewards))
        assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.3
        # The generator has the policy's weights: its log-probs agree.
        output = generator.generate(batch)
        rows = BatchedDataDict(
            input_ids=output["output_ids"],
            input_lengths=output["unpadded_sequence_lengths"],
        )
        found = policy.get_logprobs(rows)["logprobs"]
        sampled = output["token_versions"] >= 0
        torch.testing.assert_close(
            found[sampled], output["logprobs"][sampled], rtol=0, atol=1e-4
        )

    def test_what_a_policy_samples_itself(self, policy):
        output = policy.generate(texts("1", "2"))
        policy.train(output, [1.0, 0.0])
        with pytest.raises(BatchError, match=r"present weights.*follow"):
            policy.train(output, [1.0, 0.0])

    def test_a_generator_that_does_not_follow_is_refused(self, tiny_folder, policy):
        with RayVirtualCluster([1], use_gpus=False) as cluster:
            alone = GenerationPolicy(
                cluster,
                GenerationConfig(backend="huggingface", max_new_tokens=2),
                model_name=tiny_folder,
            )
            output = alone.generate(texts("1", "2"))
            policy.reload(policy.config)
            # The version is also the policy's, which has not trained yet.
            with pytest.raises(BatchError, match=r"does not follow it; call generator"):
                policy.train(output, [1.0, 0.0])
            assert policy.weight_version == 0
            own = policy.generate(texts("1", "2"))
            policy.train(own, [1.0, 0.0])
            with pytest.raises(BatchError, match=r"generator\.follow\(policy\)"):
                policy.train(output, [1.0, 0.0])
            with pytest.raises(ConfigError, match="no start_weight_export"):
                alone.follow(object())
            assert alone.shutdown()
