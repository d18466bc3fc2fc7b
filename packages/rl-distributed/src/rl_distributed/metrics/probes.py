"""Probes that measure a node: processors, memory, GPUs and Ray's object store.

A probe is asked from the sampler's thread. Where there is nothing to measure it raises
`ProbeUnavailableError`, and is not asked again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import psutil

from rl_distributed.errors import DistributedError

__all__ = [
    "GpuProbe",
    "HostProbe",
    "ObjectStoreProbe",
    "Probe",
    "ProbeUnavailableError",
]


class ProbeUnavailableError(DistributedError):
    """There is nothing here for this probe to measure."""


class Probe(Protocol):
    """Measures one kind of thing."""

    def read(self) -> dict[str, float]:
        """Return the measurements of this moment, by names that end in their unit.

        Raises:
            ProbeUnavailableError: There is nothing to measure, now or later.
        """

    def close(self) -> None:
        """Release the resources of the probe."""


class HostProbe:
    """Processors and memory of this node and of this process with its children.

    `cpu_percent` is of all processors together, 0 to 100, since the last reading;
    `process_cpu_percent` is of one processor, and may pass 100.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        # The first reading has nothing to compare with and would be zero.
        psutil.cpu_percent()
        self._process.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return shares in percent and sizes in bytes."""
        memory = psutil.virtual_memory()
        resident = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            # A child may exit while it is inspected.
            with suppress(psutil.Error):
                resident += child.memory_info().rss
        return {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_bytes": float(memory.total - memory.available),
            "memory_percent": float(memory.percent),
            "process_cpu_percent": self._process.cpu_percent(),
            "process_memory_bytes": float(resident),
        }

    def close(self) -> None:
        """Do nothing."""


class GpuProbe:
    """All GPUs of this node, through NVML.

    Names are `gpu0/utilization_percent`, `gpu0/memory_used_bytes`,
    `gpu0/memory_percent`, `gpu0/temperature_celsius` and `gpu0/power_watts`; what a
    device does not tell is left out. The numbers are NVML's own and ignore
    `CUDA_VISIBLE_DEVICES`.

    Args:
        nvml: The module `pynvml`; None: import it with the first reading.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: list[Any] | None = None

    def read(self) -> dict[str, float]:
        """Return the state of every GPU.

        Raises:
            ProbeUnavailableError: There is no NVML, no driver or no GPU.
        """
        if self._handles is None:
            self._handles = self._open()
        found: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, value in self._read_device(handle).items():
                found[f"gpu{index}/{name}"] = value
        return found

    def _open(self) -> list[Any]:
        try:
            nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError as error:
            raise ProbeUnavailableError(
                f"no NVML ({error}); pip install 'rl-distributed[nvml]'"
            ) from error
        self._nvml = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise ProbeUnavailableError(f"no GPU driver: {error}") from error
        try:
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(index)
                for index in range(nvml.nvmlDeviceGetCount())
            ]
        except nvml.NVMLError as error:
            # NVML is reference-counted: every successful `nvmlInit` needs its shutdown.
            nvml.nvmlShutdown()
            raise ProbeUnavailableError(f"GPUs cannot be read: {error}") from error
        if not handles:
            nvml.nvmlShutdown()
            raise ProbeUnavailableError("this node has no GPU")
        return handles

    def _read_device(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        found: dict[str, float] = {}

        def utilization() -> dict[str, float]:
            rates = nvml.nvmlDeviceGetUtilizationRates(handle)
            return {"utilization_percent": float(rates.gpu)}

        def memory() -> dict[str, float]:
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return {
                "memory_used_bytes": float(info.used),
                "memory_percent": 100.0 * info.used / info.total,
            }

        def temperature() -> dict[str, float]:
            sensor = nvml.NVML_TEMPERATURE_GPU
            value = nvml.nvmlDeviceGetTemperature(handle, sensor)
            return {"temperature_celsius": float(value)}

        def power() -> dict[str, float]:
            # NVML reports milliwatts.
            return {"power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}

        for measure in (utilization, memory, temperature, power):
            # Virtual and partitioned devices do not report everything.
            with suppress(nvml.NVMLError, ZeroDivisionError):
                found.update(measure())
        return found

    def close(self) -> None:
        """Let go of NVML."""
        if self._handles is not None:
            self._handles = None
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class ObjectStoreProbe:
    """Ray's object store on this node, or on every node, while Ray is up.

    Ray is neither imported nor started. Names are `object_store_used_bytes` and
    `object_store_percent`; of every node, they begin with `node0/`, in the order of the
    nodes' addresses, and `num_nodes` is there too.

    Args:
        every_node: Ask all nodes of the cluster.
        deadline_s: Longest wait for one node's answer.
    """

    def __init__(self, *, every_node: bool = False, deadline_s: float = 5.0) -> None:
        self._every_node = every_node
        self._deadline_s = deadline_s

    def read(self) -> dict[str, float]:
        """Return what is used; nothing where Ray is not up, or a node does not answer.

        Raises:
            ProbeUnavailableError: This release of Ray does not report it.
        """
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return {}
        ask = self._questioner()
        alive = [node for node in ray.nodes() if node["Alive"]]
        if not self._every_node:
            own = ray.get_runtime_context().get_node_id()
            return next(
                (self._usage(ask, node) for node in alive if node["NodeID"] == own), {}
            )
        found = {"num_nodes": float(len(alive))}
        # In a fixed order, so that node 0 is the same node in every sample.
        alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        for index, node in enumerate(alive):
            for name, value in self._usage(ask, node).items():
                found[f"node{index}/{name}"] = value
        return found

    def _questioner(self) -> Callable[[str, int], Any]:
        """Return a function that asks a node; only Ray's own tools have one."""
        try:
            grpc_utils = importlib.import_module("ray._private.grpc_utils")
            messages = importlib.import_module("ray.core.generated.node_manager_pb2")
            services = importlib.import_module(
                "ray.core.generated.node_manager_pb2_grpc"
            )
            open_channel = grpc_utils.init_grpc_channel
            question = messages.GetNodeStatsRequest(include_memory_info=False)
            stub_class = services.NodeManagerServiceStub
        except (ImportError, AttributeError) as error:
            raise ProbeUnavailableError(
                f"this release of Ray does not tell what its nodes store: {error}"
            ) from error

        def ask(address: str, port: int) -> Any:
            host = f"[{address}]" if ":" in address else address
            with open_channel(f"{host}:{port}") as channel:
                return stub_class(channel).GetNodeStats(
                    question, timeout=self._deadline_s
                )

        return ask

    @staticmethod
    def _usage(
        ask: Callable[[str, int], Any], node: dict[str, Any]
    ) -> dict[str, float]:
        try:
            stats = ask(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
        except Exception:
            # A node that is leaving. Whatever gRPC raises, the next reading will show.
            return {}
        used, size = stats.object_store_bytes_used, stats.object_store_bytes_avail
        found = {"object_store_used_bytes": float(used)}
        if size:
            found["object_store_percent"] = 100.0 * used / size
        return found

    def close(self) -> None:
        """Do nothing."""
