"""Optional attributes of losses, policies and generators, with their defaults."""

from __future__ import annotations

from rl_models.loss_traits import LossTraits
from rl_models.model_traits import GeneratorTraits, PolicyTraits
from rl_models.types import LossInputType


def test_a_plain_function_is_a_loss_of_log_probs():
    def loss(data, global_valid_seqs, global_valid_toks, **inputs):
        return inputs["next_token_logprobs"].sum(), {}

    assert LossTraits.of(loss) == LossTraits(LossInputType.LOGPROB, 1, False)


def test_a_wrapper_passes_on_what_the_wrapped_loss_declares():
    class OfPairs:
        input_type = LossInputType.VALUE
        rows_per_group = 2

    class Wrapper:
        def __getattr__(self, name):
            return getattr(OfPairs, name)

    assert LossTraits.of(Wrapper()) == LossTraits(LossInputType.VALUE, 2, False)


def test_models_that_declare_nothing_have_the_defaults():
    assert PolicyTraits.of(object()) == PolicyTraits(None, None, True)
    assert GeneratorTraits.of(None) == GeneratorTraits(None, 1)

    class Policy:
        num_ranks = 4
        has_reference = False

    assert PolicyTraits.of(Policy()) == PolicyTraits(None, 4, False)
