from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_distributed.errors import ConfigError
from rl_distributed.metrics import LoggerConfig, LoggerFacade, ResourceSampler
from rl_distributed.metrics.probes import (
    GpuProbe,
    HostProbe,
    ObjectStoreProbe,
    ProbeUnavailableError,
)
from rl_distributed.metrics.sinks.jsonl import read_metrics

DEADLINE_S = 60.0


class Recorder:
    """Collects samples; a test waits for them."""

    def __init__(self) -> None:
        self.samples: queue.Queue[dict[str, float]] = queue.Queue()

    def log_between_steps(self, metrics: Mapping[str, Any], prefix: str = "") -> None:
        self.samples.put({f"{prefix}/{name}": v for name, v in metrics.items()})

    def next(self) -> dict[str, float]:
        return self.samples.get(timeout=DEADLINE_S)


class FakeProbe:
    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self.read = read
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeTime:
    """A clock that advances only by waiting, and stops after a number of waits."""

    def __init__(self, num_waits: int) -> None:
        self.now = 0.0
        self.waited: list[float] = []
        self.num_waits = num_waits

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.now += seconds
        return len(self.waited) > self.num_waits


def test_samples_keep_their_times_and_skip_what_was_overrun() -> None:
    time = FakeTime(num_waits=4)
    durations = iter([1.0, 25.0, 0.0, 0.0])

    def read() -> dict[str, float]:
        time.now += next(durations)
        return {"x_percent": time.now}

    logger, probe = Recorder(), FakeProbe(read)
    sampler = ResourceSampler(
        logger, 10, probes=[probe], clock=time.clock, wait=time.wait
    )
    sampler.start()
    found = [logger.next()["system/x_percent"] for _ in range(4)]
    assert sampler.stop(DEADLINE_S)
    # At 10, 20 (which took until 45), 50 and 60.
    assert found == [11, 45, 50, 60]
    assert time.waited == [10, 9, 5, 10, 10]
    assert probe.closed == 1


def test_a_probe_that_fails_keeps_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nothing() -> dict[str, float]:
        raise ProbeUnavailableError("no such thing")

    def fail() -> dict[str, float]:
        raise OSError("busy")

    logger = Recorder()
    sampler = ResourceSampler(
        logger,
        1,
        prefix="node",
        probes=[FakeProbe(nothing), FakeProbe(fail), FakeProbe(lambda: {"a": 1.0})],
    )
    with caplog.at_level(logging.DEBUG, "rl_distributed"):
        for _ in range(3):
            assert sampler.sample() == {"a": 1.0}
    assert logger.next() == {"node/a": 1.0}
    assert caplog.text.count("no such thing") == 1
    assert caplog.text.count("busy") == 1
    levels = {r.getMessage(): r.levelno for r in caplog.records}
    assert logging.DEBUG in levels.values()


def test_a_probe_that_hangs_holds_up_nobody() -> None:
    release, reading = threading.Event(), threading.Event()

    def hang() -> dict[str, float]:
        reading.set()
        release.wait(DEADLINE_S)
        return {}

    sampler = ResourceSampler(Recorder(), 0.001, probes=[FakeProbe(hang)])
    with sampler:
        assert reading.wait(DEADLINE_S)
        thread = sampler._thread
        assert thread is not None
        assert thread.daemon
        assert not sampler.stop(deadline_s=0.01)
        release.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert sampler.stop()


def test_wrong_intervals_are_named() -> None:
    with pytest.raises(ConfigError, match="interval_s must be positive: got 0"):
        ResourceSampler(Recorder(), 0)
    with pytest.raises(ConfigError, match="sample_resources_every_s"):
        LoggerConfig(sample_resources_every_s=-1)


def test_a_logger_samples_this_machine_in_the_background(tmp_path: Path) -> None:
    config = LoggerConfig(sample_resources_every_s=0.05)
    pause = threading.Event()
    with LoggerFacade(config, tmp_path) as logger:
        logger.log_metrics({"loss": 1.0}, 7)
        path, found = tmp_path / "metrics.jsonl", {}
        for _ in range(int(DEADLINE_S / 0.02)):
            found = {
                name: value
                for step, metrics in read_metrics(path)
                if step == 7
                for name, value in metrics.items()
                if name.startswith("system/")
            }
            if found:
                break
            pause.wait(0.02)
        threads = [t for t in threading.enumerate() if t.name == "resource-sampler"]
        assert len(threads) == 1
    assert not threads[0].is_alive()
    assert 0 <= found["system/cpu_percent"] <= 100
    assert found["system/memory_used_bytes"] > 2**20
    assert 0 < found["system/memory_percent"] <= 100
    assert found["system/process_memory_bytes"] > 2**20
    assert found["system/process_cpu_percent"] >= 0
    assert not [name for name in found if "gpu" in name]  # there is none here
    lines = [json.loads(line) for line in path.open()]
    assert all(line["step"] in (0, 7) for line in lines)


# GPUs, through a fake NVML


class NvmlError(Exception):
    pass


class Nvml:
    """Two devices; the second reports only its memory."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, count: int = 2, driver: bool = True) -> None:
        self.count, self.driver, self.open = count, driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NvmlError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _only_first(self, handle: int) -> None:
        if handle:
            raise NvmlError("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._only_first(handle)
        return type("Rates", (), {"gpu": 80})

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return type("Memory", (), {"used": 25, "total": 100})

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._only_first(handle)
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._only_first(handle)
        return 350_500


def test_gpus_are_read_through_nvml() -> None:
    nvml = Nvml()
    probe = GpuProbe(nvml)
    for _ in range(2):
        assert probe.read() == {
            "gpu0/utilization_percent": 80,
            "gpu0/memory_used_bytes": 25,
            "gpu0/memory_percent": 25,
            "gpu0/temperature_celsius": 61,
            "gpu0/power_watts": 350.5,
            "gpu1/memory_used_bytes": 25,
            "gpu1/memory_percent": 25,
        }
    assert nvml.open == 1
    probe.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("nvml", "message"),
    [(Nvml(driver=False), "no GPU driver"), (Nvml(count=0), "this node has no GPU")],
)
def test_without_gpus_there_is_no_probe(nvml: Nvml, message: str) -> None:
    probe = GpuProbe(nvml)
    with pytest.raises(ProbeUnavailableError, match=message):
        probe.read()
    assert nvml.open == 0
    probe.close()


def test_without_nvml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ProbeUnavailableError, match=r"rl-distributed\[nvml\]"):
        GpuProbe().read()


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU")
def test_a_real_gpu_is_read() -> None:
    probe = GpuProbe()
    found = probe.read()
    assert found["gpu0/memory_used_bytes"] > 0
    assert 0 <= found["gpu0/utilization_percent"] <= 100
    assert found["gpu0/power_watts"] > 0
    probe.close()


# The object store of a real Ray


def test_the_host_has_processors_and_memory() -> None:
    found = HostProbe().read()
    assert all(name.endswith(("_percent", "_bytes")) for name in found)


def test_the_object_store_fills(ray_cluster: None) -> None:
    probe = ObjectStoreProbe(deadline_s=DEADLINE_S)
    reference = ray.put(b"x" * 30_000_000)
    found = probe.read()
    assert found["object_store_used_bytes"] >= 30_000_000
    assert 0 < found["object_store_percent"] < 100
    every = ObjectStoreProbe(every_node=True, deadline_s=DEADLINE_S).read()
    assert every["num_nodes"] == 1
    assert every["node0/object_store_used_bytes"] >= 30_000_000
    del reference


def test_without_ray_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray")
    assert ObjectStoreProbe().read() == {}
