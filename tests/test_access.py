"""Access control: every route of every listener, with every kind of key.

The routes come from the listeners' own tables. A route without a row in `LOWEST`, a row
without a route, or a source file with a listener that is not started here is a failure.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from access.listeners import STARTS, Keys, Listener, started

from rl_distributed.access.door import AccessRequest, Door, Refusal
from rl_distributed.access.roles import ROLES
from rl_distributed.security.audit import disable_audit, enable_audit

ROOT = Path(__file__).resolve().parent.parent

_KEYS = {
    "GET /rl/keys": "admin",
    "POST /rl/keys": "admin",
    "POST /rl/keys/revoke": "admin",
}
_OWN = "own"
"""For a route opened not by a role but by a key that the listener itself issued."""
LOWEST = {
    "serve": {
        "GET /health": None,
        "GET /metrics": "viewer",
        "GET /rl/status": "viewer",
        "GET /v1/models": "user",
        "POST /v1/chat/completions": "user",
        "POST /v1/completions": "user",
        "POST /tokenize": "user",
        "POST /detokenize": "user",
        "POST /rl/weights": "operator",
        **_KEYS,
    },
    "watch": {
        "GET /": "viewer",
        "GET /data": "viewer",
        "GET /chunk": "viewer",
        "GET /metrics": "viewer",
    },
    "metrics": {"GET /": "viewer", "GET /metrics": "viewer"},
    "sandbox": {
        "GET /metrics": "viewer",
        "GET /v1/sandbox": "user",
        "POST /v1/programs": "user",
        "POST /v1/commands": "user",
    },
    "run": {
        "GET /health": None,
        "GET /metrics": "viewer",
        "GET /rl/run": "viewer",
        "POST /rl/run/pause": "operator",
        "POST /rl/run/resume": "operator",
        "POST /rl/run/checkpoint": "operator",
        "POST /rl/run/stop": "operator",
        "POST /rl/run/update": "operator",
        **_KEYS,
    },
    "agents": {
        "GET /metrics": "viewer",
        "GET /v1/models": _OWN,
        "POST /v1/chat/completions": _OWN,
    },
}
"""The lowest role that each route admits; None: no key is needed."""

_LISTENING = re.compile(
    r"web\.(Application|AppRunner|SockSite|TCPSite)\(|http\.server|socketserver"
    r"|asyncio\.start_|\.create_(unix_)?server\(|uvicorn|\.listen\(|\.bind\(\(?[\"'a]"
    r"|wsgiref|TCPStore\(|grpc\.|multiprocessing\.managers"
)
KNOWN = {
    # Tested here.
    "rl_distributed/access/bound_socket.py": "the socket of most of them",
    "rl_distributed/access/http_app.py": "the application of watch, metrics and run",
    "rl_distributed/access/http_thread.py": "the server of metrics, run and sandbox",
    "rl_cli/report/watch_server.py": "the server of watch",
    "rl_models/serving/router.py": "serve",
    "rl_algorithms/rollout/agents/policy_server.py": "agents",
    # Replicas listen on loopback only to their router, with a key of their own; without
    # it they answer nothing but /health (test_serving_replica_access).
    "rl_models/serving/huggingface_replica.py": "a replica",
    "rl_models/serving/replica.py": "a replica of vLLM",
    # Links between processes of a run, which are not HTTP. A peer must prove that it
    # has a secret of 32 bytes before any of its data is read.
    "rl_distributed/workers/group_watch.py": "signs of life: test_workers_watch",
    "rl_models/generation/vllm/rank_link.py": "ranks of vLLM: test_vllm_rank_link",
    # PyTorch's, which takes no keys; see docs/guides/security.md.
    "rl_distributed/transfer/collective.py": "the meeting of a process group",
    # These look for a free port, and close it.
    "rl_distributed/cluster/ports.py": "ports of a cluster",
    "rl_envs/bridges/openenv/server_process.py": "the user's server of OpenEnv",
    "rl_envs/sandbox/hostile.py": "a program that the sandbox must stop",
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def listeners(
    keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Listener]]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("listeners")
        yield {
            name: stack.enter_context(started(name, keys.file, folder))
            for name in STARTS
        }


def rows() -> list[tuple[str, str, str | None]]:
    return [(name, *row) for name, table in LOWEST.items() for row in table.items()]


def reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def test_every_route_has_a_row(listeners: dict[str, Listener]) -> None:
    found = {
        name: {route.name for route in listener.table.routes}
        for name, listener in listeners.items()
    }
    assert found == {name: set(table) for name, table in LOWEST.items()}


def test_everything_that_listens_is_tested_here() -> None:
    found = {
        str(path.relative_to(source))
        for source in ROOT.glob("packages/*/src")
        for path in source.rglob("*.py")
        if _LISTENING.search(path.read_text())
    }
    assert found == set(KNOWN)


@pytest.mark.parametrize(("name", "route", "lowest"), rows())
def test_a_route_by_every_role_and_state(
    listeners: dict[str, Listener], keys: Keys, name: str, route: str, lowest: str
) -> None:
    listener, (method, path) = listeners[name], route.split()
    body = b"{}" if method == "POST" else None
    sent = {"Content_Type": "text/plain"} if body else {}
    ranks = list(ROLES)

    def asked(key: str | None) -> tuple[int, str]:
        status, text, headers = listener.ask(method, path, key, body, **sent)
        assert not [s for s in keys.secrets if s in text or s in str(headers)]
        return status, reason(text)

    if listener.own_key:
        status, why = asked(listener.own_key)
        assert (status == 401) == (lowest != _OWN)
        assert status not in (403, 429, 500)
    for role in ROLES:
        status, why = asked(keys.valid[role])
        if lowest == _OWN:
            assert (status, why) == (401, "invalid_api_key")
        elif lowest is None or ranks.index(role) >= ranks.index(lowest):
            # An admitted request may fail in another way: nothing meaningful was sent.
            assert status not in (401, 403, 429, 500), (role, status, why)
        else:
            assert (status, why) == (403, "role")
        for state, held in (("expired", keys.expired), ("revoked", keys.revoked)):
            status, why = asked(held[role])
            if lowest is not None:
                assert status == 401
                assert why in (f"key_{state}", "invalid_api_key")
    for what, key in {**keys.wrong, "none": None}.items():
        status, why = asked(key)
        if lowest is None:
            assert status not in (401, 403, 429, 500)
        else:
            assert status == 401, what
            assert why.startswith(("key_", "invalid_"))


@pytest.mark.parametrize("name", STARTS)
def test_what_is_no_route_is_told_to_viewers_only(
    listeners: dict[str, Listener], keys: Keys, name: str
) -> None:
    for method, path in [("GET", "/nothing"), ("PUT", "/metrics"), ("OPTIONS", "/")]:
        assert listeners[name].ask(method, path)[0] == 401
        assert listeners[name].ask(method, path, keys.valid["viewer"])[0] in (404, 405)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Origin": "file://"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://[::1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": ""},
    ],
)
def test_a_page_of_another_origin_is_refused(
    listeners: dict[str, Listener], keys: Keys, name: str, headers: dict[str, str]
) -> None:
    before = listeners[name].door.counts.counts().get("other_origin", 0)
    for method, path in (row.split() for row in LOWEST[name]):
        if LOWEST[name][f"{method} {path}"] is not None:
            found = listeners[name].ask(method, path, keys.valid["admin"], **headers)
            assert found[0] == 403
            assert reason(found[1]) == "other_origin"
            assert "Access-Control-Allow-Origin" not in found[2]
    assert listeners[name].door.counts.counts()["other_origin"] > before


@pytest.mark.parametrize("name", STARTS)
def test_a_link_on_another_page_opens_pages_alone(
    listeners: dict[str, Listener], keys: Keys, name: str
) -> None:
    link = {
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    frame = {**link, "Sec_Fetch_Dest": "iframe"}
    form = {**link, "Origin": "null"}
    for route in listeners[name].table.routes:
        opened = route.is_page and route.method == "GET"
        for sent, is_let_in in [(link, opened), (frame, False), (form, False)]:
            status, text, headers = listeners[name].ask(
                route.method, route.path, keys.valid["admin"], **sent
            )
            if route.needs is not None:
                is_refused = (status, reason(text)) == (403, "other_origin")
                assert is_refused == (not is_let_in), (route.name, sent)
            if is_let_in:
                assert headers["X-Frame-Options"] == "DENY"
                assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
                # The link is not a key.
                assert listeners[name].ask("GET", route.path, **sent)[0] == 401


@pytest.mark.parametrize("name", ["watch", "run", "agents"])
@pytest.mark.parametrize("host", ["example.org", "10.0.0.1", "127.0.0.1.example.org"])
def test_a_name_that_was_rebound_to_loopback_is_refused(
    listeners: dict[str, Listener], keys: Keys, name: str, host: str
) -> None:
    path = "/metrics"
    status, text, _ = listeners[name].ask("GET", path, keys.valid["admin"], Host=host)
    assert status == 403
    assert reason(text) in ("other_host", "forbidden_host")
    assert listeners[name].door.counts.counts()["other_host"] >= 1


@pytest.mark.parametrize("name", ["serve", "metrics", "sandbox"])
def test_without_keys_only_this_machine_is_answered(tmp_path: Path, name: str) -> None:
    with started(name, None, tmp_path) as listener:
        assert listener.ask("GET", "/metrics")[0] == 200
        assert listener.ask("GET", "/metrics", "any key at all")[0] == 200
        assert listener.ask("GET", "/metrics", Host="example.org")[0] == 403
        assert listener.ask("GET", "/metrics", Origin="http://example.org")[0] == 403


def test_the_keys_that_a_server_was_started_with_are_as_they_were(
    tmp_path: Path, keys: Keys
) -> None:
    fixed = {"api_key": "right", "weights_key": "other"}
    completions, weights = "/v1/completions", "/rl/weights"
    json_type = {"Content_Type": "application/json"}
    for file in (None, keys.file):
        with started("serve", file, tmp_path, **fixed) as listener:
            ask = listener.ask
            assert ask("GET", "/metrics", "right")[0] == 200
            assert ask("GET", "/metrics", "other")[0] in (401, 403)
            # 503: there is no replica; 400: the body names no folder.
            assert ask("POST", completions, "right", b"{}", **json_type)[0] == 503
            assert ask("POST", completions, "other", b"{}", **json_type)[0] in (
                401,
                403,
            )
            assert ask("POST", weights, "right", b"{}", **json_type)[0] == 403
            assert ask("POST", weights, "other", b"{}", **json_type)[0] == 400
            assert ask("GET", "/rl/keys", "right")[0] == 403
            assert ask("GET", "/rl/keys", "other")[0] in (401, 403)


def test_a_key_in_the_address_is_taken_by_the_page_alone(
    listeners: dict[str, Listener], keys: Keys
) -> None:
    path = f"/metrics?token={keys.valid['viewer']}"
    found = {name: listener.ask("GET", path)[0] for name, listener in listeners.items()}
    assert found == {
        "serve": 401,
        "watch": 200,
        "metrics": 401,
        "run": 401,
        "sandbox": 401,
        "agents": 401,
    }


def test_a_request_that_changes_a_run_comes_once(
    listeners: dict[str, Listener], keys: Keys
) -> None:
    run, key = listeners["run"], keys.valid["operator"]
    nonce, now = secrets.token_hex(16), f"{time.time():.3f}"

    def stop(**headers: str) -> tuple[int, str]:
        sent = {"Content_Type": "application/json", **headers}
        status, text, _ = run.ask("POST", "/rl/run/stop", key, b"{}", **sent)
        return status, reason(text)

    # 409: no process executes the run.
    assert stop(X_RL_Nonce=nonce, X_RL_Time=now) == (409, "refused")
    assert stop(X_RL_Nonce=nonce, X_RL_Time=now) == (403, "replayed")
    assert stop(X_RL_Nonce="", X_RL_Time=now) == (403, "nonce_missing")
    old = f"{time.time() - 100:.3f}"
    assert stop(X_RL_Nonce=secrets.token_hex(16), X_RL_Time=old) == (403, "too_old")
    assert stop(X_RL_Nonce=secrets.token_hex(16), X_RL_Time=now) == (409, "refused")
    counts = run.door.counts.counts()
    assert (counts["replayed"], counts["nonce_missing"]) == (1, 1)


@pytest.mark.parametrize("name", ["serve", "run"])
def test_too_large_a_body_is_not_read(
    listeners: dict[str, Listener], keys: Keys, name: str
) -> None:
    path = {"serve": "/v1/completions", "run": "/rl/run/update"}[name]
    listener = listeners[name]
    sent = {"Content_Type": "application/json"}
    status, text, _ = listener.ask(
        "POST", path, keys.valid["admin"], b"x" * 65_537, **sent
    )
    assert (status, reason(text)) in {(413, "too_large"), (413, "body_too_large")}
    assert listener.door.counts.counts()["too_large"] >= 1


def test_the_rate_of_a_key_holds_at_each_listener(
    listeners: dict[str, Listener], keys: Keys
) -> None:
    from rl_distributed.access.rate_limit import RateLimit  # noqa: PLC0415

    _, key = keys.file.create("slow", "user", rate=RateLimit.parse("3/h"))
    for listener in listeners.values():
        found = [listener.ask("GET", "/metrics", key) for _ in range(4)]
        assert [status for status, _, _ in found] == [200, 200, 200, 429]
        assert int(found[3][2]["Retry-After"]) > 1_000
        # Another key is not delayed.
        assert listener.ask("GET", "/metrics", keys.valid["viewer"])[0] == 200


def test_a_key_is_refused_from_the_moment_that_it_is_revoked(
    listeners: dict[str, Listener], keys: Keys
) -> None:
    _, key = keys.file.create("short", "viewer")
    ask = [listener.ask for listener in listeners.values()]
    assert [a("GET", "/metrics", key)[0] for a in ask] == [200] * len(ask)
    keys.file.revoke("short")
    assert [a("GET", "/metrics", key)[0] for a in ask] == [401] * len(ask)


@pytest.mark.parametrize("name", ["serve", "run"])
def test_an_admin_makes_and_revokes_keys_from_afar(
    listeners: dict[str, Listener], keys: Keys, name: str
) -> None:
    listener, admin = listeners[name], keys.valid["admin"]

    def post(path: str, **body: str) -> tuple[int, dict[str, str]]:
        sent = {"Content_Type": "application/json"}
        data = json.dumps(body).encode()
        status, text, _ = listener.ask("POST", path, admin, data, **sent)
        return status, json.loads(text)

    made = f"{name}-bob"
    status, found = post("/rl/keys", name=made, role="viewer", expires="1d", rate="9/s")
    assert (status, found["role"], found["state"]) == (200, "viewer", "valid")
    assert listener.ask("GET", "/metrics", found["key"])[0] == 200
    listed = json.loads(listener.ask("GET", "/rl/keys", admin)[1])["keys"]
    assert made in [key["name"] for key in listed]
    assert not [key for key in listed if {"digest", "salt", "key"} & set(key)]
    assert post("/rl/keys", name=made, role="viewer")[0] == 400
    assert post("/rl/keys", name="x", role="king")[0] == 400
    assert post("/rl/keys", name="x", role="user", more="y")[0] == 400
    assert post("/rl/keys/revoke", key=found["id"])[0] == 200
    assert post("/rl/keys/revoke", key=found["id"])[0] == 400
    assert listener.ask("GET", "/metrics", found["key"])[0] == 401


def test_refusals_are_counted_logged_and_in_the_audit_log(
    tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "audit.jsonl"
    enable_audit(log)
    try:
        with started("watch", keys.file, tmp_path) as listener:
            expired = keys.expired["viewer"]
            with caplog.at_level(logging.WARNING, "rl_distributed.access"):
                listener.ask("GET", "/data?seen=1&token=nothing")
                listener.ask("GET", "/data", expired)
                for _ in range(100):
                    listener.ask("GET", "/no\x7fwhere".replace("\x7f", "%0a"), "wrong")
            text = listener.ask("GET", "/metrics", keys.valid["viewer"])[1]
    finally:
        disable_audit()
    label = 'rl_access_requests_total{listener="watch",outcome='
    assert f'{label}"key_expired"}} 1' in text
    assert f'{label}"key_malformed"}} 101' in text
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    # A flood fills neither log.
    assert 60 <= len(lines) <= 65
    assert "key_expired" in lines[1]
    assert "expired viewer" in lines[1]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    refused = [e for e in entries if e["action"] == "access.refused"]
    assert 60 <= len(refused) <= 65
    assert refused[0]["object"] == "watch GET /data"
    assert refused[1]["key"].endswith("expired viewer")
    written = log.read_text() + "\n".join(lines)
    assert not [secret for secret in keys.secrets if secret in written]
    assert "token=nothing" not in written


def test_a_door_without_any_key_admits_nobody() -> None:
    with pytest.raises(Refusal) as refused:
        Door("x").admit(AccessRequest("GET /", authorization="Bearer a"), "view")
    assert refused.value.reason == "key_unknown"
