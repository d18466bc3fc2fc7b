"""The bridge to OpenEnv, with a server on the real package and a stand-in."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync import client
from websockets.sync.client import connect
from websockets.sync.server import serve

from rl_distributed.errors import ConfigError
from rl_envs import MessageLogError, TaskError
from rl_envs.bridges.openenv import (
    OpenEnvConfig,
    OpenEnvEnvironment,
    OpenEnvServer,
    OpenEnvTasks,
)
from rl_envs.bridges.openenv.actions import ActionForm
from rl_envs.bridges.openenv.observations import ObservationText
from rl_envs.bridges.openenv.server_process import ServerProcess
from rl_envs.errors import EnvironmentServerError
from rl_envs.registry import EnvironmentSpec, create_env, create_task_source
from rl_envs.testing import (
    Examination,
    assert_passed,
    examine_environment,
    examine_tasks,
)
from rl_envs.worlds.game import Playthrough, played

SCRIPTS = Path(__file__).parent / "scripts"
PACKAGE = ("{python}", str(SCRIPTS / "openenv_server.py"), "{port}")
STAND_IN = (sys.executable, str(SCRIPTS / "openenv_stand_in.py"), "{port}")
NUM_QUESTIONS = 3


@pytest.fixture(scope="module")
def package() -> Iterator[str]:
    """A server on the real package, in its extra's environment."""
    server = ServerProcess(OpenEnvServer(command=PACKAGE))
    yield server.address()
    server.close()


@pytest.fixture(scope="module")
def stand_in() -> Iterator[str]:
    server = ServerProcess(OpenEnvServer(command=STAND_IN))
    yield server.address()
    server.close()


