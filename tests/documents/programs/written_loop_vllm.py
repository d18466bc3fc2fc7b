"""The loop in the documentation verbatim, with vLLM and mathematics."""

import sys

from rl_algorithms import BatchedDataLoader
from rl_distributed import RayVirtualCluster
from rl_envs import MathEnvironment
from rl_models import GenerationConfig, HuggingFacePolicy, PolicyConfig, VllmGeneration

dataset = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(6)]
cluster = RayVirtualCluster([1], use_gpus=False)
config = PolicyConfig(
    model_name=sys.argv[1],
    generation=GenerationConfig(
        max_new_tokens=8, vllm={"kv_cache_gib": 0.125, "max_num_seqs": 16}
    ),
)

# Example: Composing a training pipeline
policy = HuggingFacePolicy(model_name=sys.argv[1])
generator = VllmGeneration(cluster, config)
generator.follow(policy)
environment = MathEnvironment()
dataloader = BatchedDataLoader(dataset, batch_size=3)

# All components work together through interfaces
versions = []
for batch in dataloader:
    generations = generator.generate(batch)
    rewards = environment.step(generations)
    policy.train(generations, rewards)
    versions.append(generations["weight_version"].tolist())
generator.shutdown()
policy.shutdown()
cluster.shutdown()
