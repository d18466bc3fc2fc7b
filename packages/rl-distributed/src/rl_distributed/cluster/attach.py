"""Check that a running Ray cluster can be joined, before Ray itself tries.

Ray waits for minutes, or ends the process, where a cluster is out of reach, speaks TLS
and the other side does not, or refuses the token. So this asks in four steps that
share one deadline:

```
TCP connection -> greeting (plain or TLS, as this process is set; is a token asked for?)
               -> greeting with the token (is it the cluster's?)
               -> versions, nodes
```
"""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray import _raylet
from ray._private import services

from rl_distributed.cluster.grpc_greeting import Greeting, greet
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    SecurityError,
    UserError,
)
from rl_distributed.security.ray_access import (
    adopt_token_authentication,
    check_certificates,
    tls_in_use,
)
from rl_distributed.security.tls_files import TlsFiles
from rl_distributed.security.tokens import find_token, missing_token, refused_token

__all__ = [
    "ClusterAddress",
    "NotThereYetError",
    "check_joinable",
    "check_reachable",
    "find_local_cluster",
]

# The first call of Ray's own client. It changes nothing.
_FIRST_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
# Enough for a machine that is busy; a server that is there greets in milliseconds.
_GREETING_S = 8.0


class NotThereYetError(UserError):
    """The head does not listen yet, or this machine's node has not joined."""


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Host and port of the head of a Ray cluster."""

    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> ClusterAddress:
        """Read `host:port` or `[host]:port`.

        Raises:
            ConfigError: it has another form.
        """
        host, separator, port = address.removeprefix("ray://").rpartition(":")
        if not separator or not host or not port.isdigit() or int(port) > 65_535:
            raise ConfigError(
                f"address must be 'host:port', 'auto' or 'local': got {address!r}"
            )
        return cls(host.strip("[]"), int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether it is reached from its own machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def find_local_cluster() -> str:
    """Return the address of the cluster that `ray start` began on this machine.

    Raises:
        UserError: there is none.
    """
    try:
        return str(services.get_ray_address_from_environment("auto", None))
    except ConnectionError as error:
        raise UserError(
            "address='auto' finds no Ray cluster on this machine; begin one with "
            "`ray start --head`, name its address, or leave it out to start a local one"
        ) from error


def check_joinable(address: ClusterAddress, deadline_s: float) -> None:
    """Check that this process can join the Ray cluster at an address.

    Where the environment leaves it open, this process presents a token from now on if
    the cluster asks for one, and none if it does not.

    Args:
        address: where the head of the cluster listens.
        deadline_s: how long all answers together may take.

    Raises:
        UserError: nothing listens there, it is no Ray cluster, it has another Ray or
            Python version, or this machine is none of its nodes.
        SecurityError: one side uses TLS and the other does not, a certificate is
            refused, or the token is, or only this side uses tokens.
        DeadlineExceededError: it does not answer in time.
    """
    end = time.monotonic() + deadline_s
    # Before trying TLS, as only a head that does not listen yet is worth waiting for.
    own = check_reachable(address, deadline_s)
    files = tls_in_use()
    if files is not None:
        # Other nodes connect back to this one, at the address it has on that route.
        check_certificates(files, hosts=[own])
    demands_token = _greet(address, files, end)
    adopt_token_authentication(demands_token, str(address))
    if demands_token:
        _check_token(address, files, end)
    _check_answers(address, end, deadline_s)


def _greet(
    address: ClusterAddress, files: TlsFiles | None, end: float, token: str = ""
) -> bool | None:
    """Whether the head refuses this token; None: it does not say."""
    if files is None:
        return _check_plain(address, end, token)
    return _check_tls(address, files, end, token)


def _check_token(address: ClusterAddress, files: TlsFiles | None, end: float) -> None:
    """Present the token of this process to a head that asks for one.

    Ray's own client would ask again and again, or end the process.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() not in ("", "disabled", "token"):
        return  # a mode of Ray's with tokens of another kind
    token = find_token()
    if token is None:
        raise missing_token(str(address))
    if _greet(address, files, end, token.value):
        raise refused_token(str(address), token)


