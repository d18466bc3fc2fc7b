from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading

import pytest
from rl_distributed_scripts import (
    SCRIPTS,
    clean_environment,
    end_session,
    ray_folder,
    run_script,
)

from rl_distributed.cluster import attach as ray_attach
from rl_distributed.cluster.attach import (
    ClusterAddress,
    NotThereYetError,
    check_joinable,
)
from rl_distributed.cluster.start import init_ray, wait_for_nodes
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    SecurityError,
    UserError,
)
from rl_distributed.security.ray_access import create_certificates


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("10.0.0.1:6379", "10.0.0.1", 6379, False),
        ("localhost:1", "localhost", 1, True),
        ("127.0.0.1:1", "127.0.0.1", 1, True),
        ("[::1]:1", "::1", 1, True),
        ("ray://head:10001", "head", 10001, False),
    ],
)
def test_addresses(text, host, port, is_loopback):
    address = ClusterAddress.parse(text)
    assert (address.host, address.port) == (host, port)
    assert address.is_loopback == is_loopback
    assert str(address) == text.removeprefix("ray://")


@pytest.mark.parametrize("text", ["nowhere", ":1", "host:", "host:x", "host:70000"])
def test_wrong_addresses(text):
    with pytest.raises(ConfigError, match="must be 'host:port', 'auto' or 'local'"):
        ClusterAddress.parse(text)


@contextlib.contextmanager
def server(answer):
    """A listening socket: `answer` gets each connection in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    link, _ = listener.accept()
                    links.append(link)
                    # The first connection only probes the port: it may be closed or
                    # reset before it is answered.
                    with contextlib.suppress(OSError):
                        answer(link)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield ClusterAddress("127.0.0.1", listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for link in links:
                link.close()


def http(link):
    link.recv(100)
    link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    link.close()


def test_what_says_nothing_ends_in_a_deadline():
    with (
        server(lambda link: None) as address,
        pytest.raises(DeadlineExceededError, match="says nothing"),
    ):
        check_joinable(address, 0.5)


@pytest.mark.parametrize("answer", [http, lambda link: link.close()])
def test_what_is_no_ray_cluster_is_told(answer):
    with (
        server(answer) as address,
        pytest.raises(UserError, match="is no Ray cluster; check the port"),
    ):
        check_joinable(address, 30)


def test_an_address_that_swallows_everything_is_given_up_soon(monkeypatch):
    given = []

    def connect(place, timeout):
        given.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(ray_attach.socket, "create_connection", connect)
    with pytest.raises(NotThereYetError, match="nothing answers at the Ray address"):
        check_joinable(ClusterAddress("192.0.2.1", 6379), 3600)
    assert given == [ray_attach._GREETING_S]
    assert given[0] < 10


def test_a_head_that_never_answers_ends_in_a_deadline(monkeypatch):
    """It sends a gRPC greeting and is then stopped."""
    # Whether it asks for a token is then unknown: one is presented from now on.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    done = threading.Event()
    monkeypatch.setattr(ray_attach, "_ask_head", lambda *a: done.wait(60))
    with server(lambda link: link.sendall(settings)) as address:
        with pytest.raises(DeadlineExceededError, match=r"did not answer in 0.5 s"):
            check_joinable(address, 0.5)
        done.set()


def test_a_machine_that_is_no_node_is_told(monkeypatch):
    monkeypatch.setattr(ray_attach.services, "find_node_ids", lambda: [])
    with pytest.raises(NotThereYetError, match=r"no node of .* \['203.0.113.9'\]"):
        ray_attach._check_own_node(ClusterAddress("h", 1), ["203.0.113.9"])
    with pytest.raises(NotThereYetError, match="whose nodes are gone"):
        ray_attach._check_own_node(ClusterAddress("h", 1), [])
    ray_attach._check_own_node(ClusterAddress("h", 1), ["127.0.0.1"])
    assert pickle.loads(pickle.dumps(NotThereYetError("x"))).args == ("x",)


def test_waiting_for_nodes_ends(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="needs the address of the head"):
        wait_for_nodes(2, deadline_s=1)
    with pytest.raises(DeadlineExceededError, match=r"0 of 2 nodes .*nothing answers"):
        wait_for_nodes(2, address="127.0.0.1:1", deadline_s=0.3)


def test_auto_without_a_cluster(monkeypatch):
    def none(*arguments):
        raise ConnectionError("none")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    find = "get_ray_address_from_environment"
    monkeypatch.setattr(ray_attach.services, find, none)
    with pytest.raises(UserError, match="address='auto' finds no Ray cluster"):
        init_ray(address="auto")


@pytest.mark.parametrize("content", [None, "  \n"])
def test_a_token_file_without_a_token(monkeypatch, tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with pytest.raises(SecurityError, match=f"RAY_AUTH_TOKEN_PATH names {path}"):
        init_ray(address="127.0.0.1:1")


# --- real clusters, each in a process of its own ------------------------------------


@contextlib.contextmanager
def held_cluster(*arguments, **variables):
    """A one-node cluster; yields its address and its session folder."""
    with ray_folder() as folder:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "hold_cluster.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(RAY_TMPDIR=folder, **variables),
            start_new_session=True,
        )
        try:
            address = process.stdout.readline().strip()
            assert address, "the cluster did not start"
            yield address, folder
        finally:
            end_session(process)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "other"):
        create_certificates(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain():
    with held_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def without_tokens():
    with held_cluster(RAY_AUTH_MODE="disabled") as found:
        yield found


@pytest.fixture(scope="module")
def encrypted(certificates):
    with held_cluster(str(certificates / "ours")) as found:
        yield found


def join(cluster, *options, **variables):
    address, folder = cluster
    return run_script(
        "join_cluster.py", address, *options, **{"RAY_TMPDIR": folder, **variables}
    )


WRONG_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 32}


@pytest.mark.slow
def test_joining_with_the_token_of_this_user(plain):
    assert join(plain)["answer"] == 42


@pytest.mark.slow
def test_joining_under_tls(encrypted, certificates):
    assert join(encrypted, f"tls={certificates / 'ours'}")["answer"] == 42


def refused(cluster, *options, **variables):
    """Return the message where the deadline for an answer exceeds the test's own."""
    found = join(cluster, "deadline=3600", *options, **variables)
    assert found["error"] == "SecurityError"
    assert "`ray get-auth-token` on the head prints it" in found["message"]
    return found["message"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "token"])
