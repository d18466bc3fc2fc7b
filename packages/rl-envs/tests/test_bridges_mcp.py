"""The bridge to MCP servers: one in the sandbox, and one on the real package."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_distributed.errors import ConfigError, MissingExtraError
from rl_envs.bridges.mcp import McpConfig, McpEnvironment
from rl_envs.bridges.mcp.tools import McpTool
from rl_envs.errors import SandboxError
from rl_envs.sandbox import Command, Sandbox, SandboxLevel, SandboxPool, SandboxResult
from rl_envs.sandbox.registry import sandbox_registry
from rl_envs.testing import check_environment
from rl_envs.tools.functions import ToolArgumentError

SCRIPT = Path(__file__).parent / "scripts" / "mcp_notes.py"
ROW = {"prompt": "What do the notes say?", "answer": "a,b"}

# With the package itself and a stateful session.
OF_THE_PACKAGE = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("counter")
total = 0

@server.tool()
def count(by: int, note: str = "") -> int:
    "Count up."
    global total
    total += by
    return total

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no luck")

server.run("stdio")
"""


class HereSandbox(Sandbox):
    """No sandbox: this Python, which has the package installed."""

    def __init__(self, num_slots: int, level: SandboxLevel) -> None:
        self.num_slots, self.level = num_slots, level

    def run_command(self, command: Command, limits: Any = None) -> SandboxResult:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in command.files.items():
                (Path(folder) / name).write_bytes(data)
            done = subprocess.run(
                [sys.executable, *command.argv[1:]],
                cwd=folder,
                input=command.stdin,
                capture_output=True,
                text=True,
                timeout=60,
            )
        return SandboxResult("ok", done.stdout, done.stderr, 0, None, 0.0, 0)

    def close(self) -> None:
        """Do nothing; no resources are held."""


@pytest.fixture(scope="module", autouse=True)
def confined() -> None:
    try:
        with SandboxPool(1) as pool:
            why = pool.missing_languages()["bash"]
    except SandboxError as error:
        why = str(error)
    if why:
        pytest.skip(f"commands cannot be run here: {why}")


def config(port: int = 9, **settings: Any) -> McpConfig:
    return McpConfig.from_dict(
        {
            "command": ["/usr/bin/env", "python3", "notes.py", str(port)],
            "files": {"notes.py": str(SCRIPT)},
            **settings,
        },
        source="test",
    )


@pytest.fixture(scope="module")
def notes() -> Iterator[McpEnvironment]:
    environment = McpEnvironment(config())
    yield environment
    environment.shutdown()


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
        for name, given in made
    )


def turn(environment: Any, text: str, columns: Any = ROW) -> tuple[list[str], Any, Any]:
    """Return the reply to a response, the columns after it, and the reward."""
    log = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": text},
    ]
    result = environment.step([log], [columns])
    said = result.observations[0]
    told = [said] if isinstance(said, dict) else said
    reward = float(result.rewards[0])
    return [m["content"] for m in told], result.metadata[0], reward


def test_tools_are_those_of_the_server(notes: McpEnvironment) -> None:
    schemas = {s["function"]["name"]: s["function"] for s in notes.tool_schemas()}
    assert list(schemas) == [
        "add", "show", "fail", "refuse", "die", "hang", "flood", "look",
    ]  # fmt: skip
    assert schemas["add"]["description"] == "Add a note."
    assert schemas["add"]["parameters"]["required"] == ["text"]
    assert schemas["show"]["parameters"] == {"properties": {}, "type": "object"}


def test_a_conversation_has_a_session_of_its_own(notes: McpEnvironment) -> None:
    said, first, _ = turn(notes, calls(("add", {"text": "a"})))
    assert said == ["1 notes"]
    # Another conversation with the same server starts empty.
    assert turn(notes, calls(("add", {"text": "c"})))[0] == ["1 notes"]
    said, second, _ = turn(notes, calls(("add", {"text": "b"})), first)
    assert said == ["2 notes"]
    assert turn(notes, calls(("show", {})), second)[0] == ["a,b"]
    # A repeated turn returns the same.
    assert turn(notes, calls(("add", {"text": "b"})), first)[0] == ["2 notes"]
    assert turn(notes, "They say:\na,b", second)[2] == 1.0
    assert turn(notes, "a", second)[2] == 0.0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "add: argument $: 'text' is a required property"),
        ({"text": 3}, "argument text: 3 is not of type 'string'"),
        ({"text": "a", "times": 0}, "argument times: 0 is less than the minimum"),
        ({"text": "a", "colour": 1}, "Additional properties are not allowed"),
    ],
)
def test_bad_arguments_do_not_reach_the_server(
    notes: McpEnvironment, given: dict[str, Any], problem: str
) -> None:
    [said], columns, _ = turn(notes, calls(("add", given)))
    assert problem in said
    assert columns["mcp_calls"] == []


