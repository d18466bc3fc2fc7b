"""A script written for NeMo RL: Ray-decorated workers on a virtual cluster."""

import json
import os
import sys

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import (
    ACTOR_ENVIRONMENT_REGISTRY,
)
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

NAME = "worker_module.Adder"


def main(folder):
    ACTOR_ENVIRONMENT_REGISTRY[NAME] = PY_EXECUTABLES.SYSTEM
    cluster = RayVirtualCluster(
        bundle_ct_per_node_list=[2], use_gpus=False, max_colocated_worker_groups=1
    )
    sharding = NamedSharding(layout=[[0], [1]], names=["data_parallel", "tensor"])
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(NAME, 10, scale=2),
        name_prefix="adders",
        sharding_annotations=sharding,
        env_vars={"COLOUR": "green"},
    )
    batch = BatchedDataDict({"values": torch.arange(8)})
    shards = batch.shard_by_batch_size(2, batch_size=4)
    future = group.run_all_workers_sharded_data(
        "add", in_sharded_axes=["data_parallel"], data=shards
    )
    sums = group.get_all_worker_results(future)
    refs = [w.add.remote(data=shards[0]) for w in group.workers]
    names = ray.get(group.run_all_workers_single_data("place"))
    found = {
        "shards": [s["values"].tolist() for s in shards],
        "sums": sums,
        "by_handle": ray.get(refs),
        "by_place": ray.get(group.workers[1].add.remote(ray.put(shards[1]))),
        "names": names,
        "master": [group.master_address, str(group.master_port)],
        "parallel": ray.get(group.workers[0].wait_for_each_other.remote()),
        "driver": os.getpid(),
    }
    assert group.shutdown()
    cluster.shutdown()
    ray.shutdown()
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
