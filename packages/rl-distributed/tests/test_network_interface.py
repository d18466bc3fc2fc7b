from __future__ import annotations

import os

import psutil
import pytest

from rl_distributed.workers.network_interface import bind_gloo, interface_of

VARIABLE = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that it is put back whatever a test leaves.
    monkeypatch.setenv(VARIABLE, "")


def test_an_interface_is_found_by_each_of_its_addresses() -> None:
    interfaces = psutil.net_if_addrs()
    assert any("127.0.0.1" in str(entries) for entries in interfaces.values())
    for name, entries in interfaces.items():
        for entry in entries:
            found = interface_of(entry.address.partition("%")[0])
            # The same link-local address may be at several.
            own = {e.address.partition("%")[0] for e in interfaces[found]}
            assert entry.address.partition("%")[0] in own, name


def test_no_interface_has_the_address_of_another_machine() -> None:
    assert interface_of("192.0.2.1") == ""


def test_gloo_listens_where_the_other_nodes_reach_this_one() -> None:
    bind_gloo("127.0.0.1")
    assert os.environ[VARIABLE] == interface_of("127.0.0.1")


def test_an_interface_that_the_environment_names_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    bind_gloo("127.0.0.1")
    assert os.environ[VARIABLE] == "ib0"


def test_gloo_is_left_alone_where_no_interface_has_the_address() -> None:
    bind_gloo("192.0.2.1")
    assert os.environ[VARIABLE] == ""
