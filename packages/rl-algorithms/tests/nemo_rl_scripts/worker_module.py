"""The worker of `workers.py`: imported in the worker's own process."""

import os

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@ray.remote(max_restarts=0, runtime_env={"env_vars": {"FRUIT": "pear"}})
class Adder:
    def __init__(self, start, scale=1):
        self.start, self.scale = start, scale

    def add(self, data: BatchedDataDict) -> int:
        return self.start + self.scale * int(data["values"].sum())

    def place(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLOUR", "FRUIT")
        return {"pid": os.getpid(), **{name: os.environ[name] for name in names}}

    def wait_for_each_other(self) -> str:
        return type(self).__name__
