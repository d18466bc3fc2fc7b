"""Starting a local Ray cluster, or attaching to one.

A cluster that this process starts listens on the loopback interface only, has token
authentication on and no dashboard, and ends with the process. Nothing of the caller's
environment is handed to workers on other machines.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    UserError,
)
from rl_distributed.placement import NodeCapacity

__all__ = ["init_ray", "live_nodes"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_lock = threading.RLock()


def init_ray(
    num_cpus: int | None = None,
    *,
    num_gpus: int | None = None,
    address: str | None = None,
    log_level: int | str = "ERROR",
    log_to_driver: bool = False,
    object_store_bytes: int | None = None,
    deadline_s: float = 60.0,
) -> bool:
    """Start a local Ray cluster, or attach to a running one.

    Without an address (here and in `RAY_ADDRESS`) a new cluster is started on this
    machine; it ends with this process, however that ends. A second call is without
    effect while Ray is up.

    Args:
        num_cpus: CPUs of the new cluster; None: all of the machine.
        num_gpus: GPUs of the new cluster; None: all of the machine.
        address: `host:port` of a running cluster, or `"auto"` for the one that
            `ray start` began on this machine; `"local"` always starts a new one.
        log_level: how much Ray itself logs in this process.
        log_to_driver: whether the output of workers is copied to this process.
        object_store_bytes: size of the shared-memory store of the new cluster.
        deadline_s: how long the cluster may take to answer.

    Returns:
        True if a cluster was started, False if one was there already.

    Raises:
        UserError: nothing can be reached at the address, or the token is refused.
        DeadlineExceededError: the cluster does not answer in time.
    """
    if deadline_s <= 0:
        raise ConfigError(f"deadline_s must be positive: got {deadline_s}")
    with _lock:
        if ray.is_initialized():
            return False
        end = time.monotonic() + deadline_s
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if not log_to_driver:
            _route_ray_output()
        common: dict[str, Any] = {
            "address": address,
            "logging_level": log_level,
            "log_to_driver": log_to_driver,
        }
        if address == "local":
            _start_local(common, num_cpus, num_gpus, object_store_bytes, end)
        else:
            if num_cpus is not None or num_gpus is not None:
                raise ConfigError(
                    "num_cpus and num_gpus describe a new cluster and cannot be given "
                    f"with the address of a running one: got address {address!r}"
                )
            _attach(common, address, deadline_s)
        _wait_for_a_node(address, end, deadline_s)
    return address == "local"


def live_nodes() -> list[NodeCapacity]:
    """The nodes of the cluster, in a stable order: this machine's first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        NodeCapacity.from_resources(
            node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.node_id != own, node.node_id))


def _start_local(
    common: Mapping[str, Any],
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_bytes: int | None,
    end: float,
) -> None:
    if num_cpus is not None and num_cpus < 1:
        raise ConfigError(f"num_cpus must be at least 1: got {num_cpus}")
    while True:
        before = set(_ray_children())
        try:
            with _on_loopback():
                ray.init(
                    **common,
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    object_store_memory=object_store_bytes,
                    _node_ip_address=_LOOPBACK,
                )
            return
        except Exception as error:
            _end_half_started(before)
            # Ray gives its own processes 30 s, too few on a machine that is busy, and
            # tells of it by a plain Exception.
            if type(error) is not Exception or time.monotonic() >= end:
                raise DistributedError(
                    f"the local Ray cluster did not start: {error}; look at the newest "
                    "folder under /tmp/ray for its logs, or raise deadline_s"
                ) from error
            logger.warning("Ray did not start in its own time; trying again")


def _ray_children() -> list[psutil.Process]:
    """Processes of Ray that this process has started, and theirs."""
    package = str(Path(ray.__file__).parent)
    children = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = child.name()
            if name.startswith("ray::") or package in " ".join(child.cmdline()):
                children.append(child)
    return children


def _end_half_started(before: Collection[psutil.Process]) -> None:
    """Remove what a failed start has left; `ray.shutdown` does not know of it."""
    ray.shutdown()
    left = [child for child in _ray_children() if child not in before]
    for child in left:
        with suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(left, timeout=5)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray keep 127.0.0.1 as the node's address and listen only there.

    On Linux Ray replaces a loopback address by one that other machines reach, and then
    listens on every interface. Its switch for single-machine clusters, which elsewhere
    is the default, keeps it.
    """
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    if before is None:
        yield
        return
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _attach(common: Mapping[str, Any], address: str, deadline_s: float) -> None:
    _check_reachable(address, deadline_s)
    try:
        ray.init(**common)
    except (TimeoutError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"cannot join the Ray cluster at {address!r}: {error}; check the address, "
            "that Ray has the same version there, and the token (RAY_AUTH_MODE=token "
            "with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
        ) from error


def _check_reachable(address: str, deadline_s: float) -> None:
    """Fail at once where nobody listens; Ray itself would try for a minute."""
    plain = address.removeprefix("ray://")
    host, separator, port = plain.rpartition(":")
    if address == "auto":
        return
    if not separator or not port.isdigit():
        raise ConfigError(
            f"address must be 'host:port', 'auto' or 'local': got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), deadline_s).close()
    except OSError as error:
        raise UserError(
            f"nothing answers at the Ray address {address!r} ({error}); check that "
            "the cluster runs, or leave the address out to start a local one"
        ) from error


def _wait_for_a_node(address: str, end: float, deadline_s: float) -> None:
    pause = threading.Event()
    while not any(node["Alive"] for node in ray.nodes()):
        if time.monotonic() > end:
            ray.shutdown()
            raise DeadlineExceededError(
                f"the Ray cluster ({address}) has no live node after {deadline_s:g} s"
            )
        pause.wait(0.05)


def _route_ray_output() -> None:
    """Send what Ray tells about workers to our log instead of the standard streams.

    Ray prints what the raylet reports (a dead worker, for instance) even when it is
    told not to copy worker output, and logs the failure of every call that nobody
    asked about, as the second of two workers that failed alike. Both would stand
    between a program's own lines.
    """

    def to_log(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        del ignore_prefix
        for line in data.get("lines", ()):
            logger.debug("ray (%s): %s", data.get("pid", "?"), line)

    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = to_log
    ray_logger = logging.getLogger(ray_worker.__name__)
    if _demote_unhandled not in ray_logger.filters:
        ray_logger.addFilter(_demote_unhandled)


def _demote_unhandled(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith("Unhandled error"):
        return True
    logger.debug("ray: %s", record.getMessage())
    return False
