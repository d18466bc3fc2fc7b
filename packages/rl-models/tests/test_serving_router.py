"""The router before fake replicas: real HTTP on both sides, scripted answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from rl_distributed.errors import ConfigError
from rl_models.serving.balancer import Endpoint
from rl_models.serving.config import ServeConfig
from rl_models.serving.fleet import UpdateReport
from rl_models.serving.router import Router
from rl_models.serving.weights_root import WeightsRoot

PATH = "/v1/completions"
WEIGHTS_KEY = "other"
WEIGHTS_HEADERS = {"Authorization": f"Bearer {WEIGHTS_KEY}"}
DEADLINE_S = 60.0


class Replica:
    """A server that handles each request as the test specifies."""

    def __init__(self) -> None:
        self.is_alive = True
        self.bodies: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.behaviour: Callable[[Replica, web.Request], Awaitable[Any]] = answer
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._post)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _post(self, request: web.Request) -> Any:
        self.bodies.append(await request.json())
        self.asked.set()
        try:
            return await self.behaviour(self, request)
        except asyncio.CancelledError:
            self.ended.append(request.path)
            raise

    async def _health(self, request: web.Request) -> web.Response:
        if not self.is_alive and request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer inner"
        return web.json_response({"object": "list", "data": []})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text='# TYPE n counter\nn{a="1"} 3\nn 4\n')


async def answer(replica: Replica, request: web.Request) -> web.Response:
    return web.json_response({"choices": []}, headers={"x-rl-weight-version": "5"})


async def answer_at_the_gate(replica: Replica, request: web.Request) -> web.Response:
    await replica.gate.wait()
    return await answer(replica, request)


async def die(replica: Replica, request: web.Request) -> web.Response:
    replica.is_alive = False
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def lose_the_engine(replica: Replica, request: web.Request) -> web.Response:
    replica.is_alive = False
    return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)


async def _begin(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    return stream


async def stream(replica: Replica, request: web.Request) -> web.StreamResponse:
    response = await _begin(request)
    for number in range(3):
        await response.write(f'data: {{"n": {number}}}\n\n'.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def stream_and_die(replica: Replica, request: web.Request) -> Any:
    response = await _begin(request)
    await response.write(b'data: {"n": 0}\n\ndata: {"n": 1')
    await replica.gate.wait()
    return await die(replica, request)


async def stream_and_end_early(replica: Replica, request: web.Request) -> Any:
    response = await _begin(request)
    await response.write(b'data: {"n": 0}\n\n')
    return response


async def stream_and_hang(replica: Replica, request: web.Request) -> Any:
    response = await _begin(request)
    await response.write(b'data: {"n": 0}\n\n')
    await replica.gate.wait()
    return response


class Owner:
    """Records what the router asks of the owner of the replicas."""

    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []
        self.updates: list[tuple[str, int | None]] = []
        self.report = UpdateReport(3, {}, 2)

    def status(self) -> dict[str, Any]:
        return {"model": "m", "replicas": [{"replica": 0}, {"replica": 1}]}

    def update_weights(
        self, path: str, version: int | None = None, *, by: str = "program"
    ) -> UpdateReport:
        self.updates.append((path, version))
        if path.endswith("wrong"):
            raise ConfigError("no such folder")
        return self.report

    def report_lost(self, endpoint: Endpoint, reason: str) -> None:
        self.lost.append((endpoint.replica, reason))


class Setup:
    """A router with replicas, and a client."""

    def __init__(self, num_replicas: int, key: str | None, **settings: Any) -> None:
        self.owner = Owner()
        self.key = key
        weights_root: Path | None = settings.pop("weights_root", None)
        config = ServeConfig.from_dict(settings, source="test")
        self.router = Router(
            config,
            self.owner,
            api_key=key,
            weights_key=None if weights_root is None else WEIGHTS_KEY,
            weights_root=None if weights_root is None else WeightsRoot(weights_root),
            replica_key="inner",
        )
        self.replicas = [Replica() for _ in range(num_replicas)]

    async def start(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await self.router.start(listener)
        self.endpoints = [
            Endpoint(number, await replica.start())
            for number, replica in enumerate(self.replicas)
        ]
        for endpoint in self.endpoints:
            await self.router.add(endpoint)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.client = aiohttp.ClientSession(self.url, headers=headers)

    async def stop(self) -> None:
        for replica in self.replicas:
            replica.gate.set()
        await self.router.stop(0.0)
        for replica in self.replicas:
            await replica.stop()
        await self.client.close()

    async def post(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        async with self.client.post(PATH, json={"prompt": "a", **fields}) as said:
            return said.status, await said.json()

    async def events(self, **fields: Any) -> list[Any]:
        fields = {"prompt": "a", "stream": True, **fields}
        async with self.client.post(PATH, json=fields) as said:
            assert said.status == 200
            events = (await said.text()).removesuffix("\n\n").split("\n\n")
        texts = [event.removeprefix("data: ") for event in events]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


@asynccontextmanager
async def running(
    num_replicas: int = 1, key: str | None = None, **settings: Any
) -> AsyncIterator[Setup]:
    setup = Setup(num_replicas, key, **settings)
    await setup.start()
    try:
        yield setup
    finally:
        await setup.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(bounded())


def test_requests_go_to_the_replica_with_the_fewest_tokens() -> None:
    async def test() -> None:
        async with running(2) as setup:
            for replica in setup.replicas:
                replica.behaviour = answer_at_the_gate
            first = asyncio.create_task(setup.post(max_tokens=1_000))
            await setup.replicas[0].asked.wait()
            small = [asyncio.create_task(setup.post(max_tokens=n)) for n in (1, 2, 3)]
            while len(setup.replicas[1].bodies) < 3:
                await setup.replicas[1].asked.wait()
                await asyncio.sleep(0)
            for replica in setup.replicas:
                replica.gate.set()
            assert [status for status, _ in await asyncio.gather(first, *small)] == [
                200
            ] * 4
            assert [body["max_tokens"] for body in setup.replicas[0].bodies] == [1_000]
            assert all(e.num_requests == e.num_tokens == 0 for e in setup.endpoints)

    run(test)


@pytest.mark.parametrize("behaviour", [die, lose_the_engine])
def test_a_death_before_the_first_byte_moves_the_request(behaviour: Any) -> None:
    async def test() -> None:
        async with running(2) as setup:
            setup.replicas[0].behaviour = behaviour
            assert await setup.post() == (200, {"choices": []})
            assert [number for number, _ in setup.owner.lost] == [0]
            assert await setup.post() == (200, {"choices": []})
            assert len(setup.replicas[0].bodies) == 1
            assert len(setup.replicas[1].bodies) == 2

    run(test)


def test_a_connection_alone_that_breaks_costs_no_replica() -> None:
    async def break_once(replica: Replica, request: web.Request) -> Any:
        if len(replica.bodies) > 1:
            return await answer(replica, request)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def test() -> None:
        async with running(1) as setup:
            setup.replicas[0].behaviour = break_once
            assert (await setup.post())[0] == 200
            assert setup.owner.lost == []

    run(test)


def test_a_request_that_kills_all_it_meets_is_given_up() -> None:
    async def test() -> None:
        async with running(4) as setup:
            for replica in setup.replicas:
                replica.behaviour = die
            status, said = await setup.post()
            assert status == 502
            assert said["error"]["code"] == "replica_lost"
            assert len(setup.owner.lost) == 3

    run(test)


def test_a_stream_is_passed_on_as_it_is() -> None:
    async def test() -> None:
        async with running(1) as setup:
            setup.replicas[0].behaviour = stream
            assert await setup.events() == [{"n": 0}, {"n": 1}, {"n": 2}, "[DONE]"]

    run(test)


@pytest.mark.parametrize("behaviour", [stream_and_die, stream_and_end_early])
def test_a_stream_that_breaks_ends_with_an_error(behaviour: Any) -> None:
    async def test() -> None:
        async with running(2) as setup:
            setup.replicas[0].behaviour = behaviour
            setup.replicas[0].gate.set()
            first, last = await setup.events()
            # The half event is not shown, and the answer does not start over.
            assert first == {"n": 0}
            assert last["error"]["code"] == "replica_lost"
            assert setup.replicas[1].bodies == []

    run(test)


def test_a_request_that_takes_too_long_gets_an_error() -> None:
    async def test() -> None:
        async with running(1, request_deadline_s=0.3) as setup:
            replica = setup.replicas[0]
            replica.behaviour = answer_at_the_gate
            status, said = await setup.post()
            assert (status, said["error"]["code"]) == (504, "deadline_exceeded")
            # The replica is told to stop working.
            while not replica.ended:
                await asyncio.sleep(0.01)
            assert setup.owner.lost == []

    run(test)


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    async def test() -> None:
        # Its beginning arrives in time, even on a busy machine.
        async with running(1, request_deadline_s=2.0) as setup:
            replica = setup.replicas[0]
            replica.behaviour = stream_and_hang
            first, last = await setup.events()
            assert first == {"n": 0}
            assert last["error"]["code"] == "deadline_exceeded"
            while not replica.ended:
                await asyncio.sleep(0.01)
            assert setup.owner.lost == []

    run(test)


def test_a_client_that_hangs_up_ends_the_work_of_the_replica() -> None:
    async def test() -> None:
        async with running(1) as setup:
            setup.replicas[0].behaviour = answer_at_the_gate
            post = asyncio.create_task(setup.post())
            await setup.replicas[0].asked.wait()
            post.cancel()
            while not setup.replicas[0].ended:
                await asyncio.sleep(0.01)
            while setup.endpoints[0].num_requests:
                await asyncio.sleep(0.01)

    run(test)


def test_requests_wait_for_a_replica_and_are_told_if_none_will_come() -> None:
    async def test() -> None:
        async with running(0) as setup:
            replica = Replica()
            setup.replicas.append(replica)
            url = await replica.start()
            post = asyncio.create_task(setup.post())
            assert (await setup.client.get("/health")).status == 503
            assert not post.done()
            endpoint = Endpoint(0, url)
            await setup.router.add(endpoint)
            assert (await post)[0] == 200
            assert (await setup.client.get("/health")).status == 200
            setup.router.remove(endpoint)
            await setup.router.balancer.give_up()
            status, said = await setup.post()
            assert (status, said["error"]["code"]) == (503, "no_replica")

    run(test)


def test_an_idle_replica_that_dies_is_noticed() -> None:
    async def test() -> None:
        async with running(1) as setup:
            setup.replicas[0].is_alive = False
            while not setup.owner.lost:
                await asyncio.sleep(0.01)
            assert setup.router.balancer.endpoints == []

    run(test)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer right"}, 200),
        ({"Authorization": "bearer right"}, 200),
        ({"Authorization": "Bearer righ"}, 401),
        ({"Authorization": "Basic right"}, 401),
        ({"Authorization": "Bearer r\u00efght"}, 401),
        ({}, 401),
    ],
)
def test_only_the_right_key_opens_the_door(
    headers: dict[str, str], status: int
) -> None:
    async def test() -> None:
        async with running(1, "right") as setup:
            # A separate client: the setup's always sends the key.
            async with aiohttp.ClientSession(setup.url, headers=headers) as client:
                said = await client.post(PATH, json={"prompt": "a"})
                assert said.status == status
                assert (await client.get("/rl/status")).status == status
                assert (await client.get("/health")).status == 200
            assert len(setup.replicas[0].bodies) == (status == 200)

    run(test)


def test_without_a_key_only_names_of_this_machine_are_answered() -> None:
    async def test() -> None:
        async with running(1) as setup:
            headers = {"Host": "evil.example"}
            said = await setup.client.post(PATH, json={}, headers=headers)
            assert said.status == 403
            said = await setup.client.post(PATH, json={}, headers={"Host": "localhost"})
            assert said.status == 200

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "code"),
    [
        ("POST", PATH, {"data": b"x" * 2_000, "json": None}, 400, "bad_content_type"),
        ("POST", PATH, {"json": {"prompt": "x" * 2_000}}, 413, "body_too_large"),
        ("POST", PATH, {"json": [1]}, 400, "bad_json"),
        ("POST", PATH, {"data": b"{"}, 400, "bad_json"),
        ("GET", "/v1/nothing", {}, 404, "not_found"),
        ("GET", PATH, {}, 405, "bad_request"),
        ("POST", "/rl/weights", {"json": {"path": 3}}, 400, "bad_request"),
        ("POST", "/rl/weights", {"json": {"path": "wrong"}}, 400, "weights_refused"),
        ("POST", "/rl/weights", {"json": {"path": "x" * 2_000}}, 413, "body_too_large"),
    ],
)
def test_wrong_requests_get_an_error_as_openai_writes_it(
    tmp_path: Path,
    method: str,
    path: str,
    sent: dict[str, Any],
    status: int,
    code: str,
) -> None:
    async def test() -> None:
        settings = {"max_body_bytes": 1_000, "weights_root": tmp_path}
        async with running(1, **settings) as setup:
            headers = dict(WEIGHTS_HEADERS)
            if "data" in sent and "json" not in sent:
                headers["Content-Type"] = "application/json"
            said = await setup.client.request(method, path, headers=headers, **sent)
            error = (await said.json())["error"]
            assert (said.status, error["code"]) == (status, code)
            assert set(error) >= {"message", "type", "param", "code"}
            assert setup.replicas[0].bodies == []

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        b"no http at all\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    ],
    ids=["no http", "long", "negative"],
)
def test_a_head_that_is_no_http_fills_no_log(
    caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    async def test() -> None:
        async with running(1) as setup:
            address = urlsplit(setup.url)
            reader, writer = await asyncio.open_connection(
                address.hostname, address.port
            )
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
            writer.close()

    run(test)
    # One short line, rate-limited per minute, and no traceback.
    (line,) = caplog.records
    assert line.exc_info is None
    assert "serve refused a malformed request" in line.getMessage()


def test_a_body_of_an_announced_size_is_not_read() -> None:
    async def test() -> None:
        async with running(1, max_body_bytes=1_000) as setup:
            address = urlsplit(setup.url)
            reader, writer = await asyncio.open_connection(
                address.hostname, address.port
            )
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n"
            head += "Content-Type: application/json\r\nContent-Length: 10000000000\r\n"
            writer.write(f"{head}\r\n".encode())
            # Not a single byte of the body was sent.
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()

    run(test)


def test_more_requests_than_allowed_are_told_to_come_back() -> None:
    async def test() -> None:
        async with running(1, max_requests=1) as setup:
            setup.replicas[0].behaviour = answer_at_the_gate
            first = asyncio.create_task(setup.post())
            await setup.replicas[0].asked.wait()
            status, said = await setup.post()
            assert (status, said["error"]["code"]) == (429, "too_many_requests")
            setup.replicas[0].gate.set()
            assert (await first)[0] == 200

    run(test)


def test_a_shutdown_lets_requests_end() -> None:
    async def test() -> None:
        async with running(1) as setup:
            setup.replicas[0].behaviour = answer_at_the_gate
            post = asyncio.create_task(setup.post())
            await setup.replicas[0].asked.wait()
            ending = asyncio.create_task(setup.router.stop(DEADLINE_S))
            await asyncio.sleep(0)
            setup.replicas[0].gate.set()
            assert (await post)[0] == 200
            assert await ending
            with pytest.raises(aiohttp.ClientConnectorError):
                await setup.post()
            setup.router.stop = _nothing  # type: ignore[method-assign]

    run(test)


def test_a_shutdown_ends_what_takes_too_long_with_an_error() -> None:
    async def test() -> None:
        async with running(1) as setup:
            setup.replicas[0].behaviour = stream_and_hang
            fields = {"prompt": "a", "stream": True}
            async with setup.client.post(PATH, json=fields) as said:
                assert said.status == 200  # the stream has begun
                assert not await setup.router.stop(0.2)
                *_, last = (await said.text()).removesuffix("\n\n").split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["code"] == "shutdown"
            setup.router.stop = _nothing  # type: ignore[method-assign]

    run(test)


async def _nothing(drain_s: float) -> bool:
    return True


async def change_weights(
    setup: Setup, update: dict[str, Any], key: str | None = WEIGHTS_KEY
) -> aiohttp.ClientResponse:
    # A separate client: the setup's always sends the API key.
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(setup.url, headers=headers) as client:
        said = await client.post("/rl/weights", json=update)
        await said.read()
        return said


@pytest.mark.parametrize(
    ("api_key", "sent", "status", "code"),
    [
        ("right", WEIGHTS_KEY, 200, None),
        (None, WEIGHTS_KEY, 200, None),
        ("right", "right", 403, "weights_key_needed"),
        ("right", None, 401, "invalid_weights_key"),
        ("right", "wrong", 401, "invalid_weights_key"),
        (None, None, 401, "invalid_weights_key"),
        (None, "wrong", 401, "invalid_weights_key"),
    ],
)
def test_only_the_weights_key_changes_weights(
    tmp_path: Path, api_key: str | None, sent: str | None, status: int, code: str | None
) -> None:
    async def test() -> None:
        async with running(1, api_key, weights_root=tmp_path) as setup:
            said = await change_weights(setup, {"path": "m"}, sent)
            assert said.status == status
            if code is not None:
                assert (await said.json())["error"]["code"] == code
            assert len(setup.owner.updates) == (status == 200)
            # It grants nothing else.
            if api_key is not None:
                async with aiohttp.ClientSession(setup.url) as client:
                    asked = await client.get("/rl/status", headers=WEIGHTS_HEADERS)
                    assert asked.status == 401

    run(test)


@pytest.mark.parametrize(
    ("api_key", "sent", "status"),
    [("right", "right", 403), (None, None, 403), ("right", "wrong", 401)],
)
def test_without_a_weights_key_nobody_changes_weights(
    api_key: str | None, sent: str | None, status: int
) -> None:
    async def test() -> None:
        async with running(1, api_key) as setup:
            said = await change_weights(setup, {"path": "/"}, sent)
            assert said.status == status
            if status == 403:
                error = (await said.json())["error"]
                assert error["code"] == "weights_off"
                assert "--weights-key" in error["message"]
            assert setup.owner.updates == []

    run(test)


def test_another_name_of_this_machine_changes_no_weights(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(1, weights_root=tmp_path) as setup:
            headers = {**WEIGHTS_HEADERS, "Host": "evil.example"}
            update = {"path": "m"}
            said = await setup.client.post("/rl/weights", json=update, headers=headers)
            assert said.status == 403
            assert setup.owner.updates == []

    run(test)


def test_weights_status_models_and_metrics(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(2, weights_root=tmp_path) as setup:
            said = await change_weights(setup, {"path": "m"})
            assert await said.json() == {"version": 3, "num_updated": 2}
            assert setup.owner.updates == [(str(tmp_path.resolve() / "m"), None)]
            setup.owner.report = UpdateReport(4, {1: "bad tensor"}, 1)
            said = await change_weights(setup, {"path": "m", "version": 4})
            error = (await said.json())["error"]
            assert (said.status, error["failed"]) == (500, [1])
            assert "bad tensor" in error["message"]
            async with setup.client.post(PATH, json={"prompt": "a"}) as answered:
                assert answered.headers["x-rl-weight-version"] == "5"
                assert answered.headers["x-rl-replica"] == "0"
            status = await (await setup.client.get("/rl/status")).json()
            assert [row["served"] for row in status["replicas"]] == [1, 0]
            assert (await setup.client.get("/v1/models")).status == 200
            lines = (await (await setup.client.get("/metrics")).text()).splitlines()
            assert "rl_serve_replicas 2" in lines
            assert lines.count("# TYPE n counter") == 1
            assert 'n{replica="1",a="1"} 3' in lines
            assert 'n{replica="0"} 4' in lines

    run(test)


async def fail(replica: Replica, request: web.Request) -> web.Response:
    error = {"message": "Internal server error", "type": "InternalServerError"}
    words = ["Internal server error", "ERROR scheduler.py: out of blocks"]
    return web.json_response({"error": error, "rl_cause": words}, status=500)


async def fail_in_a_stream(
    replica: Replica, request: web.Request
) -> web.StreamResponse:
    response = await _begin(request)
    event = {"error": {"message": "oh", "code": 500}, "rl_cause": ["no more blocks"]}
    await response.write(b'data: {"n": 0}\n\n')
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def test_the_cause_of_a_failure_is_logged_and_the_client_told_plainly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        async with running() as setup:
            setup.replicas[0].behaviour = fail
            async with setup.client.post(PATH, json={"prompt": "x"}) as said:
                body = await said.json()
                assert said.status == 500
                request_id = said.headers["x-request-id"]
            assert set(body) == {"error"}
            assert body["error"]["code"] == "engine_error"
            assert request_id in body["error"]["message"]
            assert "blocks" not in json.dumps(body)
            (line,) = caplog.messages
            assert f"POST {PATH} failed on replica 0" in line
            assert request_id in line
            assert "out of blocks" in line
            caplog.clear()
            setup.replicas[0].behaviour = fail_in_a_stream
            async with setup.client.post(PATH, json={"stream": True}) as said:
                text = await said.text()
                request_id = said.headers["x-request-id"]
            assert "no more blocks" not in text
            event = json.loads(text.split("\n\n")[1].removeprefix("data: "))
            assert request_id in event["error"]["message"]
            (line,) = caplog.messages
            assert "no more blocks" in line
            assert request_id in line

    run(check)
