"""Branched conversations: token-to-token quantities span their rows."""

from __future__ import annotations

import pytest
import torch

from rl_algorithms.advantages import AdvantageConfig, build_advantage_estimator
from rl_algorithms.advantages.kl_in_reward import add_kl_penalty
from rl_algorithms.grpo.config import GRPOSettings
from rl_algorithms.grpo.rows import build_rows
from rl_algorithms.losses import ClippedPGLossConfig
from rl_algorithms.ppo.config import PPOSettings
from rl_algorithms.ppo.rows import add_advantages, trainable_rows
from rl_algorithms.rollout import Branch, Timeline, unfold_branches
from rl_distributed.batch.batched_data_dict import BatchedDataDict

# The parts of each conversation: prompt tokens and sampled ones by turn.
PARTS = [
    [(2, 3), (1, 2, 2, 1), (4, 2)],
    [(3, 2)],
    [(1, 4), (5, 1)],
    [(2, 2, 1, 3)],
]
REWARDS = [1.0, -0.5, 2.0, 0.25]
KL = ClippedPGLossConfig(
    reference_policy_kl_penalty=0.3,
    use_kl_in_reward=True,
    reference_policy_kl_type="k1",
)


def mask_of(part):
    return torch.cat(
        [torch.full((n,), float(place % 2)) for place, n in enumerate(part)]
    )


def branch(part):
    mask = mask_of(part)
    return Branch(
        torch.ones(len(mask), dtype=torch.int64), mask, -mask, mask.long() - 1
    )


def rollout():
    """Return columns of a rollout: the last part of each conversation is its row."""
    last = [mask_of(parts[-1]) for parts in PARTS]
    mask = torch.nn.utils.rnn.pad_sequence(last, batch_first=True)
    count = len(PARTS)
    sampled = [sum(int(mask_of(part).sum()) for part in parts) for parts in PARTS]
    return BatchedDataDict(
        {
            "input_ids": torch.ones(mask.shape, dtype=torch.int64),
            "input_lengths": torch.tensor([len(row) for row in last]),
            "token_mask": mask,
            "sample_mask": torch.ones(count),
            "generation_logprobs": -mask,
            "rewards": torch.tensor(REWARDS),
            "group_index": torch.arange(count) // 2,
            "truncated": torch.tensor([True, False, False, True]),
            "generation_lengths": torch.tensor(sampled),
            "branches": [tuple(branch(part) for part in parts[:-1]) for parts in PARTS],
        }
    )


def noisy(rows, *names, seed=0):
    """Add noise columns, nonzero on every token."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        rows[name] = torch.randn(rows["token_mask"].shape, generator=generator)
    return rows


def tokens(rows, name):
    """Return a column's values on the sampled tokens, by conversation, in order."""
    timeline = Timeline.of(rows)
    values, actions = timeline.join(rows[name]), timeline.join(rows["token_mask"])
    return [row[mask != 0].double() for row, mask in zip(values, actions, strict=True)]


def per_token_kl(rows):
    """Return each sampled token's KL penalty, in float64."""
    gaps = zip(
        tokens(rows, "prev_logprobs"),
        tokens(rows, "reference_policy_logprobs"),
        strict=True,
    )
    return [0.3 * (prev - reference) for prev, reference in gaps]


def with_kl():
    rows = unfold_branches(rollout())
    noisy(rows, "prev_logprobs", "reference_policy_logprobs")
    metrics = add_kl_penalty(rows, KL)
    return rows, metrics


class TestTimeline:
    def test_every_sampled_token_is_there_once_and_in_order(self):
        rows = unfold_branches(rollout())
        assert rows.size == sum(len(parts) for parts in PARTS)
        timeline = Timeline.of(rows)
        joined = timeline.join(rows["token_mask"])
        for row, parts in zip(joined, PARTS, strict=True):
            expected = torch.cat([mask_of(part) for part in parts])
            assert row[: len(expected)].tolist() == expected.tolist()
            assert not row[len(expected) :].any()
        assert timeline.last_row.tolist() == [0, 1, 2, 3]

    def test_split_undoes_join(self):
        rows = noisy(unfold_branches(rollout()), "noise")
        used = torch.arange(rows["noise"].shape[1]) < rows["input_lengths"][:, None]
        timeline = Timeline.of(rows)
        found = timeline.split(timeline.join(rows["noise"]))
        assert torch.equal(found, torch.where(used, rows["noise"], 0.0))

    def test_order_and_copies_of_rows_do_not_matter(self):
        rows = noisy(unfold_branches(rollout()), "noise")
        whole = Timeline.of(rows).join(rows["noise"])
        order = [*reversed(range(rows.size)), 0, 0, 5]
        shuffled = rows.select_indices(order)
        timeline = Timeline.of(shuffled)
        assert torch.equal(timeline.join(shuffled["noise"]), whole)
        assert timeline.conversation[-3:].tolist() == [0, 0, timeline.conversation[-1]]
        again = timeline.split(timeline.join(shuffled["noise"]))
        assert torch.equal(again[-2], again[rows.size - 1])

    def test_rows_without_branches_are_timelines_of_their_own(self):
        rows = rollout()
        del rows["branches"]
        joined = Timeline.of(rows).join(rows["token_mask"])
        assert torch.equal(joined, rows["token_mask"])


