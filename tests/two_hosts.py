"""Hosts of one Ray cluster on this machine, whose network can be cut.

```
switch (a network namespace): bridge -- link -- host 10.77.0.1  Ray's head, the driver
                                     -- link -- host 10.77.0.2
                                     -- link -- ...
```
A host has its own network, process ids, name, shared memory (/dev/shm) and folder of
Ray, so two hosts have nothing in common but the network and other folders of this
machine, which are to them what shared storage is to real ones.

The first process of each namespace holds it, and ends when a pipe of the test is
closed. The system then ends every other process in it and takes the network away, so
nothing is left behind, however the test ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "HEAD",
    "QUICK",
    "Host",
    "Hosts",
    "hosts",
    "wait_until",
    "why_impossible",
]

HEAD = "10.77.0.1"
"""Address of the first host."""
PORT = 6379
START_S = 120.0
COMMAND_S = 20.0
TOKEN = "0123456789abcdef0123456789abcdef"
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
_HOST = (*_NAMESPACES, "--fork", "--mount-proc", "--propagation", "private")
QUICK = {
    "health_check_initial_delay_ms": 1_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 5_000,
    "health_check_failure_threshold": 2,
}
"""Settings with which Ray gives up a silent host after 12 s; its own take a minute."""
# Variables of the surrounding session must not reach the hosts.
_OURS = ("RAY_", "RL_")


def why_impossible() -> str:
    """Return why hosts cannot be made here; empty: they can."""
    missing = [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name)]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with ExitStack() as closing:
            _switch(closing)
            _Namespace(closing, _HOST, "mount -t tmpfs tmpfs /dev/shm")
    except (OSError, RuntimeError) as error:
        return f"this system makes no hosts out of namespaces: {error}"
    return ""


def wait_until(
    condition: Callable[[], Any], what: str, deadline_s: float = START_S
) -> Any:
    """Wait for a condition and return what it found."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s:g} s in vain for {what}")
        pause.wait(0.05)
    return found


