"""A training loop of one's own, of the parts that the trainers are made of.

    python examples/own_loop.py MODEL_FOLDER

It is GRPO at its plainest: sample a group of answers to each prompt, reward them, train
on how much better than its group each answer is, and hand the new weights on.
"""

from __future__ import annotations

import sys

import torch

from rl_algorithms import BatchedDataLoader, ClippedPGLossConfig, ClippedPGLossFn
from rl_algorithms.data import process_prompts
from rl_distributed import BatchedDataDict, RayVirtualCluster, init_ray
from rl_envs import FunctionalRewardWrapper
from rl_models import (
    GenerationConfig,
    GenerationPolicy,
    HuggingFacePolicy,
    WeightSynchronizer,
)
from rl_models.tokens.tokenizer import load_tokenizer

GROUP = 8


def reward(prompt: str, response: str) -> float:
    """The share of sevens."""
    return response.count("7") / max(len(response), 1)


def main(model: str) -> list[float]:
    """Train for one pass over the prompts; returns the mean reward of each step."""
    init_ray(num_cpus=2)
    cluster = RayVirtualCluster([1], use_gpus=False)
    policy = HuggingFacePolicy(
        model_name=model, cluster=cluster, optimizer={"kwargs": {"lr": 3e-3}}
    )
    generator = GenerationPolicy(
        cluster, GenerationConfig(max_new_tokens=6), model_name=model
    )
    sync = WeightSynchronizer(policy, generator)
    environment = FunctionalRewardWrapper(reward)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    tokenizer = load_tokenizer(model)
    dataset = process_prompts([{"prompt": f"{n} "} for n in range(320)], tokenizer)

    means = []
    for batch in BatchedDataLoader(dataset, batch_size=16, shuffle=True):
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
        means.append(float(rewards.mean()))
    generator.shutdown()
    policy.shutdown()
    cluster.shutdown()
    return means


if __name__ == "__main__":
    rewards = main(sys.argv[1])
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
