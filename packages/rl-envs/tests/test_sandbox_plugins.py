"""Sandboxes behind a container engine, behind an address, and by name."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_distributed.errors import ConfigError, RegistryError
from rl_envs.errors import SandboxError
from rl_envs.sandbox import (
    Command,
    ContainerSandbox,
    Program,
    RemoteSandbox,
    SandboxLevel,
    SandboxLimits,
    SandboxPool,
    open_sandbox,
)
from rl_envs.sandbox.service import SandboxService

# Handles arguments as an engine does, but without isolation: the image is a folder
# name, mounts are links, and the program is a process of this machine.
ENGINE = r"""#!{python}
import json, os, signal, subprocess, sys
state = {state!r}
arguments = sys.argv[1:]
with open(os.path.join(state, "calls"), "a") as log:
    log.write(json.dumps(arguments) + "\n")
if arguments == ["--version"]:
    print("engine version 1")
elif arguments[:2] == ["image", "inspect"]:
    if arguments[-1] != "tiny":
        sys.exit("no such image")
    print("sha256:0")
elif arguments[0] == "inspect":
    found = os.path.exists(os.path.join(state, "oom-" + arguments[-1]))
    print("true" if found else "false")
elif arguments[0] == "rm":
    path = os.path.join(state, arguments[-1])
    if os.path.exists(path):
        try:
            os.killpg(int(open(path).read()), signal.SIGKILL)
        except ProcessLookupError:
            pass
elif arguments[0] == "run":
    options, rest = {{}}, arguments[1:]
    while rest[0].startswith("--"):
        name = rest.pop(0)
        if name not in ("--interactive", "--read-only"):
            options.setdefault(name, []).append(rest.pop(0))
    name = options["--name"][0]
    given = options["--volume"][0].split(":")[0]
    work = os.path.join(state, "work-" + name)
    os.mkdir(work)
    script = rest[2].replace("/sandbox-given", given).replace("/sandbox-work", work)
    if "broken-engine" in rest:
        sys.exit(125)
    if "out-of-memory" in rest:
        open(os.path.join(state, "oom-" + name), "w").close()
    child = subprocess.Popen(
        [options["--entrypoint"][0], rest[1], script, *rest[3:]],
        cwd=work, start_new_session=True,
    )
    with open(os.path.join(state, name), "w") as file:
        file.write(str(child.pid))
    code = child.wait()
    sys.exit(128 - code if code < 0 else code)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.write_text(ENGINE.format(python=sys.executable, state=str(tmp_path)))
    path.chmod(0o755)
    return path


def calls(engine: Path) -> list[list[str]]:
    lines = (engine.parent / "calls").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_container_is_confined_and_removed(engine: Path) -> None:
    limits = SandboxLimits(memory_bytes=64 << 20, scratch_bytes=1 << 20)
    with ContainerSandbox("tiny", 2, engine=str(engine)) as made:
        assert made.level is SandboxLevel.CONTAINER
        command = Command(("sh", "-c", "cat a; cat"), {"a": b"file "}, "input")
        result = made.run_command(command, limits)
        assert (result.status, result.stdout) == ("ok", "file input")
        doubled = made.run("read x; echo $((x * 2))", stdin="4", language="bash")
        assert (doubled.status, doubled.stdout) == ("ok", "8\n")
    with pytest.raises(SandboxError, match="closed"):
        made.run_command(command)
    told = next(each for each in calls(engine) if "67108864" in each)
    line = " ".join(told)
    for option in (
        *("--network none", "--read-only", "--cap-drop ALL", "--pids-limit 64"),
        *("--security-opt no-new-privileges", "--user 65534:65534", "--pull never"),
        *("--memory 67108864 --memory-swap 67108864", "size=1048576"),
    ):
        assert option in line
    runs = [each for each in calls(engine) if each[0] == "run"]
    removed = [each[-1] for each in calls(engine) if each[0] == "rm"]
    assert sorted(each[2] for each in runs) == sorted(removed)


@pytest.mark.parametrize(
    ("argv", "status", "exit_code", "number"),
    [
        (("sh", "-c", "exit 3"), "error", 3, None),
        (("sleep", "1000"), "time", None, 9),
        (("yes",), "output", None, 9),
        (("sh", "-c", "kill -KILL $$", "out-of-memory"), "memory", None, 9),
        (("sh", "-c", "kill -KILL $$"), "signal", None, 9),
        (("sh", "-c", ":", "broken-engine"), "sandbox", None, None),
    ],
)
def test_why_a_container_ended(
    engine: Path,
    argv: tuple[str, ...],
    status: str,
    exit_code: int | None,
    number: int | None,
) -> None:
    limits = SandboxLimits(time_s=0.5 if status == "time" else 60.0)
    with ContainerSandbox("tiny", engine=str(engine)) as made:
        result = made.run_command(Command(argv), limits)
    assert result.status == status
    if status != "output":
        assert (result.exit_code, result.signal) == (exit_code, number)
    assert len(result.stdout) <= limits.output_bytes


def test_a_container_that_cannot_be_had_says_why(engine: Path) -> None:
    with pytest.raises(SandboxError, match=r"image 'other' cannot be used.*no such"):
        ContainerSandbox("other", engine=str(engine))
    with pytest.raises(SandboxError, match="engine must be installed: found no /no/e"):
        ContainerSandbox("tiny", engine="/no/engine")


