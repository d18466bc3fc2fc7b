from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rl_distributed_scripts import SCRIPTS, clean_environment

from rl_distributed.cluster.ports import (
    PortAllocator,
    PortOwner,
    default_port_range,
    find_free_ports,
    reserve_ports,
)
from rl_distributed.errors import (
    ConfigError,
    LockHeldError,
    ResourceInsufficientError,
)

LOW, HIGH = default_port_range()


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


@contextlib.contextmanager
def program(folder, rounds, count, low=LOW, high=HIGH):
    """Start a program that takes ports and then waits; return them and the process."""
    arguments = [str(folder), *map(str, (rounds, count, low, high))]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "take_ports.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def taken_by(process):
    line = process.stdout.readline()
    assert line, "the program has ended"
    return json.loads(line)


def test_programs_at_the_same_time_get_different_ports(tmp_path):
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(program(tmp_path, 15, 4, LOW, LOW + 900))
            for _ in range(8)
        ]
        ports = [port for process in programs for port in taken_by(process)]
    assert len(ports) == 8 * 15 * 4
    assert len(set(ports)) == len(ports)


def test_threads_at_the_same_time_get_different_ports(tmp_path):
    def take(_):
        return reserve_ports(3, LOW, LOW + 600, registry=tmp_path)

    with ThreadPoolExecutor(8) as pool:
        ports = [port for found in pool.map(take, range(40)) for port in found]
    assert len(set(ports)) == 120


def test_ports_of_a_killed_program_are_free_again(tmp_path):
    with program(tmp_path, 1, 8, LOW, LOW + 10) as process:
        held = taken_by(process)
        with pytest.raises(ResourceInsufficientError, match="5 free ports are needed"):
            reserve_ports(5, LOW, LOW + 10, registry=tmp_path)
    again = reserve_ports(5, LOW, LOW + 10, registry=tmp_path)
    assert set(again) & set(held)


def test_ports_of_another_machine_stay_for_a_while(tmp_path, monkeypatch):
    far = PortOwner("another machine", os.getpid(), 0.0)
    first = reserve_ports(5, LOW, LOW + 9, far, registry=tmp_path)
    assert not set(first) & set(reserve_ports(3, LOW, LOW + 9, registry=tmp_path))
    monkeypatch.setattr("rl_distributed.cluster.ports._LEASE_S", -1.0)
    assert set(first) & set(reserve_ports(5, LOW, LOW + 9, registry=tmp_path))


def test_a_process_with_the_number_of_an_old_one_owns_nothing(monkeypatch):
    now = PortOwner.this_process()
    earlier = PortOwner(now.machine, now.pid, now.started - 100)
    assert earlier.is_gone(0.0, 0.0)
    assert not now.is_gone(0.0, 0.0)
    # The kernel counts it back from the time of day, which somebody may set.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: time.time() + 3600)
    assert not now.is_gone(0.0, 0.0)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', "null"])
def test_damaged_notes_are_made_anew(tmp_path, content):
    (tmp_path / "ports.json").write_text(content)
    ports = reserve_ports(2, LOW, HIGH, registry=tmp_path)
    assert not set(ports) & set(reserve_ports(2, LOW, HIGH, registry=tmp_path))


def test_the_wait_for_others_ends(tmp_path):
    reserve_ports(1, LOW, HIGH, registry=tmp_path)
    with (tmp_path / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            LockHeldError, match=r"notes of ports .* held by another process"
        ):
            reserve_ports(1, LOW, HIGH, registry=tmp_path, deadline_s=0.1)


def test_a_registry_that_is_no_folder_of_ours_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a folder of this user"):
        reserve_ports(1, LOW, HIGH, registry=tmp_path / "link")
    assert (tmp_path / "real").stat().st_uid == os.getuid()
