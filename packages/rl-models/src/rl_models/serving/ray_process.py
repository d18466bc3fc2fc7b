"""One process of a replica as a Ray actor in the environment of its engine."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

import psutil
import ray

from rl_distributed.actor_environments import get_environment
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import DistributedError, WorkerStartError
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.group import RayWorkerGroup
from rl_distributed.workers.policy import FailFast
from rl_models.checkpoint.hub import hub_secrets
from rl_models.environments import has_gpu
from rl_models.generation.vllm.engine_args import engine_variables
from rl_models.serving.config import ENGINE, ServeConfig
from rl_models.serving.folder_weights import FolderWeights

__all__ = ["RayProcess", "engine_environment"]

logger = logging.getLogger(__name__)

_WORKERS = {
    "vllm": "rl_models.serving.replica.ServingReplica",
    "huggingface": "rl_models.serving.huggingface_replica.HuggingFaceReplica",
}
_KEY_VARIABLE = "RL_REPLICA_KEY"
# A start imports large libraries, some of which hold Python's lock for long.
_HEARTBEAT_S = 120.0
_STOP_S = 15.0


def engine_environment() -> Any:
    """Get the Python environment of replicas with vLLM, as its backend declares it."""
    return get_environment(ENGINE)


class RayProcess:
    """Starts, updates and ends one replica.

    Args:
        replica: Number of the replica.
        config: The server's settings.
        model: Folder or hub name.
        model_name: Name of the model in requests.
        key: The key that requests to the replica must have.
    """

    def __init__(
        self, replica: int, config: ServeConfig, model: str, model_name: str, key: str
    ) -> None:
        self._name = f"serve-{replica}"
        self._config = config
        self._on_gpu = has_gpu()
        # Settings that only one of the engines has.
        own = {
            "vllm": {
                "dtype": config.dtype,
                "on_gpu": self._on_gpu,
                "tool_call_parser": config.tool_call_parser,
            }
        }
        self._model = model
        self._settings = {
            "model": model,
            "model_name": model_name,
            "key_variable": _KEY_VARIABLE,
            **own.get(config.engine, {}),
        }
        self._key = key
        self._group: RayWorkerGroup | None = None
        self._cluster: RayVirtualCluster | None = None
        self._children: list[psutil.Process] = []
        self._process: psutil.Process | None = None

    @property
    def pid(self) -> int | None:
        """Its number on this machine, once it is up."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Start it; return the URL of its server."""
        generation = self._config.generation()
        is_vllm = self._config.engine == "vllm"
        variables = engine_variables(generation, on_gpu=self._on_gpu) if is_vllm else {}
        variables[_KEY_VARIABLE] = self._key
        variables |= hub_secrets(self._model)
        worker = _WORKERS[self._config.engine]
        builder = RayWorkerBuilder(worker, generation.to_dict(), **self._settings)
        builder = builder.with_options(
            environment=engine_environment() if is_vllm else None,
            env_vars=variables,
            num_threads=self._config.num_threads,
        )
        deadline_s = self._config.start_deadline_s
        end = time.monotonic() + deadline_s
        self._cluster = RayVirtualCluster([1], use_gpus=self._on_gpu, name=self._name)
        self._group = RayWorkerGroup(
            self._cluster,
            builder,
            name_prefix=self._name,
            start_deadline_s=deadline_s,
            failure_policy=FailFast(heartbeat_limit_s=_HEARTBEAT_S),
        )
        if not self._is_local():
            raise WorkerStartError(
                f"{self._name} was placed on another machine, where its server would "
                "have to listen on the network; start the server on the node that has "
                "the processors or GPUs"
            )
        left_s = max(1.0, end - time.monotonic())
        said = self._call("start", left_s, deadline_s=left_s)
        for pid in said["pids"]:
            with suppress(psutil.NoSuchProcess):
                self._children.append(psutil.Process(pid))
        self._process = psutil.Process(self._group.worker_pids[0])
        return f"http://127.0.0.1:{said['port']}"

    def load_weights(self, weights: FolderWeights, version: int) -> str:
        """Load weights; return the problem, or an empty string."""
        deadline_s = self._config.update_deadline_s
        said = self._call(
            "load_weights",
            deadline_s,
            folder=weights.folder,
            entries=weights.to_plain(),
            version=version,
            deadline_s=deadline_s,
        )
        return str(said)

    def stop(self, *, at_once: bool) -> None:
        """End it and all that it has started."""
        if at_once and self._process is not None:
            # A process that hangs would keep its connections open, and its clients
            # waiting, until Ray ends it.
            with suppress(psutil.NoSuchProcess):
                self._process.kill()
        try:
            if self._group is not None:
                self._group.shutdown("stop", _STOP_S, force=at_once)
        except DistributedError as error:
            logger.warning("%s did not end cleanly: %s", self._name, error)
        finally:
            # The engine's processes outlive a parent that was killed.
            for child in self._children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            if self._cluster is not None and ray.is_initialized():
                self._cluster.shutdown()

    def _is_local(self) -> bool:
        assert self._group is not None
        own = ray.get_runtime_context().get_node_id()
        return all(seat.slot.node_id == own for seat in self._group.seats)

    def _call(self, method: str, wait_s: float, **arguments: Any) -> Any:
        assert self._group is not None
        future = self._group.run_all_workers_single_data(method, **arguments)
        # The worker's own deadline comes first, and its error says more.
        return self._group.get_all_worker_results(future, deadline_s=wait_s + 5.0)[0]
