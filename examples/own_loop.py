"""A training loop of one's own, of the parts that the trainers are made of.

    python examples/own_loop.py MODEL_FOLDER

It is GRPO at its plainest: sample a group of answers to each sum, judge them, train on
how much better than its group each answer is, and hand the new weights on. vLLM runs in
an environment of its own, which the first run builds
(`rl env build rl_models.generation.vllm`).
"""

from __future__ import annotations

import sys

import torch

from rl_algorithms import BatchedDataLoader, ClippedPGLossConfig, ClippedPGLossFn
from rl_algorithms.data import process_prompts
from rl_distributed import BatchedDataDict, RayVirtualCluster, init_ray
from rl_envs import MathEnvironment
from rl_models import (
    GenerationConfig,
    HuggingFacePolicy,
    PolicyConfig,
    VllmConfig,
    VllmGeneration,
    WeightSynchronizer,
)
from rl_models.tokens.tokenizer import load_tokenizer

GROUP = 16
SUMS = [{"prompt": f"{n % 8}+{7 - n % 8}=", "ground_truth": "7"} for n in range(160)]


def main(model: str) -> list[float]:
    """Train for one pass over the sums; returns the share of right answers by step."""
    init_ray(num_cpus=2)
    config = PolicyConfig(
        model_name=model,
        generation=GenerationConfig(
            max_new_tokens=1, vllm=VllmConfig(kv_cache_gib=0.125)
        ),
    )
    cluster = RayVirtualCluster([1])
    policy = HuggingFacePolicy(
        model_name=model, cluster=cluster, optimizer={"kwargs": {"lr": 1e-2}}
    )
    generator = VllmGeneration(cluster, config)
    environment = MathEnvironment()
    sync = WeightSynchronizer(policy, generator)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    tokenizer = load_tokenizer(model)
    dataset = process_prompts(SUMS, tokenizer)

    shares = []
    for batch in BatchedDataLoader(dataset, batch_size=8):
        sync.sync_weights()
        prompts = batch.repeat_interleave(GROUP)
        generations = generator.generate(prompts)

        lengths, ids = (
            generations["unpadded_sequence_lengths"],
            generations["output_ids"],
        )
        position = torch.arange(ids.shape[1])
        first = prompts["input_lengths"].unsqueeze(1)
        sampled = (position >= first) & (position < lengths.unsqueeze(1))
        texts = [
            tokenizer.decode(row[mask]) for row, mask in zip(ids, sampled, strict=True)
        ]
        logs = [
            [*log, {"role": "assistant", "content": text}]
            for log, text in zip(prompts["message_log"], texts, strict=True)
        ]
        rewards = environment.step(logs, prompts["extra_env_info"]).rewards

        groups = rewards.view(-1, GROUP)
        deviation = groups.std(dim=1, keepdim=True) + 1e-6
        advantages = (groups - groups.mean(dim=1, keepdim=True)) / deviation
        rows = BatchedDataDict(
            input_ids=ids,
            input_lengths=lengths,
            token_mask=sampled.float(),
            sample_mask=torch.ones(len(ids)),
            generation_logprobs=generations["logprobs"],
            advantages=advantages.flatten(),
        )
        policy.train(rows, loss_fn)
        sync.mark_stale()
        shares.append(float(rewards.mean()))
    environment.shutdown()
    generator.shutdown()
    policy.shutdown()
    cluster.shutdown()
    return shares


if __name__ == "__main__":
    shares = main(sys.argv[1])
    print(f"right answers {shares[0]:.2f} -> {shares[-1]:.2f}")
