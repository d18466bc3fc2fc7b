"""`rl watch`: the live page over HTTP, and a summary in the terminal."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from rl_cli_chromium import Chromium, chromium_path

from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles
from rl_cli.main import _run
from rl_cli.report.live_runs import LiveRuns
from rl_cli.report.page import write_page
from rl_cli.report.run_reader import read_run
from rl_cli.report.terminal_view import essentials
from rl_cli.report.watch_server import HOST, watch_app, watch_door
from rl_distributed.access.bound_socket import bound_socket
from rl_distributed.access.door import Door
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.rate_limit import RateLimit
from rl_distributed.errors import ConfigError

MakeRun = Callable[..., Path]
TOKEN = "right-token"
DEADLINE_S = 60.0
NEEDS_BROWSER = pytest.mark.skipif(
    chromium_path() is None, reason="no chromium is installed"
)


def answer(step: int, text: str = "yes", reward: float = 1.0) -> dict[str, Any]:
    return {"step": step, "reward": reward, "group": 0, "prompt": "q",
            "response": text, "tokens": [text], "logprobs": [-1.0],
            "versions": [[step - 1, 1]]}  # fmt: skip


def go_on(folder: Path, step: int, text: str = "yes") -> None:
    """Write a trainer's records of a step."""
    record = answer(step, text)
    files = RolloutFiles(folder, 1 << 30)
    files.add(step, [{k: v for k, v in record.items() if k != "step"}])
    metrics = {"train:reward": step / 10, "timing:total_step_time": 2.0}
    line = {"step": step, "time": 1.7e9 + step, "metrics": metrics}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def served(live: LiveRuns, door: Door | None = None) -> Iterator[int]:
    """Serve runs from a thread; yield the port."""
    listener, loop = bound_socket(HOST, 0), asyncio.new_event_loop()
    app = watch_app(live, door or watch_door(TOKEN))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    ready = threading.Event()

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        ready.set()

    def work() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield listener.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


def get(
    port: int,
    path: str,
    *,
    method: str = "GET",
    token: str | None = TOKEN,
    **headers: str,
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(HOST, port, timeout=DEADLINE_S)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, headers=sent)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.headers
    finally:
        connection.close()


@pytest.fixture
def run_of_one_step(make_run: MakeRun) -> Path:
    return make_run(num_steps=1, rollouts=[answer(1, "<b>bold</b>")], finished=False)


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/", {}, 200),
        ("/data", {}, 200),
        ("/data?seen=1", {}, 204),
        ("/data?seen=0", {}, 200),
        ("/chunk?name=r0s0t0-0", {}, 200),
        (f"/?token={TOKEN}", {"token": None}, 200),
        ("/", {"Host": "localhost:9999"}, 200),
        ("/", {"Host": "127.0.0.1"}, 200),
        ("/", {"Host": "[::1]:80"}, 200),
        ("/data", {"Sec_Fetch_Site": "same-origin"}, 200),
        # without the token, or with another one
        ("/", {"token": None}, 401),
        ("/data", {"token": None}, 401),
        ("/chunk?name=r0s0t0-0", {"token": None}, 401),
        ("/nothing", {"token": None}, 401),
        ("/", {"token": ""}, 401),
        ("/", {"token": TOKEN[:-1]}, 401),
        ("/", {"token": TOKEN + "x"}, 401),
        ("/?token=wrong", {"token": None}, 401),
        ("/?token=", {"token": None}, 401),
        ("/?token=%ff%00", {"token": None}, 401),
        (f"/?token={TOKEN}", {"token": "wrong"}, 401),
        ("/", {"token": None, "Authorization": f"Basic {TOKEN}"}, 401),
        ("/", {"token": None, "Cookie": f"token={TOKEN}"}, 401),
        # for another host, or from another page
        ("/", {"Host": "example.org"}, 403),
        ("/", {"Host": "127.0.0.1.example.org:80"}, 403),
        ("/", {"Host": "10.0.0.1"}, 403),
        ("/", {"Host": ""}, 403),
        ("/", {"Host": "[::1"}, 403),
        ("/data", {"Origin": "http://example.org"}, 403),
        ("/data", {"Origin": "null"}, 403),
        ("/data", {"Origin": "http://127.0.0.1:1"}, 403),
        ("/data", {"Sec_Fetch_Site": "cross-site"}, 403),
        ("/data", {"Sec_Fetch_Site": "same-site"}, 403),
        # of something that does not exist
        ("/../run.json", {}, 404),
        ("/%2e%2e/run.json", {}, 404),
        ("/..%2frun.json", {}, 404),
        ("//etc/passwd", {}, 404),
        ("/run.json", {}, 404),
        ("/chunk", {}, 404),
        ("/chunk?name=", {}, 404),
        ("/chunk?name=../../run.json", {}, 404),
        ("/chunk?name=/etc/passwd-0", {}, 404),
        ("/chunk?name=r0s0t0-1", {}, 404),
        ("/chunk?name=r0s0t0--1", {}, 404),
        ("/chunk?name=r9s9t9-0", {}, 404),
        ("/chunk?name=" + "x" * 4000, {}, 404),
        # with another method
        ("/", {"method": "POST"}, 405),
        ("/data", {"method": "DELETE"}, 405),
        ("/data", {"method": "OPTIONS"}, 405),
        ("/data", {"method": "PUT", "token": None}, 401),
    ],
)
def test_only_the_owner_of_the_token_on_this_machine_is_answered(
    served_run: int, path: str, options: dict[str, Any], status: int
) -> None:
    found, text, headers = get(served_run, path, **options)
    assert found == status
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    if status != 200:
        assert TOKEN not in text
        assert "grpo" not in text