@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_a_wrong_token_is_explained(request, kind, mode, certificates):
    options = [f"tls={certificates / 'ours'}"] if kind == "encrypted" else []
    given = {**WRONG_TOKEN, "RAY_AUTH_MODE": mode}
    message = refused(request.getfixturevalue(kind), *options, **given)
    assert "refuses the token of this process, which was found in RAY_AUTH_TOKEN: " in (
        message
    )
    assert "f" * 32 not in message


@pytest.mark.slow
def test_a_file_with_a_wrong_token_is_named(plain, tmp_path):
    path = tmp_path / "token"
    path.write_text("e" * 32)
    message = refused(plain, RAY_AUTH_TOKEN_PATH=str(path))
    assert f"found in the file {path} (RAY_AUTH_TOKEN_PATH): the cluster" in message
    home = tmp_path / ".ray" / "auth_token"
    home.parent.mkdir()
    path.rename(home)
    message = refused(plain, HOME=str(tmp_path))
    assert f"found in the file {home}: the cluster has another one" in message
    assert "e" * 32 not in message


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "token"])
def test_a_missing_token_is_explained(plain, tmp_path, mode):
    message = refused(plain, HOME=str(tmp_path), RAY_AUTH_MODE=mode)
    assert "asks for a token, and this process has none" in message
    home = tmp_path / ".ray" / "auth_token"
    assert f"RAY_AUTH_TOKEN_PATH are not set, and there is no file {home}; " in message


@pytest.mark.slow
def test_a_head_that_does_not_say_gets_no_process_without_a_token(tmp_path):
    """Ray would end the process as soon as it asks."""
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

    def answer(link):
        link.sendall(settings)
        link.shutdown(socket.SHUT_WR)

    with server(answer) as address:
        found = run_script(
            "join_cluster.py",
            str(address),
            **{"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"},
        )
    assert found["error"] == "SecurityError"
    assert "this process has none" in found["message"]


@pytest.mark.slow
def test_a_token_is_presented_only_to_a_cluster_that_asks_for_one(without_tokens):
    # As if an earlier cluster had left a token in the user's home folder.
    assert join(without_tokens, RAY_AUTH_TOKEN="a" * 32)["answer"] == 42
    assert join(without_tokens, RAY_AUTH_MODE="disabled")["answer"] == 42


@pytest.mark.slow
def test_tokens_on_this_side_only_are_explained(without_tokens):
    found = join(without_tokens, **WRONG_TOKEN)
    assert found["error"] == "SecurityError"
    assert "runs without token authentication" in found["message"]
    assert "this process has RAY_AUTH_MODE=token" in found["message"]


@pytest.mark.slow
def test_tokens_on_the_other_side_only_are_explained(plain):
    message = refused(plain, RAY_AUTH_MODE="disabled")
    assert "presents none, because RAY_AUTH_MODE=disabled is set" in message


@pytest.mark.slow
def test_another_version_is_explained(plain):
    found = join(plain, "ray=2.49.0")
    assert found["error"] == "UserError"
    assert "and this process Ray 2.49.0 on Python" in found["message"]


@pytest.mark.slow
def test_a_client_without_tls_is_explained(encrypted):
    found = join(encrypted)
    assert found["error"] == "SecurityError"
    assert "uses TLS and this process does not; pass tls=" in found["message"]


@pytest.mark.slow
def test_a_cluster_without_tls_is_explained(plain, certificates):
    found = join(plain, f"tls={certificates / 'ours'}")
    assert found["error"] == "SecurityError"
    assert "this process uses TLS and the Ray cluster" in found["message"]


@pytest.mark.slow
def test_certificates_of_another_authority_are_explained(encrypted, certificates):
    found = join(encrypted, f"tls={certificates / 'other'}")
    assert found["error"] == "SecurityError"
    assert f"must be signed by {certificates / 'other' / 'ca.crt'}" in found["message"]


def test_the_tests_leave_no_token_behind():
    assert "RAY_AUTH_TOKEN" not in os.environ
