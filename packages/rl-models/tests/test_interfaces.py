"""Errors of a policy of few methods when more is requested of it."""

from __future__ import annotations

import pytest

from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import PolicyInterface


class TwoMethods(PolicyInterface):
    def generate(self, batch):
        return batch

    def train(self, batch, loss_fn):
        return loss_fn(batch)


class TrainOnly(PolicyInterface):
    def train(self, batch, loss_fn):
        return loss_fn(batch)


@pytest.mark.parametrize(
    ("method", "arguments", "remedy"),
    [
        ("get_logprobs", ({},), "several optimizer steps per batch"),
        ("get_reference_policy_logprobs", ({},), "set the penalty to 0"),
        ("get_values", ({},), "such as TrainingPolicy"),
        ("get_topk_logits", ({}, 4), "such as TrainingPolicy"),
        ("save_checkpoint", ("folder",), "checkpointing.enabled=false"),
        ("load_checkpoint", ("folder",), "instead of resuming"),
    ],
)
def test_missing_method_is_named_with_what_to_do(method, arguments, remedy):
    with pytest.raises(UnsupportedModelError, match=rf"{method}; .*{remedy}") as caught:
        getattr(TwoMethods(), method)(*arguments)
    assert str(caught.value).startswith(f"TwoMethods has no {method}; ")


def test_two_methods_make_a_policy():
    policy = TwoMethods()
    assert policy.generate([1]) == [1]
    assert policy.train([1, 2], sum) == 3
    policy.prepare_for_training()
    policy.finish_training()
    assert policy.shutdown()


def test_policy_that_only_trains_says_how_to_sample():
    with pytest.raises(UnsupportedModelError, match=r"no generate; .*GenerationPolicy"):
        TrainOnly().generate({})
    with pytest.raises(TypeError, match="train"):
        type("Neither", (PolicyInterface,), {})()