FOLLOWED = {
    "Sec_Fetch_Site": "cross-site",
    "Sec_Fetch_Mode": "navigate",
    "Sec_Fetch_Dest": "document",
}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/", {"Sec_Fetch_Site": "same-site"}, 200),
        # A frame, a script, a fetch or a form is not a link.
        ("/", {"Sec_Fetch_Dest": "iframe"}, 403),
        ("/", {"Sec_Fetch_Dest": "object"}, 403),
        ("/", {"Sec_Fetch_Dest": "script", "Sec_Fetch_Mode": "no-cors"}, 403),
        ("/", {"Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}, 403),
        ("/", {"Sec_Fetch_Mode": "no-cors"}, 403),
        ("/", {"Origin": "http://example.org"}, 403),
        ("/", {"Origin": "null"}, 403),
        ("/", {"method": "POST", "Origin": "null"}, 403),
        ("/", {"method": "HEAD"}, 403),
        # A link opens only a page.
        ("/data", {}, 403),
        ("/chunk?name=r0s0t0-0", {}, 403),
        ("/metrics", {}, 403),
        ("/nothing", {}, 403),
        # The key and this machine's name are still required.
        ("/", {"token": None}, 401),
        ("/", {"token": "wrong"}, 401),
        ("/", {"Host": "example.org"}, 403),
    ],
)
def test_a_link_on_another_site_opens_the_page(
    served_run: int, path: str, headers: dict[str, Any], status: int
) -> None:
    found, text, sent = get(served_run, path, **{**FOLLOWED, **headers})
    assert found == status
    # The opened page can be neither framed nor reached by the linking page.
    assert sent["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in sent["Content-Security-Policy"]
    assert sent["Cross-Origin-Opener-Policy"] == "same-origin"
    if status == 200:
        assert text.startswith("<!DOCTYPE html>")
    elif path in ("/data", "/metrics", "/chunk?name=r0s0t0-0"):
        assert json.loads(text)["error"]["code"] == "other_origin"


ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("path", "headers", "status", "title", "remedy"),
    [
        ("/", {"token": None}, 401, "has no key", "complete address"),
        ("/?token=<b>x", {"token": None}, 401, "not one of this page", "?token="),
        ("/data", {"token": "<i>wrong"}, 401, "not one of this page", "prints another"),
        ("/<u>nothing", {"token": None}, 401, "has no key", "complete address"),
        ("/", {"Origin": "http://<b>"}, 403, "Another page", "in a new tab"),
        ("/", {"Host": "<b>.org"}, 403, "another name", "127.0.0.1 or localhost"),
    ],
)
def test_a_browser_that_is_refused_reads_why(
    served_run: int,
    path: str,
    headers: dict[str, Any],
    status: int,
    title: str,
    remedy: str,
) -> None:
    found, text, sent = get(served_run, path, Accept=ACCEPT, **headers)
    assert found == status
    assert sent["Content-Type"] == "text/html; charset=utf-8"
    assert ("WWW-Authenticate" in sent) == (status == 401)
    assert sent["Cache-Control"] == "no-store"
    assert title in text[text.index("<h1>") : text.index("</h1>")]
    assert remedy in text
    assert "default-src 'none'" in text
    # Nothing from the request.
    assert not re.search("<(b|i|u|script)>|&lt;", text)
    code = json.loads(get(served_run, path, **headers)[1])["error"]["code"]
    assert f"status {status}, {code}." in text


