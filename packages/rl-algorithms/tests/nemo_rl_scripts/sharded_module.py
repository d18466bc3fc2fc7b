"""The worker of `sharded_workers.py`: imported in the worker's own process."""

import os

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.worker_group_utils import recursive_merge_options


@ray.remote
class ShardedWorker:
    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        resources, env_vars, init_kwargs = {"num_gpus": num_gpus}, {}, {}
        if bundle_indices is not None and len(bundle_indices[1]) > 1:
            env_vars["IS_LEADER"] = "1"
            init_kwargs["bundle_indices"] = bundle_indices
        return resources, env_vars, init_kwargs

    def __init__(self, config, bundle_indices=None):
        self.config = recursive_merge_options({"scale": 1, "nested": {"a": 1}}, config)
        self.rank = int(os.environ["RANK"])
        self.bundle_indices = bundle_indices
        self.steps = []

    def describe(self):
        return {
            "rank": self.rank,
            "bundles": self.bundle_indices,
            "leads": os.environ.get("IS_LEADER"),
            "world": os.environ["WORLD_SIZE"],
            "config": self.config,
            "driver_said": os.environ.get("DRIVER_SAID"),
            "secret": os.environ.get("DRIVER_API_KEY"),
        }

    def train(self, data: BatchedDataDict, loss_fn, gbs=None, factor=1):
        # A dummy call on a free axis carries no data.
        if data is None:
            return {"rank": self.rank, "idle": True}
        self.steps.append(int(data.size))
        value = loss_fn(data) * factor * self.config["scale"]
        return {
            "rank": self.rank,
            "gbs": gbs,
            "ids": data["idx"].tolist(),
            "loss": value,
        }

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        shifted = torch.zeros_like(data["x"])
        shifted[:, 1:] = -data["x"][:, 1:] * self.config["scale"]
        return BatchedDataDict({"logprobs": shifted, "idx": data["idx"]})

    def where(self, sharding: NamedSharding, name):
        return [sharding.get_worker_coords(self.rank)[name], len(self.steps)]

    def stream(self, count):
        for index in range(count):
            yield self.rank * 100 + index

    def cleanup(self):
        if path := self.config.get("goodbye"):
            with open(f"{path}/goodbye-{self.rank}", "w") as file:
                file.write(str(self.steps))
        return True
