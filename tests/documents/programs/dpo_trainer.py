import sys

from rl_algorithms import DPOTrainer
from rl_distributed import RayVirtualCluster
from rl_models import HuggingFacePolicy

dataset = [{"prompt": f"{n} ", "chosen": "yes", "rejected": "no"} for n in range(32)]

# Set up distributed environment
cluster = RayVirtualCluster([4])  # 4 GPUs
policy = HuggingFacePolicy(sys.argv[1])

# Create trainer
trainer = DPOTrainer(policy, cluster)

# Start training
trainer.train(dataset)
