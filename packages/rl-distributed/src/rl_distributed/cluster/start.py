"""Starting a local Ray cluster, or attaching to one.

A cluster that this process starts listens on the loopback interface only, has token
authentication on and no dashboard, and ends with the process; TLS is one option more.
Of the caller's environment its processes get what `passed_variables` chooses; a running
cluster gets nothing of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import auto_init_hook, ray_constants

from rl_distributed.cluster.attach import (
    ClusterAddress,
    NotThereYetError,
    check_joinable,
    check_reachable,
    find_local_cluster,
)
from rl_distributed.cluster.passed_variables import check_pass_env, withheld_variables
from rl_distributed.cluster.placement import NodeCapacity
from rl_distributed.cluster.ray_output import route_ray_output
from rl_distributed.cluster.ray_processes import (
    only_needed_processes,
    private_processes,
)
from rl_distributed.cluster.session_folder import create_session_folder
from rl_distributed.cluster.session_owner import (
    owned_session,
    prune_sessions,
    release_sessions,
)
from rl_distributed.cluster.topology import (
    NVLINK_DOMAIN_LABEL,
    NVLINK_DOMAIN_VARIABLE,
    nvlink_domain_of,
)
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    SecurityError,
    UserError,
)
from rl_distributed.logs.logging import restore_named_levels
from rl_distributed.process.interrupts import deferred_signals
from rl_distributed.security.audit import audit, audited
from rl_distributed.security.ray_access import (
    adopt_token_authentication,
    check_certificates,
    check_token_settings,
    forget_adopted_mode,
    temporary_certificates,
    tls_in_use,
    use_tls,
    variables_undone_on_failure,
)
from rl_distributed.security.tls_files import TlsFiles

__all__ = ["init_ray", "live_nodes", "shutdown_ray", "wait_for_nodes"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
# Ray would start plain workers in advance, one per CPU. It takes none of these for a
# worker group, whose workers have variables of their own: each would cost 0.8 s of CPU
# time while the group starts, and memory until it has been idle for long enough to end.
# It would also record the events of the last 100,000 tasks, a call being one, for its
# dashboard and state commands, of which the cluster has none: 30 KB per training step
# in the server that keeps the cluster's state.
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "task_events_report_interval_ms": 0,
}
_lock = threading.RLock()
# Audit action at the end of this process, by whether it started its cluster.
_END_ACTIONS = {True: "cluster.stop", False: "cluster.leave"}
_end_notes: list[Callable[[], None]] = []


def init_ray(
    num_cpus: int | None = None,
    *,
    num_gpus: int | None = None,
    address: str | None = None,
    log_level: int | str = "ERROR",
    log_to_driver: bool = False,
    object_store_bytes: int | None = None,
    tls: bool | TlsFiles = False,
    pass_env: Collection[str] = (),
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
        tls: encrypt what Ray's processes send to each other. True: with certificates
            made for a new cluster; `TlsFiles`: with these, which a running cluster
            needs; False: if the variable `RAY_USE_TLS` says so.
        pass_env: variables of this program's environment that the processes of the new
            cluster get, workers included, beside those that every process needs
            (`passed_variables.PASSED_VARIABLES`): names, or patterns such as `MY_*`,
            which pass no secrets. Variables for the workers of one group are its
            `env_vars`.
        deadline_s: how long the cluster may take to answer.

    Returns:
        True if a cluster was started, False if one was running already.

    Raises:
        UserError: nothing can be reached at the address, or it cannot be joined.
        SecurityError: the token or a certificate is refused, or only one side uses TLS.
        DeadlineExceededError: the cluster does not answer in time.
    """
    if deadline_s <= 0:
        raise ConfigError(f"deadline_s must be positive: got {deadline_s}")
    check_pass_env(pass_env)
    with _lock:
        if ray.is_initialized():
            _check_tls_is_on(tls)
            return False
        end = time.monotonic() + deadline_s
        # A call that comes after the end of a cluster would start another one, unasked
        # and open to the network.
        auto_init_hook.enable_auto_connect = False
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        is_new = address == "local"
        if not is_new:
            # Ray would silently ignore some of these.
            _check_of_running(address, num_cpus, num_gpus, object_store_bytes, pass_env)
        if not log_to_driver:
            route_ray_output()
        common: dict[str, Any] = {
            "logging_level": log_level,
            "log_to_driver": log_to_driver,
        }
        action = "cluster.start" if is_new else "cluster.attach"
        with audited(action, address), variables_undone_on_failure():
            # An earlier cluster of this process may have used another mode of
            # authentication.
            forget_adopted_mode()
            _set_up_tls(tls, is_new)
            check_token_settings()
            if is_new:
                _start_local(
                    common, num_cpus, num_gpus, object_store_bytes, pass_env, end
                )
            else:
                _attach(common, address, deadline_s)
            _wait_for_a_node(address, end, deadline_s)
        # Only after success: a failed start has no end to record.
        _note_end_at_exit(_END_ACTIONS[is_new], address)
        # Ray sets log levels of its own while it starts.
        restore_named_levels()
    return is_new


