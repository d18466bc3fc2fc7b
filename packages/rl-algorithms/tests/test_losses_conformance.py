"""Each variant of the policy loss against its paper: value, gradient, properties."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from rl_algorithms.losses import ClippedPGLossFn
from rl_algorithms.ppo.rows import add_nll_weights
from rl_algorithms.testing import ConformanceError, check_loss, token_batch
from rl_distributed.batch.batched_data_dict import BatchedDataDict

_spec = importlib.util.spec_from_file_location(
    "policy_reference", Path(__file__).with_name("policy_reference.py")
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

SEQUENCE = {"token_level_loss": False}
CORRECTION = {"use_importance_sampling_correction": True}
KL = {"reference_policy_kl_penalty": 0.1}
VARIANTS = {
    "ppo": {},
    "grpo": {**SEQUENCE, **KL, "reference_policy_kl_gradient": "direct"},
    "dapo": {"ratio_clip_max": 0.28},
    "drgrpo": {**SEQUENCE, "fixed_length_normalizer": 7},
    "gspo": {**SEQUENCE, "sequence_level_importance_ratios": True},
    "cispo": {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.3},
    "rloo": {**SEQUENCE, "disable_ppo_ratio": True, "fixed_length_normalizer": 1},
    "on_policy": {"force_on_policy_ratio": True},
    "dual_clip": {"ratio_clip_c": 1.1},
    "k1": {**KL, "reference_policy_kl_type": "k1"},
    "k2": {**KL, "reference_policy_kl_type": "k2"},
    "k3": {**KL, "reference_policy_kl_type": "k3"},
    "kl_of_the_sampler": {**KL, "use_on_policy_kl_approximation": True},
    "entropy": {"entropy_coef": 0.3},
    "correction": CORRECTION,
    "tis": {
        **CORRECTION,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.1,
    },
    "icepop": {
        **CORRECTION,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
    "seq_mask_tis": {
        **CORRECTION,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "gspo_correction": {
        **CORRECTION,
        **SEQUENCE,
        "sequence_level_importance_ratios": True,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_is_its_papers(name):
    settings = {"reference_policy_kl_penalty": 0.0, **VARIANTS[name]}
    check_loss(
        ClippedPGLossFn(settings),
        token_batch,
        _module.reference(settings),
        # Without them: on-policy, and no mismatch report.
        optional=["prev_logprobs"],
        num_examples=6,
    )


def batch_with_successes(seed):
    """Return rows of which about half succeeded, weighted as PPO weights them."""
    batch = token_batch(seed)
    drawn = torch.randn(batch.num_rows, generator=torch.Generator().manual_seed(seed))
    rows = BatchedDataDict({**batch.data, "rewards": drawn.double()})
    add_nll_weights(rows, 0.0, batch.num_rows)
    return batch.replaced(rewards=rows["rewards"], nll_weights=rows["nll_weights"])


def test_the_likelihood_of_successes_is_its_papers():
    settings = {"reference_policy_kl_penalty": 0.0, "positive_nll_coef": 0.3}
    check_loss(
        ClippedPGLossFn(settings),
        batch_with_successes,
        _module.reference(settings),
        optional=["prev_logprobs"],
        num_examples=6,
    )


class WeighsInTheMicroBatch(ClippedPGLossFn):
    """Takes the success rate from the micro-batch alone."""

    def __call__(self, data, global_valid_seqs, global_valid_toks, **inputs):
        rows = BatchedDataDict(data)
        add_nll_weights(rows, 0.0, len(data["rewards"]))
        return super().__call__(rows, global_valid_seqs, global_valid_toks, **inputs)


def test_successes_of_the_micro_batch_alone_are_caught():
    settings = {"reference_policy_kl_penalty": 0.0, "positive_nll_coef": 0.3}
    with pytest.raises(ConformanceError) as caught:
        check_loss(
            WeighsInTheMicroBatch(settings),
            batch_with_successes,
            _module.reference(settings),
            checks=["micro_batches"],
        )
    assert caught.value.check == "micro_batches"
