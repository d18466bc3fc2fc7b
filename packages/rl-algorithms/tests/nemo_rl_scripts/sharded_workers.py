"""A script written for NeMo RL: a worker group with named axes, as policies use."""

import json
import os
import sys

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import (
    ACTOR_ENVIRONMENT_REGISTRY,
    get_actor_python_env,
)
from nemo_rl.distributed.virtual_cluster import (
    PY_EXECUTABLES,
    RayVirtualCluster,
    init_ray,
)
from nemo_rl.distributed.worker_groups import (
    MultiWorkerFuture,
    RayWorkerBuilder,
    RayWorkerGroup,
)

WORKER = "sharded_module.ShardedWorker"
ACTOR_ENVIRONMENT_REGISTRY[WORKER] = PY_EXECUTABLES.SYSTEM
cluster_config = {"gpus_per_node": 4, "num_nodes": 1, "segment_size": None}


def summed(data):
    return float(data["x"].sum())


class ToyPolicy:
    """Shards batches over `data_parallel`, replicates them over `tensor_parallel`."""

    def __init__(self, cluster, config):
        self.sharding_annotations = NamedSharding(
            layout=[[0, 1], [2, 3]], names=["data_parallel", "tensor_parallel"]
        )
        self.worker_group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(WORKER, config),
            name_prefix="lm_policy",
            sharding_annotations=self.sharding_annotations,
        )

    def train(self, data, gbs):
        dp_size = self.sharding_annotations.get_axis_size("data_parallel")
        sharded: list[SlicedDataDict] = data.shard_by_batch_size(
            dp_size, batch_size=gbs
        )
        futures: MultiWorkerFuture = self.worker_group.run_all_workers_sharded_data(
            "train",
            data=sharded,
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=["tensor_parallel"],
            output_is_replicated=["tensor_parallel"],
            common_kwargs={"loss_fn": summed, "gbs": gbs},
        )
        return self.worker_group.get_all_worker_results(futures)

    def get_logprobs(self, data):
        sharded, unsorted = data.shard_by_batch_size(
            self.sharding_annotations.get_axis_size("data_parallel"),
            batch_size=None,
            dynamic_batching_args={
                "max_tokens_per_microbatch": 8,
                "sequence_length_round": 2,
                "input_key": "x",
                "input_lengths_key": "lengths",
            },
        )
        futures = self.worker_group.run_all_workers_sharded_data(
            "get_logprobs",
            data=sharded,
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=["tensor_parallel"],
            output_is_replicated=["tensor_parallel"],
        )
        logprobs = BatchedDataDict.from_batches(
            self.worker_group.get_all_worker_results(futures)
        )
        logprobs.reorder_data(unsorted)
        return logprobs


def tied(cluster, folder):
    """Tied groups of two workers and of one, each with a leader, as in vLLM."""
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(WORKER, {"goodbye": folder}),
        name_prefix="vllm",
        bundle_indices_list=[(0, [0, 1]), (0, [2])],
    )
    leaders = [group.get_dp_leader_worker_idx(i) for i in range(group.dp_size)]
    found = {
        "dp_size": group.dp_size,
        "leaders": leaders,
        "described": ray.get(group.run_all_workers_single_data("describe")),
        "one": ray.get(group.run_single_worker_single_data("describe", leaders[1])),
    }
    found["clean"] = group.shutdown(cleanup_method="cleanup", timeout=30.0)
    return found


def main(folder):
    init_ray(log_dir=f"{folder}/ray_logs")
    cluster = RayVirtualCluster(
        bundle_ct_per_node_list=[cluster_config["gpus_per_node"]],
        use_gpus=False,
        num_gpus_per_node=cluster_config["gpus_per_node"],
        max_colocated_worker_groups=2,
        name="grpo_policy_cluster",
        port_range_low=cluster_config.get("master_port_range_low"),
        port_range_high=cluster_config.get("master_port_range_high"),
        segment_size=cluster_config["segment_size"],
    )
    policy = ToyPolicy(cluster, {"scale": 2, "nested": {"b": 2}})
    group = policy.worker_group
    batch = BatchedDataDict(
        {
            "idx": torch.arange(8),
            "x": torch.arange(8.0).repeat(3, 1).T.contiguous(),
            "lengths": torch.tensor([3, 1, 2, 3, 1, 2, 3, 1]),
        }
    )
    sharding = policy.sharding_annotations
    free = group.run_all_workers_sharded_data(
        "train",
        data=batch.shard_by_batch_size(2),
        in_sharded_axes=["data_parallel"],
        make_dummy_calls_to_free_axes=True,
        common_kwargs={"loss_fn": summed, "factor": 10},
    )
    nested = [
        [batch.slice(2 * (2 * dp + tp), 2 * (2 * dp + tp) + 2) for tp in range(2)]
        for dp in range(2)
    ]
    each = group.run_all_workers_sharded_data(
        "train",
        data=nested,
        in_sharded_axes=["data_parallel", "tensor_parallel"],
        common_kwargs={"loss_fn": summed},
    )
    found = {
        "train": policy.train(batch, gbs=4),
        "free": free.get_results(group),
        "free_called": [ray.get(ref) for ref in free.futures],
        "each": each.get_results(group),
        "logprobs": {
            key: value.tolist() for key, value in policy.get_logprobs(batch).items()
        },
        "where": ray.get(
            group.run_all_workers_single_data(
                "where", sharding=sharding, name="tensor_parallel"
            )
        ),
        "first_of_tensor": ray.get(
            group.run_all_workers_single_data(
                "describe", run_rank_0_only_axes=["tensor_parallel"]
            )
        ),
        "multiple": ray.get(
            group.run_all_workers_multiple_data(
                "where",
                name=["data_parallel", "tensor_parallel"],
                run_rank_0_only_axes=["tensor_parallel"],
                common_kwargs={"sharding": sharding},
            )
        ),
        "described": ray.get([w.describe.remote() for w in group.workers]),
        "by_place": ray.get(group.workers[3].where.remote(sharding, "data_parallel")),
        "shape": sharding.shape,
        "ranks": sharding.get_ranks(tensor_parallel=1).layout.tolist(),
        "env": get_actor_python_env(WORKER) == sys.executable,
        "world_size": cluster.world_size(),
        "nodes": cluster.node_count(),
        "bundles": [len(g.bundle_specs) for g in cluster.get_placement_groups()],
        "address": cluster.get_master_address_and_port(),
        "tied": tied(cluster, folder),
    }
    group.shutdown()
    cluster.shutdown()
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    os.environ["DRIVER_SAID"] = "hello"
    os.environ["DRIVER_API_KEY"] = "not-for-workers"
    main(sys.argv[1])
