import os

from rl_distributed import RayVirtualCluster, RayWorkerGroup


class Worker:
    def rank(self):
        return int(os.environ["RANK"]), os.getpid()


policy_class = Worker

# Single GPU
cluster = RayVirtualCluster([1])  # 1 GPU

# Multi-GPU
large_cluster = RayVirtualCluster([8, 8])  # 2 nodes, 8 GPUs each

# Same code works at any scale
worker_group = RayWorkerGroup(cluster, policy_class)
