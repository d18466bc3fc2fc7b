"""Policy, generator, environment and data work together through their interfaces."""

import sys

from rl_algorithms import BatchedDataLoader
from rl_distributed import RayVirtualCluster
from rl_envs import FunctionalRewardWrapper
from rl_models import GenerationConfig, GenerationPolicy, HuggingFacePolicy

dataset = [{"prompt": f"{n % 10}:", "answer": "7"} for n in range(640)]


def share_of_sevens(prompt: str, response: str) -> float:
    return response.count("7") / 4


cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2)
policy = HuggingFacePolicy(
    model_name=sys.argv[1],
    optimizer={"kwargs": {"lr": 1e-2}},
    scheduler={"name": "constant"},
)
generator = GenerationPolicy(
    cluster,
    GenerationConfig(backend="huggingface", max_new_tokens=4, num_replicas=1),
    model_name=sys.argv[1],
)
generator.follow(policy)
environment = FunctionalRewardWrapper(share_of_sevens)
dataloader = BatchedDataLoader(dataset)

means = []
for batch in dataloader:
    generations = generator.generate(batch)
    rewards = environment.step(generations)
    policy.train(generations, rewards)
    means.append(rewards.rewards.mean().item())
generator.shutdown()
policy.shutdown()
cluster.shutdown()
