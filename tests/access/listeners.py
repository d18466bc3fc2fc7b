"""Every listener, started here with one key file, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rl_algorithms.rollout.agents.model import ServedModel, Settings
from rl_algorithms.rollout.agents.model_call import ModelCall
from rl_algorithms.rollout.agents.policy_server import PolicyServer
from rl_algorithms.rollout.agents.session import AgentSession
from rl_cli.report.live_runs import LiveRuns
from rl_cli.report.watch_server import watch_app, watch_door, watch_routes
from rl_distributed.access.bound_socket import bound_socket
from rl_distributed.access.door import Door
from rl_distributed.access.http_app import RouteTable
from rl_distributed.access.http_thread import HttpThread
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.roles import ROLES, Role
from rl_distributed.metrics.sinks.scraped import MetricsServer, scraped_routes
from rl_distributed.runs.control_address import ControlAddress, control_routes
from rl_distributed.runs.control_config import ControlConfig
from rl_envs.agents.tasks import AgentLimits
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.runs import (
    Command,
    Program,
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
)
from rl_envs.sandbox.service import SandboxService
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer
from rl_models.serving.config import ServeConfig
from rl_models.serving.fleet import UpdateReport
from rl_models.serving.router import Router
from rl_models.serving.weights_root import WeightsRoot

DEADLINE_S = 60.0


class Keys:
    """A file with keys of each role and state, and keys that are in no file."""

    def __init__(self, folder: Path) -> None:
        self.file = KeyFile(folder / "secret-place" / "keys.json")
        self.valid = {role: self._make(f"valid {role}", role) for role in ROLES}
        self.expired = {role: self._make(f"expired {role}", role) for role in ROLES}
        self.revoked = {role: self._make(f"revoked {role}", role) for role in ROLES}
        content = json.loads(self.file.path.read_text())
        for key in content["keys"]:
            if key["name"].startswith("expired"):
                key["expires"] = "2020-01-01T00:00:00+00:00"
        self.file.path.write_text(json.dumps(content))
        for role in ROLES:
            self.file.revoke(f"revoked {role}")
        admin = self.valid["admin"]
        self.wrong = {
            "unknown": f"rlk_{'0' * 12}_{secrets.token_urlsafe(32)}",
            "of another secret": admin[:17] + secrets.token_urlsafe(32),
            "cut off": admin[:-1],
            "with more": admin + "A",
            "in capitals": admin.upper(),
            "malformed": "rlk_" + "x" * 4_000,
            "not ASCII": "rlk_\xff\xfe",
        }

    def _make(self, name: str, role: Role) -> str:
        return self.file.create(name, role)[1]

    @property
    def secrets(self) -> list[str]:
        """Secrets that no response may show."""
        keys = [*self.valid.values(), *self.expired.values(), *self.revoked.values()]
        parts = [key[17:] for key in keys]
        stored = [value for k in self.file.read() for value in (k.digest, k.salt)]
        return [*parts, *stored, str(self.file.path), "secret-place"]


@dataclass
class Listener:
    """A running listener."""

    url: str
    table: RouteTable
    door: Door
    stop: Callable[[], None] = field(repr=False)
    own_key: str = ""
    """A key that the listener itself has issued, if any."""

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    def ask(
        self,
        method: str,
        path: str,
        key: str | None = None,
        body: bytes | None = None,
        **headers: str,
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Send one request."""
        connection = http.client.HTTPConnection(*self.place, timeout=DEADLINE_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent.setdefault("X-RL-Nonce", secrets.token_hex(16))
        sent.setdefault("X-RL-Time", f"{time.time():.3f}")
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, body=body, headers=sent)
            reply = connection.getresponse()
            return reply.status, reply.read().decode("utf-8", "replace"), reply.headers
        finally:
            connection.close()


class _Owner:
    """Has no replicas."""

    def status(self) -> dict[str, Any]:
        return {"model": "m", "replicas": []}

    def update_weights(
        self, path: str, version: int | None = None, *, by: str = ""
    ) -> UpdateReport:
        raise AssertionError("no request here names a folder of weights")

    def report_lost(self, endpoint: Any, reason: str) -> None:
        raise AssertionError("there are no replicas")


