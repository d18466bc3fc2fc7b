"""A script written for NeMo RL: losses of one global batch, in micro-batches."""

import json
import math
import sys

import torch
from nemo_rl.algorithms.interfaces import LossFunction, LossType
from nemo_rl.algorithms.loss import (
    ClippedPGLossConfig,
    ClippedPGLossDataDict,
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    MseValueLossFn,
    NLLLossFn,
    PreferenceLossFn,
)
from nemo_rl.algorithms.utils import (
    calculate_baseline_and_std_per_prompt,
    calculate_kl,
    masked_mean,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

NUM_PROMPTS, PER_PROMPT, WIDTH, VOCAB = 2, 4, 7, 11

# The section loss_fn of grpo_math_1B.yaml, key by key.
BASE: ClippedPGLossConfig = {
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
    "use_kl_in_reward": False,
    "use_cispo": False,
    "disable_ppo_ratio": False,
    "positive_example_nll_weight": 0.0,
}
TIS = {"use_importance_sampling_correction": True}
VARIANTS = {
    "ppo": {},
    "dapo": {"ratio_clip_max": 0.28},
    "dual_clip": {"ratio_clip_c": 1.5},
    "per_sequence": {"token_level_loss": False},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "cispo": {"use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "on_policy": {"force_on_policy_ratio": True},
    "corrected": TIS,
    "tis": {
        **TIS,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.2,
    },
    "icepop": {
        **TIS,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.5,
        "truncated_importance_sampling_ratio_min": 0.6,
    },
    "kl_k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
    "kl_k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    "kl_k3": {"reference_policy_kl_penalty": 0.1},
}


def near_uniform(rows, generator):
    return 0.4 * torch.randn(rows, WIDTH, generator=generator) - math.log(VOCAB)


def make_batch(generator):
    rows = NUM_PROMPTS * PER_PROMPT
    prompts = torch.arange(NUM_PROMPTS).repeat_interleave(PER_PROMPT)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.5])
    baseline, std = calculate_baseline_and_std_per_prompt(
        prompts.unsqueeze(-1), rewards, torch.ones(rows), leave_one_out_baseline=True
    )
    advantages = (rewards - baseline) / (std + 1e-6)
    lengths = torch.tensor([7, 5, 6, 4, 7, 3, 5, 6])
    places = torch.arange(WIDTH)
    batch: BatchedDataDict[ClippedPGLossDataDict] = BatchedDataDict(
        {
            "input_ids": torch.randint(0, VOCAB, (rows, WIDTH), generator=generator),
            "advantages": advantages.unsqueeze(-1).expand(-1, WIDTH).clone(),
            "prev_logprobs": near_uniform(rows, generator),
            "generation_logprobs": near_uniform(rows, generator),
            "reference_policy_logprobs": near_uniform(rows, generator),
            "token_mask": ((places >= 2) & (places < lengths[:, None])).float(),
            "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        }
    )
    return batch, rewards, baseline, std


def counts_of(batch):
    sample_mask = batch["sample_mask"]
    tokens = (batch["token_mask"][:, 1:] * sample_mask[:, None]).sum()
    return {"global_valid_seqs": sample_mask.sum(), "global_valid_toks": tokens}


def in_micro_batches(loss_fn: LossFunction, batch, logits, size):
    """Return losses and metrics summed over micro-batches, as in a worker's loop."""
    counts = counts_of(batch)
    batch["logits"] = logits
    total, metrics = 0.0, {}
    for rows in batch.make_microbatch_iterator(size):
        logprobs = torch.log_softmax(rows["logits"][:, :-1], dim=-1)
        taken = logprobs.gather(-1, rows["input_ids"][:, 1:, None]).squeeze(-1)
        loss, found = loss_fn(data=rows, next_token_logprobs=taken, **counts)
        loss.backward()
        total += loss.item()
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value
    del batch["logits"]
    return total, metrics


def pairs(batch):
    """Return rows as chosen, rejected, chosen, ...; the column as NeMo RL builds it."""
    reference = batch["reference_policy_logprobs"].clone()
    reference[:, 0] = 0.0
    return {
        **batch,
        "reference_policy_logprobs": torch.roll(reference, -1, dims=-1),
        "sample_mask": torch.ones(len(reference)),
    }


def other_losses(batch, logits, generator):
    counts = counts_of({**batch, "sample_mask": torch.ones(len(logits))})
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
    taken = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1).detach()
    found = {"taken": taken.tolist()}
    every = pairs(batch)
    found["nll"] = NLLLossFn()(taken, every, **counts)[0].item()
    dpo = {
        "reference_policy_kl_penalty": 0.3,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.2,
        "preference_average_log_probs": False,
        "sft_average_log_probs": True,
    }
    loss, metrics = DPOLossFn(dpo)(taken, every, **counts)
    found["dpo"], found["dpo_metrics"] = loss.item(), metrics
    scores = torch.randn(len(logits), 1, generator=generator)
    loss, metrics = PreferenceLossFn()(scores, every, **counts)
    found["scores"], found["preference"] = scores.tolist(), loss.item()
    found["preference_metrics"] = metrics
    values = torch.randn(len(logits), WIDTH, generator=generator)
    returns = torch.randn(len(logits), WIDTH, generator=generator)
    critic = {**batch, "returns": returns, "values": values - 0.3}
    loss, _ = MseValueLossFn({"scale": 0.5, "cliprange": 0.2})(
        data=critic, logits=values, **counts_of(batch)
    )
    found |= {"values": values.tolist(), "returns": returns.tolist()}
    found["value_loss"] = loss.item()
    teacher = torch.randn(*logits.shape, generator=generator)[:, :-1]
    picked = teacher.topk(4, dim=-1)
    student = torch.log_softmax(logits[:, :-1].gather(-1, picked.indices), dim=-1)
    teacher = torch.log_softmax(picked.values, dim=-1)
    found |= {"student": student.tolist(), "teacher": teacher.tolist()}
    distillation = DistillationLossFn(
        {"kl_type": "mixed", "mixed_kl_weight": 0.25, "zero_outside_topk": False}
    )
    loss, _ = distillation(
        data=batch,
        student_topk_logprobs=student,
        teacher_topk_logprobs=teacher,
        H_all=None,
        **counts_of(batch),
    )
    found["distillation"] = loss.item()
    return found