def test_a_browser_reads_of_the_state_of_its_key(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    _, expired = file.create("old", "viewer")
    _, revoked = file.create("gone", "viewer")
    _, slow = file.create("slow", "viewer", rate=RateLimit.parse("1/h"))
    content = json.loads(file.path.read_text())
    content["keys"][0]["expires"] = "2020-01-01T00:00:00+00:00"
    file.path.write_text(json.dumps(content))
    file.revoke("gone")
    (tmp_path / "run.json").write_text('{"kind": "algorithm", "name": "grpo"}')
    door = watch_door(None, key_file=file)
    with served(LiveRuns([tmp_path]), door) as port:

        def read(key: str) -> tuple[int, str]:
            status, text, _ = get(port, f"/?token={key}", token=None, Accept=ACCEPT)
            assert key not in text
            return status, text

        assert read(slow)[0] == 200
        for key, status, said in [
            (expired, 401, "Your key has expired"),
            (revoked, 401, "Your key was revoked"),
            (slow, 429, "too many requests"),
            (slow[:-1], 401, "not complete"),
        ]:
            found, text = read(key)
            assert (found, said in text) == (status, True)


@pytest.fixture(scope="module")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("watched") / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"kind": "algorithm", "name": "grpo"}')
    go_on(folder, 1)
    with served(LiveRuns([folder])) as port:
        yield port


@pytest.mark.parametrize(
    "request_line", ["GET", "GET / HTTP/9.9", "\x00\xff", "A" * 20_000]
)
def test_a_malformed_request_ends_only_itself(
    served_run: int, request_line: str
) -> None:
    connection = http.client.HTTPConnection(HOST, served_run, timeout=DEADLINE_S)
    connection.connect()
    connection.sock.sendall(f"{request_line}\r\n\r\n".encode("latin-1"))
    assert b" 200 " not in connection.sock.recv(4096)
    connection.close()
    assert get(served_run, "/data")[0] == 200


def test_the_page_is_that_of_the_report_and_may_ask_its_server(
    run_of_one_step: Path, tmp_path: Path
) -> None:
    with served(LiveRuns([run_of_one_step])) as port:
        _, text, headers = get(port, "/")
        chunk = json.loads(get(port, "/chunk?name=r0s0t0-0")[1])
    write_page([read_run(run_of_one_step)], tmp_path / "page.html")
    written = (tmp_path / "page.html").read_text()
    assert headers["Content-Type"].startswith("text/html")
    assert text.count("connect-src &#x27;self&#x27;") == 1
    assert "connect-src" not in written
    data = re.compile(r'(<script type="application/json" id="data">)(.*?)</script>')
    head = text.replace("; connect-src &#x27;self&#x27;", "")
    assert data.sub("", head) == data.sub("", written)
    found = json.loads(data.findall(text)[0][1])
    reported = json.loads(data.findall(written)[0][1])
    # No key: the page takes it from its address, so that copies hold none.
    assert found["live"] == {"version": 1, "poll_s": 2.0}
    assert (
        found["runs"][0]["stages"][0]["curves"]
        == (reported["runs"][0]["stages"][0]["curves"])
    )
    assert chunk == reported["chunks"]["r0s0t-0"]
    assert chunk[0]["response"] == "<b>bold</b>"


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def steps(live: LiveRuns) -> int:
    return int(live.page()[1]["runs"][0]["stages"][0]["steps"])


def test_what_is_new_is_read_when_it_is_time(run_of_one_step: Path) -> None:
    clock = Clock()
    live = LiveRuns([run_of_one_step], poll_s=2.0, now_s=clock)
    assert (live.version, steps(live)) == (1, 1)
    go_on(run_of_one_step, 2)
    assert steps(live) == 1
    clock.now_s = 1e6
    assert (steps(live), live.version) == (2, 2)
    clock.now_s = 2e6
    assert (steps(live), live.version) == (2, 2)
    rows = live.page()[1]["runs"][0]["stages"][0]["samples"][0]["steps"]
    assert [row[0] for row in rows] == [1, 2]