def _left(end: float, most: float = _GREETING_S) -> float:
    # A timeout of zero would make the socket non-blocking.
    return max(0.05, min(most, end - time.monotonic()))


def check_reachable(address: ClusterAddress, deadline_s: float) -> str:
    """Connect once.

    Returns:
        The address of this machine on the way there.

    Raises:
        UserError: nothing listens there.
    """
    try:
        place = (address.host, address.port)
        timeout = min(deadline_s, _GREETING_S)
        with socket.create_connection(place, timeout) as link:
            return str(link.getsockname()[0])
    except OSError as error:
        raise NotThereYetError(
            f"nothing answers at the Ray address '{address}' ({error}); check that "
            "the cluster runs, or leave the address out to start a local one"
        ) from error


def _check_plain(address: ClusterAddress, end: float, token: str) -> bool | None:
    """Greet without TLS; return whether this token, or none, is refused."""
    try:
        timeout = _left(end)
        with socket.create_connection((address.host, address.port), timeout) as link:
            found = greet(link, _FIRST_METHOD, token)
    except TimeoutError:
        raise _silence(address) from None
    # A TLS server hangs up on plain bytes.
    except OSError:
        found = Greeting(is_grpc=False)
    if found.is_grpc:
        return found.demands_token
    if _speaks_tls(address, end):
        raise SecurityError(
            f"the Ray cluster at '{address}' uses TLS and this process does not; pass "
            "tls=TlsFiles(...) with a certificate of the cluster's authority, or set "
            "RAY_USE_TLS=1 and the RAY_TLS_... variables"
        )
    raise UserError(
        f"what answers at '{address}' is no Ray cluster; check the port (6379 by "
        "default; 8265 is the dashboard and 10001 the Ray client)"
    )


def _speaks_tls(address: ClusterAddress, end: float) -> bool:
    """Whether the other side takes part in a handshake, whatever it is sure of."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # This only asks which protocol is spoken; nothing is sent that needs trust.
    context.verify_mode = ssl.CERT_NONE
    try:
        timeout = _left(end)
        with (
            socket.create_connection((address.host, address.port), timeout) as link,
            context.wrap_socket(link),
        ):
            return True
    except ssl.SSLError as error:
        # An alert is an answer in TLS.
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _check_tls(
    address: ClusterAddress, files: TlsFiles, end: float, token: str
) -> bool | None:
    """Greet with TLS, as Ray will; the other side's certificate is checked too.

    Returns whether this token, or none, is refused.
    """
    try:
        context = ssl.create_default_context(cafile=str(files.authority))
        context.load_cert_chain(str(files.certificate), str(files.key))
        # gRPC servers hang up unless the handshake negotiates HTTP/2.
        context.set_alpn_protocols(["h2"])
        timeout = _left(end)
        with (
            socket.create_connection((address.host, address.port), timeout) as link,
            context.wrap_socket(link, server_hostname=address.host) as tls,
        ):
            # A refusal of our own certificate comes only after the handshake.
            found = greet(tls, _FIRST_METHOD, token)
    # Specific errors first: all of these are subclasses of OSError.
    except ssl.SSLCertVerificationError as error:
        raise SecurityError(
            f"the certificate of the Ray cluster at '{address}' is not accepted: "
            f"{error.verify_message}; it must be signed by {files.authority} and name "
            f"{address.host} among its subject alternative names"
        ) from error
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            raise SecurityError(
                f"the Ray cluster at '{address}' refuses the certificate "
                f"{files.certificate} ({error.reason}); take one that the cluster's "
                "authority has signed"
            ) from error
        raise SecurityError(
            f"this process uses TLS and the Ray cluster at '{address}' does not "
            f"({error.reason}); start the cluster with TLS, or leave tls= and "
            "RAY_USE_TLS out"
        ) from error
    except TimeoutError:
        raise _silence(address) from None
    except OSError as error:
        raise SecurityError(
            f"the Ray cluster at '{address}' breaks off a TLS connection ({error}); "
            "check that it uses TLS"
        ) from error
    if not found.is_grpc:
        raise UserError(f"what answers with TLS at '{address}' is no Ray cluster")
    return found.demands_token


def _silence(address: ClusterAddress) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"'{address}' takes connections but says nothing; check that it is the port of "
        "a Ray cluster (6379 by default) and that its head is not stopped"
    )


def _check_answers(address: ClusterAddress, end: float, deadline_s: float) -> None:
    facts = _within(lambda: _ask_head(address, end), address, end, deadline_s)
    if isinstance(facts, BaseException):
        raise _explained(facts, address) from facts
    versions, node_addresses = facts
    _check_versions(address, versions)
    _check_own_node(address, node_addresses)


def _within(
    ask: Callable[[], Any], address: ClusterAddress, end: float, deadline_s: float
) -> Any:
    """Ask in a separate thread, as Ray's client does not keep to a time limit."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    # Daemon: it is abandoned at the time limit and must not delay the program's exit.
    thread = threading.Thread(target=run, name="ask-ray-head", daemon=True)
    thread.start()
    thread.join(_left(end, deadline_s))
    if not answers:
        raise DeadlineExceededError(
            f"the Ray cluster at '{address}' did not answer in {deadline_s:g} s; its "
            "head may be overloaded, or raise deadline_s"
        )
    return answers[0]


