import sys

import torch

from rl_distributed import BatchedDataDict
from rl_models import HuggingFacePolicy

policy = HuggingFacePolicy(model_name=sys.argv[1])
policy_hf = HuggingFacePolicy(sys.argv[1])
batch = BatchedDataDict(
    input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]), input_lengths=torch.tensor([3, 2])
)

generations = policy_hf.generate(batch)  # Same API