def _run(*words: str, inside: tuple[str, ...] = ()) -> str:
    """Run a short command; its output is in the error if it fails."""
    command = [*inside, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class _Namespace:
    """Namespaces of the kernel that last as long as this is open.

    Args:
        closing: Closes it.
        kinds: Options of `unshare`.
        setup: Shell commands that prepare it.
    """

    def __init__(
        self, closing: ExitStack, kinds: tuple[str, ...], setup: str = ":"
    ) -> None:
        self._holder = subprocess.Popen(
            # The shell reaps what has lost its parent.
            ["unshare", *kinds, "sh", "-c", f"set -e; {setup}; echo up; cat; true"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        closing.callback(self.end)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            _, err = self._holder.communicate(timeout=COMMAND_S)
            raise RuntimeError(err.strip() or "unshare failed")
        # With a namespace of process ids, `unshare` is the parent of the first.
        first = psutil.Process(self._holder.pid)
        if "--fork" in kinds:
            (first,) = first.children()
        self._first = first
        self.pid = first.pid

    def inside(self, *options: str) -> tuple[str, ...]:
        """Return the words that run a command in these namespaces."""
        return ("nsenter", "--target", str(self.pid), *options)

    def end(self) -> None:
        """Kill the first process, and with it all others; may be called again."""
        with suppress(psutil.NoSuchProcess):
            self._first.kill()
        with suppress(psutil.TimeoutExpired):
            self._first.wait(COMMAND_S)
        self._holder.kill()
        self._holder.communicate(timeout=COMMAND_S)


def _switch(closing: ExitStack) -> _Namespace:
    switch = _Namespace(closing, ("--net",))
    inside = switch.inside("--net")
    _run("ip", "link", "add", "bridge", "type", "bridge", inside=inside)
    _run("ip", "link", "set", "bridge", "up", inside=inside)
    return switch


class Host:
    """One host; made by `Hosts.add`."""

    def __init__(
        self, closing: ExitStack, folder: Path, switch: _Namespace, number: int
    ) -> None:
        self.name = f"host-{number}"
        self.address = f"10.77.0.{number}"
        self._switch, self._port = switch.inside("--net"), f"port-{number}"
        # All hosts have Ray's folder under the same name, as real ones do.
        self._folder = folder
        self.ray_folder = folder / self.name
        self.ray_folder.mkdir()
        setup = (
            f"hostname {self.name}; mount -t tmpfs tmpfs /dev/shm; "
            f"mount --bind {self.ray_folder} {folder / 'ray'}; ip link set lo up"
        )
        self._namespace = _Namespace(closing, _HOST, setup)
        self._started: list[subprocess.Popen[str]] = []
        closing.callback(self.lose)
        self._connect()

    def _connect(self) -> None:
        ends = ("type", "veth", "peer", "name", "eth0", "netns")
        pid = str(self._namespace.pid)
        _run("ip", "link", "add", self._port, *ends, pid, inside=self._switch)
        _run("ip", "link", "set", self._port, "master", "bridge", inside=self._switch)
        inside = self._namespace.inside("--net")
        address = f"{self.address}/24"
        _run("ip", "address", "add", address, "dev", "eth0", inside=inside)
        _run("ip", "link", "set", "eth0", "up", inside=inside)
        self.restore()

    def cut(self) -> None:
        """Cut the link to the other hosts."""
        _run("ip", "link", "set", self._port, "down", inside=self._switch)

    def restore(self) -> None:
        """Join the host to the others again."""
        _run("ip", "link", "set", self._port, "up", inside=self._switch)

    def lose(self) -> None:
        """Kill all its processes at once, and take it away; may be called again."""
        self._namespace.end()
        for process in self._started:
            process.wait(COMMAND_S)

    def sent_bytes(self) -> int:
        """Return how many bytes it has sent over its link."""
        counters = json.loads(
            _run(
                *("ip", "-json", "-statistics", "link", "show", "eth0"),
                inside=self._namespace.inside("--net"),
            )
        )
        return int(counters[0]["stats64"]["tx"]["bytes"])

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host, in a session of its own."""
        inside = self._namespace.inside(
            *_NAMESPACES, f"--wd={options.pop('cwd', self._folder)}"
        )
        process = subprocess.Popen(
            [*inside, *command],
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**variables(), **options.pop("env", {})},
            **options,
        )
        self._started.append(process)
        return process

    def join(self, *arguments: str, num_cpus: int, **resources: float) -> None:
        """Start Ray's processes on it, as part of the cluster.

        Args:
            arguments: Further ones of `ray start`.
            num_cpus: CPUs that Ray counts on it.
            resources: Further resources of the host.
        """
        command = [str(Path(sys.executable).with_name("ray")), "start"]
        command += [f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}"]
        command += [f"--resources={json.dumps(resources)}", "--disable-usage-stats"]
        command += [f"--object-store-memory={1 << 28}", *arguments]
        if self.address == HEAD:
            command += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            command += [f"--temp-dir={self._folder / 'ray'}"]
        else:
            command += [f"--address={HEAD}:{PORT}"]
        output = self.ray_folder / "start"
        with output.open("w") as log:
            done = self.start(command, stdout=log, stderr=subprocess.STDOUT)
            code = done.wait(START_S)
        if code:
            raise RuntimeError(f"Ray does not start:\n{output.read_text()}")


def variables() -> dict[str, str]:
    """Return the environment of all processes of the hosts."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    return {
        **kept,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "PYTHONDONTWRITEBYTECODE": "",
    }


class Hosts:
    """The hosts of a cluster; `hosts` makes and ends them."""

    def __init__(
        self, closing: ExitStack, folder: Path, system_config: Mapping[str, Any]
    ) -> None:
        self._closing, self._folder = closing, folder
        self._system_config = system_config
        (folder / "ray").mkdir()
        self._switch = _switch(closing)
        self._number = 0
        self.head: Host

    def add(self, num_cpus: int = 1, **resources: float) -> Host:
        """Add a host that is part of the cluster; the first is the head.

        Args:
            num_cpus: CPUs that Ray counts on it.
            resources: Further resources of the host.
        """
        self._number += 1
        host = Host(self._closing, self._folder, self._switch, self._number)
        head = self._number == 1 and self._system_config
        settings = (
            [f"--system-config={json.dumps(self._system_config)}"] if head else []
        )
        host.join(*settings, num_cpus=num_cpus, **resources)
        return host


@contextmanager
def hosts(system_config: Mapping[str, Any] | None = None) -> Iterator[Hosts]:
    """Make hosts, and end all of their processes at last.

    Args:
        system_config: Settings of Ray itself; None: its own.
    """
    # Short, as paths of sockets are limited.
    folder = Path(tempfile.mkdtemp(prefix="rl-hosts-", dir="/tmp"))
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Hosts(closing, folder, system_config or {})
