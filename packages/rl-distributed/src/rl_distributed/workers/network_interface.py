"""The network interface that the collectives of a worker use."""

from __future__ import annotations

import os

import psutil

__all__ = ["bind_gloo", "interface_of"]

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with an address; empty: none has."""
    for name, entries in psutil.net_if_addrs().items():
        # The system adds the interface to local IPv6 addresses: `fe80::1%eth0`.
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""


def bind_gloo(address: str) -> None:
    """Have process groups of gloo listen where the other nodes reach this one.

    By default gloo listens on the address that the host's name resolves to. That may be
    a loopback one (Debian's 127.0.1.1, or no entry at all), or that of another network.
    An interface that the environment names is kept.

    Args:
        address: That of the node, which the cluster's other nodes use.
    """
    if not os.environ.get(_GLOO_VARIABLE) and (name := interface_of(address)):
        os.environ[_GLOO_VARIABLE] = name