class TestKLInTheReward:
    def test_each_sampled_token_counts_once(self):
        rows, metrics = with_kl()
        every = torch.cat(per_token_kl(rows))
        assert len(every) == int(rollout()["generation_lengths"].sum())
        unweighted = float(every.mean()) / 0.3
        assert metrics["kl_penalty"].value == pytest.approx(unweighted, rel=1e-5)

    def test_group_advantages_take_the_penalty_of_all_parts(self):
        rows, _ = with_kl()
        settings = GRPOSettings.from_dict({"num_generations_per_prompt": 2})
        estimator = build_advantage_estimator(
            AdvantageConfig(normalize_rewards=False, use_leave_one_out_baseline=True)
        )
        train, _ = build_rows(rows, estimator, settings)
        net = [
            reward - float(kl.sum())
            for reward, kl in zip(REWARDS, per_token_kl(rows), strict=True)
        ]
        # Groups of two: the baseline is the other answer.
        expected = torch.tensor(
            [net[0] - net[1], net[1] - net[0], net[2] - net[3], net[3] - net[2]]
        )
        owner = Timeline.of(rows).conversation
        torch.testing.assert_close(train["advantages"], expected[owner])

    def test_returns_of_tokens_take_what_later_parts_pay(self):
        rows, _ = with_kl()
        settings = GRPOSettings.from_dict(
            {"adv_estimator": {"name": "reinforce_plus_plus"}}
        )
        estimator = build_advantage_estimator(settings.adv_estimator)
        train, metrics = build_rows(rows, estimator, settings)
        returns = [
            reward - kl.flip(0).cumsum(0).flip(0)
            for reward, kl in zip(REWARDS, per_token_kl(rows), strict=True)
        ]
        every = torch.cat(returns)
        std = every.std()
        places = {name: rows[name] for name in ("conversation_index", "part_index")}
        found = tokens(BatchedDataDict({**train, **places}), "advantages")
        for row, expected in zip(found, returns, strict=True):
            torch.testing.assert_close(
                row, (expected - every.mean()) / std, atol=1e-6, rtol=1e-5
            )
        assert metrics["advantages/mean"] == pytest.approx(0.0, abs=1e-6)
        assert not train["advantages"][train["token_mask"] == 0].any()

    def test_a_conversation_is_left_out_with_all_its_parts(self):
        rows, _ = with_kl()
        settings = GRPOSettings.from_dict({"overlong_filtering": True})
        estimator = build_advantage_estimator(settings.adv_estimator)
        train, _ = build_rows(rows, estimator, settings)
        assert train.size == len(PARTS[1]) + len(PARTS[2])


def gae_by_hand(rewards, values, last_value, gamma, lam):
    advantages, following, after = [], 0.0, last_value
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * after - value + gamma * lam * following
        advantages.append(following)
        after = value
    return torch.tensor(advantages[::-1], dtype=torch.float64)


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("copies", [0, 3])
def test_generalised_advantages_go_across_parts(bootstrap, copies):
    settings = PPOSettings(
        gae_gamma=0.9,
        gae_lambda=0.8,
        normalize_advantages=False,
        bootstrap_truncated=bootstrap,
    )
    rows, _ = trainable_rows(rollout(), settings)
    rows = unfold_branches(rows)
    noisy(rows, "prev_logprobs", "reference_policy_logprobs", "values")
    rows = rows.select_indices([*range(rows.size), *[0] * copies])
    add_kl_penalty(rows, KL)
    add_advantages(rows, settings)
    # The value of the state in which token i is chosen is the value after token i - 1.
    rows["states"] = rows["values"].roll(1, dims=1)
    found, returns = tokens(rows, "advantages"), tokens(rows, "returns")
    states, after = tokens(rows, "states"), tokens(rows, "values")
    truncated = rollout()["truncated"].tolist()
    for row, kl in enumerate(per_token_kl(rows)):
        rewards = -kl
        rewards[-1] += REWARDS[row]
        last = float(after[row][-1]) if bootstrap and truncated[row] else 0.0
        expected = gae_by_hand(
            rewards.tolist(), states[row].tolist(), last, gamma=0.9, lam=0.8
        )
        torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            returns[row], expected + states[row], atol=1e-6, rtol=1e-5
        )
    assert not rows["advantages"][rows["token_mask"] == 0].any()