# Behind an address -----------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[SandboxService]:
    try:
        sandbox = SandboxPool(2)
    except SandboxError as error:
        pytest.skip(str(error))
    most = SandboxLimits(time_s=30.0)
    with sandbox, SandboxService(sandbox, key="k3y", max_limits=most) as service:
        yield service


@pytest.fixture
def remote(
    served: SandboxService, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteSandbox]:
    monkeypatch.setenv("SANDBOX_KEY", "k3y")
    with RemoteSandbox(served.url, 2, key_variable="SANDBOX_KEY") as made:
        assert isinstance(made, RemoteSandbox)
        yield made


def test_programs_run_at_a_service(remote: RemoteSandbox) -> None:
    assert remote.level >= SandboxLevel.LANDLOCK
    assert "python" in remote.languages
    results = remote.run_all([("print(int(input()) + 1)", str(n)) for n in range(6)])
    assert [r.stdout for r in results] == [f"{n + 1}\n" for n in range(6)]
    assert remote.run("while True: pass", limits=SandboxLimits(time_s=0.3)).status == (
        "time"
    )
    if "c" in remote.languages:
        found = remote.run_all([Program("int main(", language="c")] * 2)
        assert [each.status for each in found] == ["build", "build"]
        command = Command(("cat", "a", "-"), {"a": b"\x00f"}, "in")
        assert remote.run_command(command).stdout == "\x00fin"


def test_a_service_refuses_what_is_wrong(
    served: SandboxService, remote: RemoteSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxError, match=r"status 400.*time_s may be at most 30"):
        remote.run("print(1)", limits=SandboxLimits(time_s=31.0))
    with pytest.raises(SandboxError, match=r"status 401.*key_missing"):
        RemoteSandbox(served.url)
    monkeypatch.setenv("SANDBOX_KEY", "")
    with pytest.raises(SandboxError, match="SANDBOX_KEY must hold the key"):
        RemoteSandbox(served.url, key_variable="SANDBOX_KEY")
    with pytest.raises(SandboxError, match="needs a key"):
        SandboxService(SandboxPool.__new__(SandboxPool), host="0.0.0.0")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sandbox:1", "url must be http"),
        ("http://sandbox.invalid:1", "must begin with https://"),
        ("http://127.0.0.1:x", "url must be http"),
    ],
)
def test_addresses_that_are_wrong(url: str, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        RemoteSandbox(url)


class _Stub(http.server.BaseHTTPRequestHandler):
    """A service that reports a level, and then fails in some way."""

    about: ClassVar[Any] = {"level": "seccomp", "missing_languages": {"python": ""}}
    reply: tuple[int, str] = (500, "broken")

    def do_GET(self) -> None:
        self._send(200, json.dumps(self.about))

    def do_POST(self) -> None:
        self._send(*self.reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def stub() -> Iterator[tuple[type[_Stub], str]]:
    handler = type("Handler", (_Stub,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(30)


def test_a_service_below_the_level_is_refused(stub: tuple[type[_Stub], str]) -> None:
    handler, url = stub
    with pytest.raises(SandboxError, match=r"must reach level LANDLOCK.*says SECCOMP"):
        RemoteSandbox(url)
    handler.about = {"level": "perfect"}
    with pytest.raises(SandboxError, match="must say its level"):
        RemoteSandbox(url)


def test_the_program_is_not_to_blame_for_its_service(
    stub: tuple[type[_Stub], str],
) -> None:
    handler, url = stub
    made = RemoteSandbox(url, level=SandboxLevel.SECCOMP)
    for reply in ((500, "broken"), (200, "no JSON"), (200, '{"status": "ok"}')):
        handler.reply = reply
        assert made.run("print(1)").status == "sandbox"
    handler.reply = (404, '{"error": "no"}')
    with pytest.raises(SandboxError, match=r"refuses the request .status 404"):
        made.run("print(1)")


# By name ---------------------------------------------------------------------------


def test_sandboxes_are_opened_by_name(engine: Path) -> None:
    settings = {"image": "tiny", "engine": str(engine)}
    with open_sandbox("container", settings, level=SandboxLevel.CONTAINER) as made:
        assert isinstance(made, ContainerSandbox)
    with pytest.raises(RegistryError, match="sandbox 'contianer'"):
        open_sandbox("contianer")
    with pytest.raises(ConfigError, match=r"they may be image, engine"):
        open_sandbox("container", {"imgae": "tiny"})
    with pytest.raises(SandboxError, match="must reach level CONTAINER: it reaches"):
        open_sandbox("local", level=SandboxLevel.CONTAINER)


@pytest.mark.skipif(
    "RL_TEST_CONTAINER_IMAGE" not in os.environ,
    reason="RL_TEST_CONTAINER_IMAGE names no image that a container engine has",
)
def test_a_real_engine_confines() -> None:
    image = os.environ["RL_TEST_CONTAINER_IMAGE"]
    engine = os.environ.get("RL_TEST_CONTAINER_ENGINE")
    with ContainerSandbox(image, engine=engine) as made:
        result = made.run_command(
            Command(("sh", "-c", "cat a; cat; echo x > /y; id -u"), {"a": b"f"}, "in")
        )
        assert (result.status, result.stdout) == ("ok", "fin65534\n")
        assert "/y" in result.stderr
        late = made.run_command(Command(("sleep", "99")), SandboxLimits(time_s=1.0))
        assert late.status == "time"