@pytest.fixture(params=["package", "stand_in"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def row(seed: int = 5, **options: Any) -> dict[str, Any]:
    return {"prompt": "?", "openenv_reset": json.dumps({"seed": seed, **options})}


def sums(seed: int = 5, largest: int = 9) -> list[int]:
    """Return the correct answers by the server's definition."""
    rng = random.Random(seed)
    return [
        rng.randint(0, largest) + rng.randint(0, largest) for _ in range(NUM_QUESTIONS)
    ]


def play(given: dict[str, Any], *said: Any, **config: Any) -> Playthrough:
    responses = iter(said)
    world = OpenEnvEnvironment(OpenEnvConfig(**config))
    try:
        return played(world, given, lambda _: f"<move>{next(responses)}</move>")
    finally:
        world.shutdown()


def log(text: Any) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": str(text)}]


def test_a_conversation_is_an_episode(address: str) -> None:
    tasks = OpenEnvTasks(address=address, reset={"largest": 99}, instruction="Add.")
    given = tasks.train(1)[0]
    options = json.loads(given["openenv_reset"])
    right = sums(options["seed"], 99)
    rng = random.Random(options["seed"])
    assert given["prompt"] == f"Add.\n{rng.randint(0, 99)}+{rng.randint(0, 99)}="
    game = play(given, *right, address=address)
    assert (game.reward, game.outcome) == (3.0, "finished")
    assert game.messages[2]["content"] == f"{rng.randint(0, 99)}+{rng.randint(0, 99)}="
    wrong = play(given, right[0], right[1] + 1, right[2], address=address)
    assert wrong.reward == 2.0
    assert [m["content"] for m in wrong.messages[:3:2]] == [
        m["content"] for m in game.messages[:3:2]
    ]


def test_credit_and_what_counts_as_solved(address: str) -> None:
    right = sums()
    last = play(row(), right[0], right[1], -1, address=address, credit="last")
    assert (last.reward, last.outcome) == (0.0, "finished")
    last = play(row(), 0, 0, right[2], address=address, credit="last", solved_reward=1)
    assert (last.reward, last.outcome) == (1.0, "solved")
    last = play(row(), *right[:2], -1, address=address, credit="last", solved_reward=1)
    assert (last.reward, last.outcome) == (0.0, "lost")
    limits: dict[str, Any] = {"address": address, "solved_reward": 2}
    assert play(row(), *right, **limits).outcome == "solved"
    assert play(row(), right[0], 99, 99, **limits).outcome == "lost"
    cut = play(row(), *right, address=address, max_turns=2)
    assert (cut.reward, cut.outcome) == (2.0, "out_of_turns")
    cut = play(row(), *right, address=address, max_turns=2, credit="last")
    assert cut.reward == 0.0


@pytest.mark.parametrize("most", [1, 3, 64])
def test_conversations_are_equal_with_few_sessions_or_many(
    address: str, most: int
) -> None:
    """Several at a time, each against the definition; repeated calls agree."""
    rows = [row(seed) for seed in (1, 1, 2, 3, 4)]
    rights = [sums(seed) for seed in (1, 1, 2, 3, 4)]
    world = OpenEnvEnvironment(OpenEnvConfig(address=address, max_sessions=most))
    columns: list[Any] = list(rows)
    for turn in range(NUM_QUESTIONS):
        # The third always answers wrongly.
        logs = [log(right[turn] + (place == 2)) for place, right in enumerate(rights)]
        result = world.step(logs, columns)
        again = world.step(logs, columns)
        assert again.observations == result.observations
        assert again.metadata == result.metadata
        assert result.rewards.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
        assert result.terminateds.tolist() == [turn == NUM_QUESTIONS - 1] * 5
        columns = result.metadata
    assert len(world._episodes._kept._kept) <= most
    world.shutdown()


def test_a_server_has_no_more_sessions_than_are_allowed() -> None:
    server = ServerProcess(OpenEnvServer(command=(*STAND_IN, "2")))
    config = {"address": server.address(), "connect_s": 0.3}
    world = OpenEnvEnvironment(OpenEnvConfig(**config, max_sessions=2))
    result = world.step([log(0)] * 8, [row(seed) for seed in range(8)])
    for _ in range(2):
        result = world.step([log(0)] * 8, result.metadata)
    assert result.terminateds.tolist() == [True] * 8
    world.shutdown()
    world = OpenEnvEnvironment(OpenEnvConfig(**config, max_sessions=3))
    with pytest.raises(
        EnvironmentServerError, match="it allows 2 sessions; lower max_sessions"
    ):
        world.step([log(0)] * 8, [row(seed) for seed in range(8)])
    world.shutdown()
    server.close()


def test_sessions_of_the_package_are_released(package: str) -> None:
    """More conversations than its session limit, one after another."""
    config = OpenEnvConfig(address=package, max_sessions=64, connect_s=2)
    world = OpenEnvEnvironment(config)
    for start in range(0, 120, 40):
        rows = [row(seed) for seed in range(start, start + 40)]
        begun = world.step([log(0)] * 40, rows)
        assert not begun.terminateds.any()
        world.close(begun.metadata)
        assert not world._episodes._kept._kept
    world.shutdown()


def test_a_step_that_raises(address: str) -> None:
    right = sums()
    game = play(row(), right[0], "many", address=address)
    assert game.outcome == "error"
    assert math.isnan(game.reward)
    assert "invalid literal for int() with base 10: 'many'" in str(
        game.columns["game"]["error"]
    )
    config: dict[str, Any] = {"address": address, "failed_step": "illegal"}
    game = play(row(), right[0], "many", right[1], right[2], **config)
    assert (game.reward, game.outcome) == (3.0, "finished")
    assert "invalid literal for int()" in game.messages[4]["content"]
    assert game.columns["game"]["illegal"] == 1
    assert play(row(), *["many"] * 3, **config).outcome == "illegal"


def test_an_action_that_is_refused(address: str) -> None:
    right = sums()
    game = play(row(), right[0], "1" * 41, *right[1:], address=address)
    assert (game.reward, game.outcome) == (3.0, "finished")
    assert game.messages[4]["content"] == (
        "That is no action: message: String should have at most 40 characters"
    )
    assert game.columns["game"]["illegal"] == 1
    assert len(game.columns["game"]["actions"]) == NUM_QUESTIONS


def test_a_server_that_ends_the_session_over_an_action(address: str) -> None:
    right = sums()
    game = play(row(), right[0], "3*4", address=address)
    assert game.outcome == "error"
    game = play(
        row(), right[0], "3*4", *right[1:], address=address, failed_step="illegal"
    )
    assert (game.reward, game.outcome) == (3.0, "finished")
    assert "erialize" in game.messages[4]["content"]


def test_a_server_that_hangs_costs_its_conversation_only(address: str) -> None:
    world = OpenEnvEnvironment(OpenEnvConfig(address=address, call_s=1.0))
    began = time.monotonic()
    result = world.step([log("hang"), log(sums()[0])], [row(), row()])
    assert time.monotonic() - began < 30
    assert math.isnan(result.rewards.tolist()[0])
    assert result.rewards.tolist()[1] == 1.0
    assert result.metadata[0]["outcome"] == "error"
    assert "did not answer a step within 1 s" in result.metadata[0]["game"]["error"]
    world.shutdown()


@pytest.mark.parametrize(
    "command", [STAND_IN, pytest.param(PACKAGE, marks=pytest.mark.slow)]
)
def test_a_server_that_dies_is_started_again(command: tuple[str, ...]) -> None:
    """Its other conversations are replayed."""
    world = OpenEnvEnvironment(OpenEnvConfig(command=command))
    right = sums()
    first = world.step([log(right[0])], [row()])
    dead = world.step([log("die")], first.metadata)
    assert dead.metadata[0]["outcome"] == "error"
    assert math.isnan(dead.rewards.tolist()[0])
    second = world.step([log(right[1])], first.metadata)
    assert second.rewards.tolist() == [1.0]
    assert second.metadata[0]["game"]["actions"] == [
        json.dumps({"message": str(part)}) for part in right[:2]
    ]
    world.shutdown()


def test_a_connection_lost_in_its_handshake_is_opened_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = iter([True, False])

    def once_lost(*arguments: Any, **settings: Any) -> Any:
        if next(lost):
            raise ConnectionClosedError(None, None)
        return connect(*arguments, **settings)

    monkeypatch.setattr(client, "connect", once_lost)
    world = OpenEnvEnvironment(OpenEnvConfig(address=address))
    assert world.step([log(sums()[0])], [row()]).rewards.tolist() == [1.0]
    assert list(lost) == []
    world.shutdown()


def test_episodes_that_cannot_be_repeated(address: str) -> None:
    config = OpenEnvConfig(address=address, max_sessions=1)
    world = OpenEnvEnvironment(config)
    diced = world.step([log("dice")], [row()])
    world.step([log("0")], [row(6)])  # which takes the only session
    ended = world.step([log(sums()[0])], diced.metadata)
    assert ended.metadata[0]["outcome"] == "error"
    assert "set is_repeatable=false" in ended.metadata[0]["game"]["error"]
    world.shutdown()
    world = OpenEnvEnvironment(
        OpenEnvConfig(address=address, is_repeatable=False, max_sessions=2, call_s=1)
    )
    # Two equal ones have a session each.
    diced = world.step([log("dice"), log("dice")], [row(), row()])
    assert diced.observations[0] != diced.observations[1]
    with pytest.raises(EnvironmentServerError, match="all 2 sessions are taken"):
        world.step([log(0)], [row(6)])
    for answer in sums():
        diced = world.step([log(answer)] * 2, diced.metadata)
        assert diced.rewards.tolist() == [1.0, 1.0]
    assert diced.terminateds.tolist() == [True, True]
    # A finished session is not restarted.
    begun = world.step([log(0)], [row()])
    world.close(begun.metadata)
    assert world.step([log(0)], begun.metadata).metadata[0]["outcome"] == "error"
    world.shutdown()


def test_seeds_of_conversations(stand_in: str) -> None:
    world = OpenEnvEnvironment(OpenEnvConfig(address=stand_in))
    plain = {"prompt": "?", "openenv_reset": {"largest": 50}}
    begun = world.reset([plain, {"prompt": "?"}, row(3)], [7, 8, 9])
    assert [json.loads(each["openenv_reset"]) for each in begun] == [
        {"largest": 50, "seed": 7}, {"seed": 8}, {"seed": 3},
    ]  # fmt: skip
    assert plain["openenv_reset"] == {"largest": 50}
    right = [sums(7, 50)[0], sums(8)[0], sums(3)[0]]
    result = world.step([log(each) for each in right], begun)
    assert result.rewards.tolist() == [1.0, 1.0, 1.0]
    world.shutdown()


def test_checks_of_the_contract(address: str) -> None:
    rows = OpenEnvTasks(address=address).train(5)
    config = {"address": address}
    settings = {**config, "failed_step": "illegal"}
    assert_passed(
        examine_environment(
            EnvironmentSpec.of("openenv", settings),
            rows,
            Examination(process_deadline_s=120),
        )
    )
    assert_passed(
        examine_tasks(
            lambda seed: create_task_source("openenv", {**config, "seed": seed}), 8
        )
    )


def test_splits_follow_the_start_where_starts_differ(stand_in: str) -> None:
    assert OpenEnvTasks(address=stand_in).split_by == "start"
    one = OpenEnvTasks(address=stand_in, split_by="seed")
    assert len({one.key(task) for task in one.sample("train", 9)}) == 9
    assert pickle.loads(pickle.dumps(one)).train(3) == one.train(3)


def test_rows_that_cannot_be_played_are_named(address: str) -> None:
    given = OpenEnvTasks(address=address).train(1)[0]
    world = OpenEnvEnvironment(OpenEnvConfig(address=address))
    found = world.unusable_rows(
        [
            given,
            {"openenv_reset": "[1]"},
            {**given, "openenv_start": "0"},
            row(largest=0),
            {"prompt": "?"},
            {**given, "openenv_start": 3},
        ]
    )
    assert set(found) == {1, 2, 3, 5}
    assert "metadata[1]['openenv_reset'] must be a JSON object" in found[1]
    assert "metadata[2]: an episode that was started" in found[2]
    assert found[3] == "metadata[3]: the reset failed: largest must be positive"
    assert "metadata[5]['openenv_start'] must be as" in found[5]
    with pytest.raises(MessageLogError, match="must be a JSON object"):
        world.step([log(0)], [{"openenv_reset": "no"}])
    world.shutdown()
    with pytest.raises(TaskError, match="cannot be started: largest must be positive"):
        OpenEnvTasks(address=address, reset={"largest": 0})


def transcript(address: str) -> list[Any]:
    """Return a server's messages verbatim."""
    said: list[Any] = []
    url = address.replace("http", "ws") + "/ws"
    steps: list[dict[str, Any]] = [
        {"type": "reset", "data": {"seed": 3, "episode_id": "e", "unknown": 1}},
        {"type": "step", "data": {"message": "12"}},
        {"type": "step", "data": {"message": "word"}},
        {"type": "step", "data": {"message": "1" * 41}},
        {"type": "step", "data": {"message": "12"}},
        {"type": "step", "data": {"message": "12"}},
        {"type": "reset", "data": {"seed": 3}},
        {"type": "step", "data": {"message": "*"}},
    ]
    with connect(url, proxy=None) as wire:
        for step in steps:
            wire.send(json.dumps(step))
            reply = json.loads(wire.recv(timeout=30))
            if reply["type"] == "error":
                data = reply["data"]
                problems = [
                    (each["loc"], each["msg"]) for each in data.get("errors", ())
                ]
                reply = [data["code"], problems]
            said.append(reply)
    return said


def test_the_stand_in_says_what_the_package_says(package: str, stand_in: str) -> None:
    assert transcript(stand_in) == transcript(package)


@pytest.fixture
def other_server() -> Iterator[Callable[[Any], str]]:
    """Servers of other protocols."""
    opened: list[Any] = []

    def start(kind: Any) -> str:
        if kind.startswith("HTTP"):
            handler = type("_", (BaseHTTPRequestHandler,), {"protocol_version": kind})
            server: Any = HTTPServer(("127.0.0.1", 0), handler)
            port = server.server_address[1]
        else:
            server = serve(lambda wire: [wire.send(kind) for _ in wire], "127.0.0.1", 0)
            port = server.socket.getsockname()[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened.append(server)
        return f"http://127.0.0.1:{port}"

    yield start
    for server in opened:
        server.shutdown()


OBSERVATION: dict[str, Any] = {"observation": {"t": "x"}, "reward": 1, "done": False}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("HTTP/1.0", "InvalidMessage: did not receive a valid HTTP response"),
        ("HTTP/1.1", r"InvalidStatus: server rejected WebSocket connection: HTTP 501"),
        ("hello", "must answer a reset by an observation .*got 'hello'"),
        ('{"type": "observation"}', "must answer a reset by an observation"),
        ('{"type": "welcome", "data": {}}', "must answer a reset by an observation"),
        (
            json.dumps({"type": "observation", "data": {**OBSERVATION, "reward": "1"}}),
            "must answer a reset by an observation",
        ),
        (
            json.dumps({"type": "observation", "data": {**OBSERVATION, "done": 1}}),
            "must answer a reset by an observation",
        ),
        (
            json.dumps(
                {"type": "observation", "data": {**OBSERVATION, "reward": math.inf}}
            ),
            "must be finite: got inf",
        ),
        (
            '{"type": "error", "data": {"code": "UNKNOWN_TYPE", "message": "m"}}',
            r"refuses a reset \(UNKNOWN_TYPE: m\)",
        ),
        ("x" * (2 << 20), "answered a reset with more than 1 MiB; raise max_message"),
    ],
)
def test_servers_of_other_protocols(
    other_server: Callable[[Any], str], kind: str, message: str
) -> None:
    config: dict[str, Any] = {"connect_s": 0.5, "max_message_mib": 1}
    with pytest.raises(EnvironmentServerError, match=message):
        play(row(), 1, address=other_server(kind), **config)
    with pytest.raises(EnvironmentServerError, match=message):
        OpenEnvTasks(address=other_server(kind), **config)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_an_address_without_openenv(package: str) -> None:
    """The package's server at a path that it does not serve."""
    with pytest.raises(
        EnvironmentServerError,
        match=r"no server of OpenEnv at \S+: ws://\S+/env/ws answers with HTTP 40",
    ):
        play(row(), 1, address=f"{package}/env")


def test_no_server() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(
        EnvironmentServerError,
        match=r"cannot be reached within 0.4 s \(connect_s\): ConnectionRefusedError",
    ):
        play(row(), 1, address=address, connect_s=0.4)
    assert time.monotonic() - began < 20


def test_a_server_may_come_late() -> None:
    """Connecting is retried until its deadline."""
    port = free_port()
    command = [word.replace("{port}", str(port)) for word in STAND_IN]
    started: list[Any] = []
    timer = threading.Timer(0.3, lambda: started.append(subprocess.Popen(command)))
    timer.start()
    game = play(row(), *sums(), address=f"http://127.0.0.1:{port}", connect_s=60)
    assert game.reward == 3.0
    timer.join()
    started[0].kill()
    started[0].wait()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((sys.executable, "-c", "print('oh'); exit(4)"), r"exit code 4 .*said: oh"),
        (("no-such-program-xy",), "exit code 127 .*No such file"),
        ((sys.executable, "-c", "input()"), "exit code 1 .*EOFError"),
        (("sleep", "99"), r"took more than 0.5 s \(start_s\)"),
    ],
)
def test_commands_that_start_no_server(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(EnvironmentServerError, match=f"(?s){message}"):
        OpenEnvTasks(command=(*command, "{port}"), start_s=0.5 if "took" in message
                     else 60)  # fmt: skip


def is_up(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gone_within(port: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while is_up(port):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_started_server_ends_with_its_owner(how: signal.Signals | None) -> None:
    code = (
        "import sys\n"
        "from rl_envs.bridges.openenv import OpenEnvServer\n"
        "from rl_envs.bridges.openenv.server_process import ServerProcess\n"
        f"server = ServerProcess(OpenEnvServer(command={STAND_IN!r}))\n"
        "print(server.address(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    port = int(owner.stdout.readline().decode().rpartition(":")[2])
    assert is_up(port)
    if how is None:
        owner.stdin.close()
    else:
        os.kill(owner.pid, how)
    owner.wait(60)
    assert gone_within(port, 30)
    owner.stdout.close()


def test_shutdown_ends_the_server_and_a_copy_has_its_own() -> None:
    world = OpenEnvEnvironment(OpenEnvConfig(command=STAND_IN))
    copy = pickle.loads(pickle.dumps(world))
    games = [played(each, row(), lambda _: "0") for each in (world, copy)]
    assert games[0] == games[1]
    ports = [int(each._server._process._address.rpartition(":")[2])
             for each in (world, copy)]  # fmt: skip
    assert ports[0] != ports[1]
    for each in (world, copy):
        each.shutdown()
        each.shutdown()
    assert all(gone_within(port, 30) for port in ports)
    # It starts again on the next use.
    assert played(world, row(), lambda _: "0") == games[0]
    world.shutdown()


ADDRESS = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("action", "said", "found"),
    [
        ({"message": "{text}"}, "<move> 3 </move>", {"message": "3"}),
        ({"a": ["<{text}>", 2, None]}, "x\ny", {"a": ["<y>", 2, None]}),
        ({"n": "{int}"}, "-12", {"n": -12}),
        ({"n": "{int}"}, "1.5", "must be a whole number"),
        ({"n": "{int}"}, "1_000", "must be a whole number"),
        ({"n": "{int}"}, "9" * 41, "must be a whole number"),
        ({"n": "{float}"}, "1.5", {"n": 1.5}),
        ({"n": "{float}"}, "nan", "must be a number"),
        ({"n": "{float}"}, "1e999", "must be a number"),
        ({"n": "{json}"}, '{"a": 1}', {"n": {"a": 1}}),
        ({"n": "{json}"}, '{"a": NaN}', "That is no action"),
        ("{json}", '{"a": 1}', {"a": 1}),
        ("{json}", "[1]", "must be a JSON object"),
        ("{json}", "yes", "not one JSON value"),
    ],
)
def test_actions_are_read_or_refused(action: Any, said: str, found: Any) -> None:
    form = ActionForm(OpenEnvConfig(address=ADDRESS, action=action))
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            form.read(said)
    else:
        assert form.read(said)[0] == found


def test_all_of_a_response_may_be_the_action() -> None:
    form = ActionForm(OpenEnvConfig(address=ADDRESS, read_action="response"))
    assert form.read(" a\n<move>b</move> ")[0] == {"message": "a\n<move>b</move>"}


def test_a_response_that_is_no_action_reaches_no_server() -> None:
    config = {"address": ADDRESS, "action": {"message": "{int}"}}
    game = play(row(), *["?"] * 3, **config)
    assert game.outcome == "illegal"
    assert game.messages[2]["content"] == (
        "That is no action: it must be a whole number."
    )


@pytest.mark.parametrize(
    ("show", "observation", "text"),
    [
        ("", {"text": "hello"}, "hello"),
        ("", {"n": 3}, '{"n": 3}'),
        ("", {"a": "x", "b": [1]}, '{"a": "x", "b": [1]}'),
        ("{a}: {b.c}{d}", {"a": "x", "b": {"c": 2}, "d": None}, "x: 2"),
        ("{a} {1} {}", {"a": "{b}"}, "{b} {1} {}"),
    ],
)
def test_observations_as_text(show: str, observation: Any, text: str) -> None:
    server = OpenEnvServer(address=ADDRESS, show=show)
    assert ObservationText(server).of(observation) == text


def test_a_field_that_is_missing_is_named() -> None:
    text = ObservationText(OpenEnvServer(address=ADDRESS, show="{a.c}"))
    with pytest.raises(ConfigError, match=r"'a\.c', which .* it has a, b"):
        text.of({"a": {"b": 1}, "b": 1})


def test_functions_of_the_user(stand_in: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def action(text):\n"
        "    if text == 'no': raise ValueError('say a sum')\n"
        "    if text == 'list': return [1]\n"
        "    return {'message': str(eval(text))}\n"
        "def show(observation):\n"
        "    return observation['text'][::-1]\n"
    )
    config: dict[str, Any] = {
        "address": stand_in,
        "action_function": f"{file}:action",
        "observation_function": f"{file}:show",
    }
    right = [f"{answer - 1}+1" for answer in sums()]
    game = play(row(), "no", *right, **config)
    assert (game.reward, game.columns["game"]["illegal"]) == (3.0, 1)
    assert game.messages[2]["content"] == "say a sum"
    assert game.messages[4]["content"].startswith("=")
    with pytest.raises(ConfigError, match="must return a dict: got list"):
        play(row(), "list", **config)
    by_module = {**config, "action_function": "json:loads"}
    assert play(row(), '{"message": "1"}', 1, **by_module, max_turns=1).reward == 0
    for name, message in {
        "no_module_xy:f": "No module named",
        "json:nothing": "no attribute 'nothing'",
        f"{file}:nothing": "no function 'nothing'",
    }.items():
        with pytest.raises((ConfigError, ImportError), match=message):
            play(row(), 1, **{**config, "action_function": name})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs an address, or a command .*: got neither"),
        ({"address": ADDRESS, "command": ["a", "{port}"]}, "got both"),
        ({"address": "127.0.0.1:8000"}, "must be an address such as http://127"),
        ({"command": ["server"]}, r"must say where the server listens, by \{port\}"),
        ({"address": ADDRESS, "action_function": "f"}, "must be a function, as file"),
        ({"address": ADDRESS, "action_function": "no.py:f"}, "does not exist"),
        (
            {"address": ADDRESS, "show": "{a}", "observation_function": "a.b:c"},
            "not both",
        ),
        ({"address": ADDRESS, "action": "{text}"}, "action"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_env("openenv", given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split_by": "x"}, "split_by must be 'start' or 'seed': got 'x'"),
        ({"reset": {"a": {1}}}, "reset must be a mapping of JSON values"),
        ({"reset": {"seed": 1}}, "reset must not hold 'seed'"),
        ({"adress": ADDRESS}, "adress"),
    ],
)
def test_wrong_settings_of_tasks_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TaskError, ConfigError), match=message):
        create_task_source("openenv", {"address": ADDRESS, **given})


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "websockets.py").write_text("raise ImportError('not here')\n")
    code = (
        "from rl_envs.bridges.openenv import OpenEnvTasks\n"
        "try: OpenEnvTasks(address='http://127.0.0.1:1')\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("MissingExtraError")
    assert "pip install 'rl-envs[openenv]'" in done.stdout