def test_a_server_that_fails_refuses_or_dies_costs_its_call(
    notes: McpEnvironment,
) -> None:
    _, columns, _ = turn(notes, calls(("add", {"text": "a"})))
    for name, problem in (
        ("fail", "Error: fail: ToolFailedError: the pen is broken"),
        ("refuse", "the server refused it: not now, and the call is undone"),
        ("die", "the server ended with exit code 3 (out of ink), and the call is"),
        ("flood", "the server sent more than its limit, and the call is undone"),
        ("write", "there is no tool 'write'"),
    ):
        [said], columns, _ = turn(notes, calls((name, {})), columns)
        assert problem in said
    assert [call["name"] for call in columns["mcp_calls"]] == ["add", "fail"]
    assert columns["num_tool_errors"] == 5
    assert turn(notes, calls(("show", {})), columns)[0] == ["a"]
    both = calls(("add", {"text": "b"}), ("show", {}))
    said, _, _ = turn(notes, both, columns)
    assert said == ["2 notes", "Error: only the first 1 calls of a turn are run"]


@pytest.mark.parametrize("reference", ["#/$defs/none", "http://127.0.0.1:9/schema"])
def test_a_schema_without_what_it_refers_to_costs_the_call(reference: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
    described = SimpleNamespace(name="t", description="T.", input_schema=schema)
    tool = McpTool(described, lambda name, arguments, row: "")
    assert tool.bind({}, {})["arguments"] == {}
    with pytest.raises(ToolArgumentError, match="lacks what it refers to"):
        tool.bind({"a": 1}, {})


def test_a_server_that_hangs_is_ended_and_a_stateless_one_gets_several_calls() -> None:
    environment = McpEnvironment(
        config(timeout_s=2.0, is_stateful=False, num_workers=2, tools=["add", "hang"])
    )
    try:
        said, columns, _ = turn(
            environment, calls(("hang", {}), ("add", {"text": "a"}), ("show", {}))
        )
        assert "the server took longer than its limit" in said[0]
        assert said[1] == "1 notes"
        assert "there is no tool 'show'; the tools are: add, hang" in said[2]
        assert turn(environment, calls(("add", {"text": "b"})), columns)[0] == [
            "1 notes"
        ]
    finally:
        environment.shutdown()


def test_limits_and_the_judge_are_settings() -> None:
    environment = McpEnvironment(
        config(
            judge="math",
            max_turns=1,
            max_result_chars=12,
            max_message_kib=16 << 10,
            scratch_mib=1,
        )
    )
    try:
        # 8 MiB: above the default limit.
        [said], columns, _ = turn(
            environment, calls(("flood", {})), {**ROW, "answer": "1/2"}
        )
        assert said.startswith("x" * 12)
        assert len(said) < 100
        assert turn(environment, r"\boxed{0.5}", columns)[2] == 1.0
        # A second turn with a call is scored as is.
        assert turn(environment, calls(("show", {})), columns)[2] == 0.0
    finally:
        environment.shutdown()


def test_the_server_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "open sesame")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = McpEnvironment(config(listener.getsockname()[1]))
        try:
            [said], _, _ = turn(environment, calls(("look", {})))
        finally:
            environment.shutdown()
    assert "secret= " in said
    assert "root=False home=/work" in said
    assert said.endswith("unreachable")
    # bwrap's init process, the dialogue and the server.
    assert int(said.split("processes=")[1].split()[0]) <= 4


def test_it_keeps_the_contract_and_starts_again_after_a_shutdown() -> None:
    environment = pickle.loads(pickle.dumps(McpEnvironment(config())))
    environment.shutdown()
    log = [{"role": "user", "content": "?"}]
    logs = [
        [*log, {"role": "assistant", "content": said}]
        for said in (calls(("add", {"text": "a"})), "a,b", "")
    ]
    check_environment(environment, logs, [dict(ROW) for _ in logs])


def test_a_server_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "counter.py"
    script.write_text(OF_THE_PACKAGE)
    monkeypatch.setitem(sandbox_registry._registered, "here", HereSandbox)
    environment = McpEnvironment(
        McpConfig(
            command=[sys.executable, "counter.py"],
            files={"counter.py": str(script)},
            sandbox="here",
        )
    )
    try:
        count, _ = environment.tool_schemas()
        assert count["function"]["description"] == "Count up."
        assert count["function"]["parameters"]["properties"]["by"]["type"] == "integer"
        earlier = [{"name": "count", "arguments": {"by": 2}}]
        said, columns, _ = turn(
            environment, calls(("count", {"by": 3})), {**ROW, "mcp_calls": earlier}
        )
        assert said == ["5"]
        [problem], columns, _ = turn(environment, calls(("fail", {})), columns)
        assert "ToolFailedError: Error executing tool fail" in problem
        assert len(columns["mcp_calls"]) == 3
    finally:
        environment.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": ["no-such-server"]}, "does not list its tools.*cannot be started"),
        ({"command": ["false"]}, "the server ended with exit code 1"),
        ({"tools": ["write"]}, r"must name tools.*got \['write'\]; it has \['add'"),
        ({"files": {"a": "/no/such/file"}}, r"files\['a'\] must be the path of a file"),
        ({"judge_settings": {"a": 1}}, "judge_settings are for an environment"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        McpEnvironment(config(**settings))


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "mcp_types.py").write_text("raise ImportError('not here')\n")
    code = (
        "import json\n"
        "from rl_envs.bridges.mcp import McpConfig, McpEnvironment\n"
        "try: McpEnvironment(McpConfig(command=['x']))\n"
        "except Exception as e: print(json.dumps([type(e).__name__, str(e)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    kind, text = json.loads(done.stdout)
    assert kind == MissingExtraError.__name__
    assert "pip install 'rl-envs[mcp]'" in text
