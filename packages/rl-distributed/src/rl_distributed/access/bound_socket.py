"""Sockets that are bound before anything slow is begun."""

from __future__ import annotations

import errno
import socket

from rl_distributed.errors import ConfigError

__all__ = ["bound_socket", "url_of"]


def bound_socket(
    host: str, port: int, *, how_to_change: str = "--port and --host"
) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Name or address of this machine.
        port: The port; 0: any that is free.
        how_to_change: Names of the settings, for messages: `--port and --host`.

    Raises:
        ConfigError: The port is taken, or the address is not one of this machine.
    """
    port_setting, _, host_setting = how_to_change.partition(" and ")
    listener: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Only this fails if another socket listens there: with SO_REUSEADDR, binding
        # may succeed.
        listener.listen(128)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        number = error.errno if isinstance(error, OSError) else None
        said = error.strerror if isinstance(error, OSError) else str(error)
        remedy = {
            errno.EADDRINUSE: "another program listens there; end it, or choose "
            f"another port ({port_setting}; 0 takes any that is free)",
            errno.EACCES: "this user may not; choose a port above 1023 "
            f"({port_setting})",
        }.get(number or 0, f"choose an address of this machine ({host_setting})")
        raise ConfigError(
            f"cannot listen on {host}:{port} ({said}): {remedy}"
        ) from error
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the address at which a socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return (
        f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
    )