def _check_of_running(
    address: str,
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_bytes: int | None,
    pass_env: Collection[str],
) -> None:
    sizes = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "object_store_bytes": object_store_bytes,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    if given:
        *some, last = sizes
        raise ConfigError(
            f"{', '.join(some)} and {last} describe a new cluster and cannot be given "
            f"with the address of a running one: got address {address!r} and {given}"
        )
    if pass_env:
        raise ConfigError(
            "pass_env describes a new cluster, and the processes of a running one have "
            f"their environment: got address {address!r} and {sorted(pass_env)}; set "
            "the variables where its nodes are started, or give them to the workers of "
            "a group as its env_vars"
        )


def shutdown_ray() -> None:
    """Leave the Ray cluster; one that this process has started ends.

    May be called more than once. The end of the process does the same.
    """
    with _lock:
        for note in list(_end_notes):
            note()
        ray.shutdown()
        release_sessions()


def _note_end_at_exit(action: str, address: str) -> None:
    """Record the end in the audit log, if Ray is still up then."""

    def note() -> None:
        atexit.unregister(note)
        _end_notes.remove(note)
        if ray.is_initialized():
            audit(action, address)

    # Those of a cluster that was left by `ray.shutdown` itself count no more.
    for old in _end_notes:
        atexit.unregister(old)
    _end_notes[:] = [note]
    atexit.register(note)


def _check_tls_is_on(tls: bool | TlsFiles) -> None:
    if tls and tls_in_use() is None:
        raise SecurityError(
            "Ray is up without TLS, and cannot change to it; pass tls= to the first "
            "init_ray of the program, or call ray.shutdown() before this one"
        )


def _set_up_tls(tls: bool | TlsFiles, is_new: bool) -> None:
    present = tls_in_use()
    if isinstance(tls, TlsFiles):
        check_certificates(tls, hosts=[_LOOPBACK] if is_new else ())
        use_tls(tls)
    elif present is not None:
        check_certificates(present, hosts=[_LOOPBACK] if is_new else ())
    elif tls and is_new:
        use_tls(temporary_certificates())
    elif tls:
        raise SecurityError(
            "tls=True makes certificates for a new cluster; to join a running one pass "
            "tls=TlsFiles(...) with a certificate that its authority has signed"
        )