def _serve(keys: KeyFile | None, folder: Path, **fixed: Any) -> Listener:
    root = folder / "weights"
    root.mkdir(exist_ok=True)
    listener = bound_socket("127.0.0.1", 0)
    loop, ready = asyncio.new_event_loop(), threading.Event()
    config = ServeConfig(max_body_bytes=65_536)
    found: list[Router] = []

    async def start() -> None:
        router = Router(
            config,
            _Owner(),
            api_key=fixed.get("api_key"),
            weights_key=fixed.get("weights_key"),
            weights_root=WeightsRoot(root),
            key_file=keys,
        )
        found.append(router)
        await router.start(listener)
        # Requests are answered at once: no replica will start.
        await router.balancer.give_up()
        ready.set()

    def work() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(found[0].stop(0.0))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(DEADLINE_S)

    def stop() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()

    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    return Listener(url, found[0].routes, found[0]._access.door, stop)


def _watch(keys: KeyFile | None, folder: Path, **fixed: Any) -> Listener:
    run = folder / "watched"
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text('{"kind": "algorithm", "name": "grpo"}')
    door = watch_door(fixed.get("token"), key_file=keys)
    live = LiveRuns([run])
    thread = HttpThread(watch_app(live, door), door, bound_socket("127.0.0.1", 0))
    return Listener(thread.url, watch_routes(live, door), door, thread.close)


def _metrics(keys: KeyFile | None, folder: Path, **fixed: Any) -> Listener:
    path = None if keys is None else str(keys.path)

    def answer(accepts: str) -> tuple[str, bytes]:
        return "text/plain", b"loss 1\n"

    server = MetricsServer("127.0.0.1", 0, answer, path, False)
    door = server.door
    return Listener(server.url, scraped_routes(answer, door), door, server.close)


def _run(keys: KeyFile | None, folder: Path, **fixed: Any) -> Listener:
    assert keys is not None
    run = folder / "controlled"
    run.mkdir(exist_ok=True)
    config = ControlConfig(keys_file=str(keys.path))
    address = ControlAddress(run, config, lambda: {"step": 3})
    table = control_routes(run, dict, address.door)
    return Listener(address.url, table, address.door, address.close)


class _Sandbox(Sandbox):
    """A sandbox that runs nothing."""

    level = SandboxLevel.LANDLOCK
    num_slots = 1
    _missing: ClassVar[dict[str, str]] = {}

    def run_command(
        self, command: Command, limits: SandboxLimits | None = None
    ) -> SandboxResult:
        raise AssertionError("no request here has a command")

    def run_built(
        self, program: Program, built: bytes, limits: SandboxLimits
    ) -> SandboxResult:
        raise AssertionError("no request here has a program")

    def close(self) -> None:
        pass


def _sandbox(keys: KeyFile | None, folder: Path, **fixed: Any) -> Listener:
    path = None if keys is None else str(keys.path)
    service = SandboxService(_Sandbox(), keys_file=path)
    return Listener(service.url, service.routes, service.door, service.close)


def _agents(keys: KeyFile | None, folder: Path, **fixed: Any) -> Listener:
    tokenizer = build_tokenizer(TokenizerBuildConfig(kind="characters"))
    limits = AgentLimits("policy", 1 << 30, 60.0, None, 1)
    model = ServedModel(tokenizer, limits, row_limit=4_096, use_chat_template=None)

    def sample(calls: Sequence[ModelCall]) -> None:
        raise AssertionError("no request here has messages")

    session = AgentSession(model, Settings(), int, sample, lambda version: None)
    server = PolicyServer(model, keys)
    server.open(session)
    url = server.base_url.removesuffix("/v1")
    return Listener(url, server.routes, server.door, server.close, session.key)


STARTS: dict[str, Callable[..., Listener]] = {
    "serve": _serve,
    "watch": _watch,
    "metrics": _metrics,
    "run": _run,
    "sandbox": _sandbox,
    "agents": _agents,
}
"""Every listener, by its name in the metrics."""


@contextmanager
def started(
    name: str, keys: KeyFile | None, folder: Path, **fixed: Any
) -> Iterator[Listener]:
    """Start a listener, and stop it on exit."""
    listener = STARTS[name](keys, folder, **fixed)
    try:
        yield listener
    finally:
        listener.stop()


def send_raw(place: tuple[str, int], data: bytes, *, half: bool = False) -> bytes:
    """Send bytes, and return the response until the other side closes.

    Args:
        place: Host and port.
        data: What to send.
        half: Close at once, without waiting for an answer.
    """
    found = b""
    with contextlib.suppress(OSError), socket.create_connection(place, 10.0) as sock:
        sock.settimeout(10.0)
        sock.sendall(data)
        if half:
            return b""
        sock.shutdown(socket.SHUT_WR)
        while len(found) < 1 << 20 and (part := sock.recv(65_536)):
            found += part
    return found
