import sys

import torch

from rl_distributed import BatchedDataDict, RayVirtualCluster
from rl_models import MegatronPolicy, get_training_backend

backend = get_training_backend("megatron")
cluster = RayVirtualCluster([1], use_gpus=False)
policy = MegatronPolicy(model_name=sys.argv[1], cluster=cluster)
batch = BatchedDataDict(
    input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]), input_lengths=torch.tensor([3, 2])
)

generations = policy.generate(batch)  # Same API