def _ask_head(
    address: ClusterAddress, end: float
) -> tuple[dict[str, Any], list[str] | None]:
    """Versions of the cluster and the addresses of its live nodes."""
    raylet: Any = _raylet
    client = raylet.GcsClient(address=str(address))
    versions: dict[str, Any] = {}
    # Ray keeps this where its own check looks; without it Ray's check must do.
    with suppress(ImportError, AttributeError, TypeError):
        from ray._common.usage import usage_lib  # noqa: PLC0415

        versions = usage_lib.get_cluster_metadata(client) or {}
    # The client is private to Ray; if another version differs, the check is skipped.
    addresses: list[str] | None = None
    with suppress(AttributeError, TypeError):
        nodes = client.get_all_node_info(timeout=_left(end))
        addresses = [
            node.node_manager_address for node in nodes.values() if node.state == 0
        ]
    return versions, addresses


def _explained(error: BaseException, address: ClusterAddress) -> DistributedError:
    text = str(error)
    refused = type(error).__name__ == "AuthenticationError"
    if refused or "unauthenticated" in text.lower() or "AuthToken" in text:
        token = find_token()
        return (
            missing_token(str(address))
            if token is None
            else refused_token(str(address), token)
        )
    return UserError(
        f"cannot join the Ray cluster at '{address}': {type(error).__name__}: {text}"
    )


def _check_versions(address: ClusterAddress, versions: dict[str, Any]) -> None:
    own = {"Ray": ray.__version__, "Python": platform.python_version()}
    theirs = {
        "Ray": versions.get("ray_version"),
        "Python": versions.get("python_version"),
    }
    # Unknown versions are left to Ray's own check.
    if all(theirs[name] in (None, own[name]) for name in own):
        return
    raise UserError(
        f"the Ray cluster at '{address}' runs Ray {theirs['Ray']} on Python "
        f"{theirs['Python']}, and this process Ray {own['Ray']} on Python "
        f"{own['Python']}; they must be the same: run the program in the cluster's "
        "environment"
    )


def _check_own_node(address: ClusterAddress, node_addresses: list[str] | None) -> None:
    """Ray wants a node on the driver's machine, and looks for one for a minute."""
    if node_addresses is None:
        return
    own = {
        entry.address for entries in psutil.net_if_addrs().values() for entry in entries
    }
    # A node may be registered under an address that no interface here has; its raylet
    # still runs on this machine.
    if own.intersection(node_addresses) or services.find_node_ids():
        return
    raise NotThereYetError(
        f"this machine is no node of the Ray cluster at '{address}', whose nodes are "
        f"{sorted(node_addresses) or 'gone'}: run the program on one of them, add this "
        f"machine by `ray start --address={address}`, or use `ray job submit`"
    )