def live_nodes() -> list[NodeCapacity]:
    """Return the nodes of the cluster, in a stable order: this machine's first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        NodeCapacity.from_resources(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"],
            nvlink_domain_of(node.get("Labels")),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.node_id != own, node.node_id))


def wait_for_nodes(
    num_nodes: int, *, address: str | None = None, deadline_s: float = 300.0
) -> None:
    """Attach to a cluster that is just being started, once all its nodes have joined.

    Args:
        num_nodes: how many nodes there must be.
        address: of the head; None: `RAY_ADDRESS`.
        deadline_s: how long the head and all nodes together may take.

    Raises:
        DeadlineExceededError: fewer nodes are there at the end; the message says how
            many, and the last reason.
        UserError: the cluster cannot be joined, however long one waits.
    """
    end = time.monotonic() + deadline_s
    address = address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        raise ConfigError(
            "wait_for_nodes needs the address of the head, as an argument or in "
            f"RAY_ADDRESS: got {address!r}"
        )
    pause = threading.Event()
    count, reason = 0, ""
    while count < num_nodes:
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(
                f"{count} of {num_nodes} nodes have joined the Ray cluster at "
                f"{address!r} after {deadline_s:g} s{reason}"
            )
        try:
            init_ray(address=address, deadline_s=left)
            count = len(live_nodes())
        # No other error would go away by waiting.
        except NotThereYetError as error:
            reason = f"; {error}"
        if count < num_nodes:
            pause.wait(min(0.2, left))


def _start_local(
    common: Mapping[str, Any],
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_bytes: int | None,
    pass_env: Collection[str],
    end: float,
) -> None:
    if num_cpus is not None and num_cpus < 1:
        raise ConfigError(f"num_cpus must be at least 1: got {num_cpus}")
    if withheld := withheld_variables(os.environ, pass_env):
        logger.debug(
            "not passed to the processes of the cluster (pass_env): %s",
            ", ".join(withheld),
        )
    folder = create_session_folder()
    prune_sessions(folder)
    domain = os.environ.get(NVLINK_DOMAIN_VARIABLE, "")
    while True:
        # So that a failed attempt ends only its own processes, not another cluster's.
        before = set(_ray_children())
        try:
            with (
                deferred_signals(),
                owned_session(folder),
                _on_loopback(),
                only_needed_processes(log_monitor=common["log_to_driver"]),
                private_processes(pass_env),
            ):
                ray.init(
                    **common,
                    address="local",
                    labels={NVLINK_DOMAIN_LABEL: domain} if domain else None,
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    object_store_memory=object_store_bytes,
                    _temp_dir=str(folder),
                    _node_ip_address=_LOOPBACK,
                    _system_config=_SYSTEM_CONFIG,
                )
            return
        except Exception as error:
            _end_half_started(before)
            # Ray gives its own processes 30 s, too few on a machine that is busy, and
            # reports it as a plain Exception.
            if type(error) is not Exception or time.monotonic() >= end:
                raise DistributedError(
                    f"the local Ray cluster did not start: {error}; look at the newest "
                    f"folder under {folder} for its logs, or raise deadline_s"
                ) from error
            logger.warning("Ray did not start in its own time; trying again")


def _ray_children() -> list[psutil.Process]:
    """Return processes of Ray that this process has started, and theirs."""
    package = str(Path(ray.__file__).parent)
    children = []
    for child in psutil.Process().children(recursive=True):
        # A child may exit while it is inspected.
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
    # A version of Ray without the switch cannot be told where to listen.
    if before is None:
        yield
        return
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _attach(common: Mapping[str, Any], address: str, deadline_s: float) -> None:
    place = ClusterAddress.parse(find_local_cluster() if address == "auto" else address)
    if address.startswith("ray://"):
        check_reachable(place, deadline_s)
        # Ray's own client is another protocol, in which the head is not asked.
        adopt_token_authentication(None, address)
        target = address
    else:
        check_joinable(place, deadline_s)
        target = str(place)
    # Otherwise Ray puts the machine's own address in the place of a loopback one, where
    # a cluster that listens on loopback only is never found.
    where = _on_loopback() if place.is_loopback else nullcontext()
    try:
        with where:
            ray.init(**common, address=target)
    except (TimeoutError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"cannot join the Ray cluster at {address!r}: {error}; check the address, "
            "that Ray has the same version there, and the token (RAY_AUTH_MODE=token "
            "with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
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