def main(folder):
    generator = torch.Generator().manual_seed(3)
    batch, rewards, baseline, std = make_batch(generator)
    shape = (NUM_PROMPTS * PER_PROMPT, WIDTH, VOCAB)
    start = 0.5 * torch.randn(*shape, generator=generator)
    found = {
        "batch": {name: column.tolist() for name, column in batch.items()},
        "rewards": rewards.tolist(),
        "baseline": baseline.tolist(),
        "std": std.tolist(),
        "variants": {},
    }
    for name, changes in VARIANTS.items():
        loss_fn = ClippedPGLossFn({**BASE, **changes})
        logits = start.clone().requires_grad_()
        loss, metrics = in_micro_batches(loss_fn, batch, logits, 2)
        found["variants"][name] = {
            "config": {**BASE, **changes},
            "token_level": loss_fn.loss_type == LossType.TOKEN_LEVEL,
            "loss": loss,
            "metrics": metrics,
            "gradient": logits.grad.norm().item(),
        }
    found |= other_losses(batch, start, generator)
    found["logits"] = start.tolist()
    first, second = torch.tensor([-1.0]), torch.tensor([-2.0])
    found["kl"] = {
        kind: calculate_kl(first, second, kl_type=kind).item()
        for kind in ("k1", "k2", "k3")
    }
    weights = torch.tensor([2.0])
    found["kl_weighted"] = calculate_kl(
        first, second, "k3", importance_sampling_weights=weights
    ).item()
    found["masked_mean"] = masked_mean(
        torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
        torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        global_normalization_factor=torch.tensor(6.0),
    ).item()
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
