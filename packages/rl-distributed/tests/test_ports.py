from __future__ import annotations

import socket

import pytest

from rl_distributed.errors import ConfigError, ResourceInsufficientError
from rl_distributed.ports import PortAllocator, default_port_range, find_free_ports


def test_a_port_is_never_given_twice_even_by_another_allocator():
    first, second = PortAllocator(), PortAllocator()
    ports = first.allocate("twice", 20) + second.allocate("twice", 20)
    assert len(set(ports)) == 40
    low, high = default_port_range()
    assert all(low <= port < high for port in ports)


def test_a_port_in_use_is_not_given():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ResourceInsufficientError, match="1 free ports are needed"):
            find_free_ports(1, port, port + 1)


def test_ports_of_other_machines_are_remembered():
    ports = PortAllocator()
    assert ports.record("far", [5000, 5001])
    assert not ports.record("far", [5001, 5002])
    assert ports.given("far") == {5000, 5001}


@pytest.mark.parametrize("bounds", [(1, None), (None, 9), (9, 9), (0, 9), (1, 65537)])
def test_wrong_ranges(bounds):
    with pytest.raises(ConfigError, match="port_range_low and port_range_high"):
        PortAllocator(*bounds)