def test_a_costly_look_is_followed_by_a_long_rest(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All looks together take at most 1/400 of a core."""
    used = iter([0.0, 9.0, 9.0, 9.125, 9.125, 9.15, 9.15, 9.175])
    monkeypatch.setattr(time, "thread_time", lambda: next(used))
    folder, clock = make_run(num_steps=1), Clock()
    live = LiveRuns([folder], poll_s=2.0, now_s=clock)
    seen = []
    for step, now_s in ((2, 2.0), (3, 51.9), (4, 52.1), (5, 62.0), (6, 62.2)):
        go_on(folder, step)
        clock.now_s = now_s
        seen.append(steps(live))
    # The first look costs 9 s, as it imports; the others 0.125, 0.025 and 0.025 s.
    assert seen == [2, 2, 4, 4, 6]


def test_a_resumed_run_is_read_again(run_of_one_step: Path) -> None:
    clock = Clock()
    for step in range(2, 6):
        go_on(run_of_one_step, step, "before")
    live = LiveRuns([run_of_one_step], now_s=clock)
    whole = (run_of_one_step / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    replaced = run_of_one_step / "new"
    replaced.write_bytes(b"".join(whole[:-3]))
    replaced.replace(run_of_one_step / "metrics.jsonl")
    RolloutFiles(run_of_one_step, 1 << 30).resume_at(2)
    go_on(run_of_one_step, 3, "after")
    clock.now_s = 1e6
    assert steps(live) == 3
    (source,) = live.page()[1]["runs"][0]["stages"][0]["samples"]
    assert [row[0] for row in source["steps"]] == [1, 2, 3]
    assert live.chunk("r0s0t0-0") is None  # from the previous page
    records = json.loads(live.chunk(f"{source['key']}-0") or "")
    assert [record["response"] for record in records[1:]] == ["before", "after"]


def test_a_run_that_is_begun_again_stays_as_it_was_for_a_moment(
    run_of_one_step: Path,
) -> None:
    clock = Clock()
    live = LiveRuns([run_of_one_step], now_s=clock)
    (run_of_one_step / "run.json").unlink()
    clock.now_s = 1e6
    assert steps(live) == 1


def lines_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if wanted in line:
            return line
    raise AssertionError(f"the command ended without {wanted!r}")


def test_the_command_serves_a_run_that_goes_on_until_ctrl_c(
    run_of_one_step: Path,
) -> None:
    command = [sys.executable, "-m", "rl_cli", "watch", str(run_of_one_step)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--poll-s", "0.1", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = json.loads(lines_until(process, "url"))["url"]
        port, token = re.fullmatch(
            r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})", url
        ).groups()  # type: ignore[union-attr]
        assert get(int(port), "/", token=None)[0] == 401
        go_on(run_of_one_step, 2)
        deadline_s = time.monotonic() + DEADLINE_S
        status = 204
        while status == 204 and time.monotonic() < deadline_s:
            status, text, _ = get(int(port), "/data?seen=1", token=token)
        assert json.loads(text)["runs"][0]["stages"][0]["steps"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "'none' is not the folder of a run"),
        (["none", "--once"], "'none' is not the folder of a run"),
        (["RUN", "--port", "70000"], "70000"),
        (["RUN", "--poll-s", "0"], "of at least 0.1: got 0"),
        (["RUN", "--once", "--json"], "--json is for the page"),
        (["RUN", "--port", "TAKEN"], "another program listens there"),
    ],
)
def test_wrong_input_is_named(
    run_of_one_step: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("os.nice", lambda increment: increment)
    with bound_socket(HOST, 0) as taken:
        places = {"RUN": str(run_of_one_step), "TAKEN": str(taken.getsockname()[1])}
        given = [places.get(part, part) for part in arguments]
        assert _run(["watch", *given], False) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_second_page_takes_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_cli.commands import watch  # noqa: PLC0415

    with bound_socket(HOST, 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(watch, "_PORT", port)
        listener = watch._listener
        with listener(HOST, None) as second:
            assert second.getsockname()[1] not in (0, port)
        for host, wanted in ((HOST, port), ("0.0.0.0", None)):
            with pytest.raises(ConfigError, match="another program listens there"):
                listener(host, wanted)
    with listener(HOST, None) as first:
        assert first.getsockname()[1] == port


def test_a_terminal_shows_the_essentials_once(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    log = {"level": "ERROR", "message": "it broke", "logger": "a", "time": "1"}
    folder = make_run(rollouts=[answer(20, "the answer")], logs=[log])
    assert _run(["watch", str(folder), "--once"], False) == 0
    out = capsys.readouterr().out
    for said in (
        "finished",
        "grpo: step 20 of 20, 1 s per step, best val:accuracy 50.0% at step 20",
        "train:reward",
        "1 warnings and errors; ERROR: it broke",
        "answer of step 20, reward 1",
        "the answer",
    ):
        assert said in out


def test_a_small_terminal_shows_state_warnings_metrics_and_an_answer(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_cli.report import terminal_view  # noqa: PLC0415

    log = {"level": "ERROR", "message": "it broke " * 50, "logger": "a", "time": "1"}
    folder = make_run(rollouts=[answer(20, "the answer " * 50)], logs=[log])
    more = dict.fromkeys(terminal_view._METRICS, 0.123456)
    line = {"step": 20, "time": 1.7e9, "metrics": more}
    (metrics,) = folder.glob("**/metrics.jsonl")
    with open(metrics, "a") as file:
        file.write(json.dumps(line) + "\n")

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal_view.time, "sleep", leave)
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    terminal_view.show(LiveRuns([folder]), console, once=False)
    # The last frame, after the cursor moved up; without colours.
    drawn = re.split(r"\x1b\[1A", out.getvalue())[-1]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", drawn).rstrip("\n").splitlines()
    assert max(map(len, shown)) <= 80
    for said in (
        "finished",
        "step 20 of 20",
        "ERROR: it broke",
        "train:reward",
        "val:accuracy",
        "answer of step 20",
        "response: the answer",
    ):
        assert any(said in line for line in shown), said
    # Cut to the screen by leaving lines out, not at its lower edge.
    assert len(shown) < 24
    assert "..." not in shown


@pytest.mark.parametrize(
    "text", ["\x1b[2J\x1b]0;title\x07", "[red]x[/]", "a\r\nb\x9bc"]
)
def test_no_text_commands_the_terminal(make_run: MakeRun, text: str) -> None:
    sample = {**answer(20, text), "prompt": text}
    log = {"level": "ERROR", "message": text, "logger": text, "time": "1"}
    folder = make_run(rollouts=[sample], logs=[log])
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    console.print(essentials(LiveRuns([folder])))
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    if text.isprintable():
        assert out.getvalue().count(text) == 3


def test_a_terminal_is_drawn_until_ctrl_c(
    run_of_one_step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_cli.report import terminal_view  # noqa: PLC0415

    slept = iter([2, 3])

    def work(seconds: float) -> None:
        step = next(slept, None)
        if step is None:
            raise KeyboardInterrupt
        go_on(run_of_one_step, step)
        clock.now_s += 1e6

    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(terminal_view.time, "sleep", work)
    live = LiveRuns([run_of_one_step], now_s=clock)
    console = Console(file=out, width=100, height=50, force_terminal=True)
    terminal_view.show(live, console, once=False)
    shown = [out.getvalue().rfind(f"step {n} of") for n in (1, 2, 3)]
    assert -1 < shown[0] < shown[1] < shown[2]


@NEEDS_BROWSER
def test_a_page_follows_the_run_and_keeps_what_was_typed(
    make_run: MakeRun,
) -> None:
    folder = make_run(num_steps=1, rollouts=[answer(1)], finished=False)
    live = LiveRuns([folder], poll_s=0.1)
    hostile = "<img src=x onerror=alert(1)>"
    with served(live) as port, Chromium() as browser:
        browser.open_address(f"http://{HOST}:{port}/?token={TOKEN}#samples")
        browser.wait("document.querySelectorAll('article').length === 1")
        browser.evaluate("document.querySelector('input[type=search]').value = 'kept'")
        go_on(folder, 2, hostile)
        browser.wait("document.querySelector('output').textContent === '2'")
        browser.wait(f"document.body.innerText.includes({json.dumps(hostile)})")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert (
            browser.evaluate("document.querySelector('input[type=search]').value")
            == "kept"
        )
        browser.click("#tab-learning")
        chart = "document.querySelector('.chart .plot').getAttribute('aria-label')"
        browser.wait(f"({chart} || '').includes('to 0.2 at 2')")
        go_on(folder, 3)
        browser.wait(f"{chart}.includes('to 0.3 at 3')")
        runs = "document.getElementById('runs').textContent"
        assert "3 steps" in browser.evaluate(runs)
        assert browser.complaints() == []
