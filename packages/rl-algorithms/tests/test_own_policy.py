"""The adapter between a run and a policy of few methods."""

from __future__ import annotations

import pytest
import torch

from rl_algorithms.trainers.setup.own_policy import OwnPolicy, samples_itself
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError
from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import PolicyInterface
from rl_models.types import SamplingParams

OWN = SamplingParams(max_new_tokens=4)


def rows(count):
    return BatchedDataDict(
        input_ids=torch.arange(count)[:, None], input_lengths=torch.ones(count)
    )


def sampled(count):
    return {
        "output_ids": torch.zeros(count, 2),
        "generation_lengths": torch.ones(count),
        "unpadded_sequence_lengths": torch.full((count,), 2),
        "logprobs": torch.zeros(count, 2),
        "truncated": torch.zeros(count, dtype=torch.bool),
    }


class Short(PolicyInterface):
    def __init__(self):
        self.trained = []

    def generate(self, batch):
        return sampled(batch.size)

    def train(self, batch, loss_fn):
        self.trained.append(batch["input_ids"][:, 0].tolist())
        return {"loss": float(len(self.trained))}


class Long(Short):
    def generate(self, data, greedy=False, *, sampling=None):
        self.asked = greedy, sampling
        return sampled(data.size) | {"weight_version": torch.full((data.size,), 9)}

    def train(
        self,
        data,
        loss_fn,
        eval_mode=False,
        *,
        global_batch_size=None,
        micro_batch_size=None,
        timer=None,
    ):
        self.trained.append((data.size, eval_mode, global_batch_size))
        steps = torch.ones(data.size // (global_batch_size or data.size))
        return {"loss": steps, "all_mb_metrics": {"entropy": [0.5]}}

    def get_logprobs(self, data, *, timer=None):
        return "own"


def test_one_call_per_optimizer_step_and_a_version_for_each():
    short = Short()
    policy = OwnPolicy(short, OWN)
    assert policy.generate(rows(3))["weight_version"].tolist() == [0, 0, 0]
    output = policy.train(rows(6), None, global_batch_size=2, timer=object())
    assert short.trained == [[0, 1], [2, 3], [4, 5]]
    assert output == {"loss": output["loss"], "all_mb_metrics": {}}
    assert output["loss"].tolist() == [1.0, 2.0, 3.0]
    assert policy.weight_version == 3
    assert policy.generate(rows(1))["weight_version"].tolist() == [3]


def test_what_a_policy_takes_is_passed_on():
    long = Long()
    policy = OwnPolicy(long, OWN)
    output = policy.train(rows(6), None, global_batch_size=2)
    assert output["loss"].tolist() == [1.0, 1.0, 1.0]
    assert output["all_mb_metrics"] == {"entropy": [0.5]}
    policy.train(rows(2), None, True)
    assert long.trained == [(6, False, 2), (2, True, None)]
    assert policy.weight_version == 3
    other = SamplingParams(0.5)
    result = policy.generate(rows(2), True, sampling=other)
    assert long.asked == (True, other)
    assert result["weight_version"].tolist() == [9, 9]
    assert policy.get_logprobs(rows(1)) == "own"
    assert policy.trained is long.trained


def test_settings_that_a_policy_cannot_take_are_refused():
    policy = OwnPolicy(Short(), OWN)
    policy.generate(rows(1), sampling=OWN)  # its own sampling settings
    with pytest.raises(UnsupportedModelError, match=r"Short.generate takes no greedy"):
        policy.generate(rows(1), True)
    with pytest.raises(UnsupportedModelError, match=r"takes no sampling.*val_top_p"):
        policy.generate(rows(1), sampling=SamplingParams(0.5))
    with pytest.raises(UnsupportedModelError, match=r"Short.train takes no eval_mode"):
        policy.train(rows(1), None, True)


def test_wrong_results_are_named():
    short = Short()
    policy = OwnPolicy(short, OWN)
    short.train = lambda batch, loss_fn: None
    with pytest.raises(BatchError, match=r"Short.train must return .*got NoneType"):
        policy.train(rows(1), None)
    short.generate = lambda batch: sampled(2)
    with pytest.raises(BatchError, match="a row for each row: got 2 for 3"):
        policy.generate(rows(3))


def test_who_samples_itself():
    class Sender(Short):
        def start_weight_export(self, request, link=None):
            raise AssertionError

    class TrainsOnly(PolicyInterface):
        def train(self, batch, loss_fn):
            return {"loss": 0.0}

    assert samples_itself(Short())
    assert not samples_itself(Sender())
    assert not samples_itself(TrainsOnly())
