from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from rl_distributed.batch.arrays import to_numpy
from rl_distributed.errors import ConfigError
from rl_envs.testing import check_environment
from rl_envs.worlds.code_interpreter import (
    CodeInterpreterEnvironment,
    FencedCallParser,
)

SETTINGS: dict[str, Any] = {"judge": "text", "level": "seccomp", "timeout_s": 10.0}


@pytest.fixture(scope="module")
def world() -> Iterator[CodeInterpreterEnvironment]:
    environment = CodeInterpreterEnvironment(SETTINGS)
    yield environment
    environment.shutdown()


def fenced(code: str) -> str:
    return f"I compute.\n```python\n{code}\n```"


class Conversation:
    """One conversation with the world."""

    def __init__(self, world: CodeInterpreterEnvironment, answer: str = "42") -> None:
        self.world = world
        self.log: list[dict[str, str]] = [{"role": "user", "content": "Compute."}]
        self.row: Any = {"answer": answer}
        self.has_ended = False
        self.reward = 0.0

    def say(self, response: str) -> str:
        self.log.append({"role": "assistant", "content": response})
        result = self.world.step([self.log], [self.row])
        [self.row] = result.metadata
        self.has_ended = bool(to_numpy(result.terminateds)[0])
        self.reward = float(to_numpy(result.rewards)[0])
        [observation] = result.observations
        messages = [observation] if isinstance(observation, dict) else observation
        self.log += messages
        return "\n".join(message["content"] for message in messages)

    def run(self, code: str) -> str:
        return self.say(fenced(code))


def test_it_keeps_the_contract() -> None:
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in ("0", fenced("1 + 1"), fenced("x = "))
    ]
    rows = [{"answer": "0"}] * 3
    check_environment(CodeInterpreterEnvironment(SETTINGS), logs, rows)


def test_names_stay_from_turn_to_turn(world: CodeInterpreterEnvironment) -> None:
    chat = Conversation(world)
    assert chat.run("import math\ndef double(n):\n    return 2 * n\nx = 20") == (
        "(no output)"
    )
    assert chat.run("print('once')\ny = double(x + 1)\ny") == "once\n42\n"
    # Output of an earlier cell is not shown again.
    assert chat.run("y, math.floor(2.5)") == "(42, 2)\n"
    assert not chat.has_ended
    chat.say("The answer is\n42")
    assert chat.has_ended
    assert chat.reward == 1.0


def test_an_exception_is_shown_and_what_was_done_before_it_stays(
    world: CodeInterpreterEnvironment,
) -> None:
    chat = Conversation(world)
    shown = chat.run("x = 1\nraise KeyError('gone')\nx = 2")
    assert shown.startswith("Traceback")
    assert '"<cell 1>", line 2' in shown
    assert "raise KeyError('gone')" in shown
    assert "_run" not in shown
    assert "SyntaxError" in chat.run("x = = 3")
    assert chat.run("x") == "1\n"


def test_chance_is_the_same_when_cells_run_again(
    world: CodeInterpreterEnvironment,
) -> None:
    chat = Conversation(world)
    first = chat.run("import random\nx = random.random()\nx")
    assert chat.run("x") == first


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 2\nwhile True: pass", "it took longer than its limit"),
        ("x = 2\nimport os\nos._exit(0)", "its process ended early"),
        ("x = 2\nimport os\nos._exit(3)", "its process ended early"),
        ("x = 2\nimport os\nos.kill(os.getpid(), 9)", "its process was ended"),
        ("x = 2\nprint('a' * 10**6)", "it printed more than its limit"),
    ],
)
def test_a_cell_that_does_not_end_by_itself_is_undone(code: str, why: str) -> None:
    world = CodeInterpreterEnvironment({**SETTINGS, "timeout_s": 1.0})
    try:
        chat = Conversation(world)
        chat.run("x = 1")
        shown = chat.run(code)
        assert f"{why}, and is undone" in shown
        assert chat.run("x") == "1\n"
    finally:
        world.shutdown()


def test_memory_has_a_limit() -> None:
    world = CodeInterpreterEnvironment({**SETTINGS, "memory_mib": 128})
    try:
        chat = Conversation(world)
        assert "MemoryError" in chat.run("x = bytearray(10**9)")
        assert chat.run("1") == "1\n"
    finally:
        world.shutdown()


def test_exit_ends_the_cell_alone(world: CodeInterpreterEnvironment) -> None:
    chat = Conversation(world)
    assert chat.run("x = 7\nexit()\nx = 8") == "(no output)"
    assert chat.run("import sys\nprint(x)\nsys.exit('bye')") == "7\n"


def test_sessions_do_not_see_each_other(world: CodeInterpreterEnvironment) -> None:
    one, other = Conversation(world), Conversation(world)
    one.run("secret = 1")
    assert "NameError" in other.run("secret")


def test_rows_of_a_batch_go_on_together(world: CodeInterpreterEnvironment) -> None:
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in (fenced("x = 5\nx"), "42", fenced("x"))
    ]
    result = world.step(logs, [{"answer": "42"}] * 3)
    assert to_numpy(result.terminateds).tolist() == [False, True, False]
    assert to_numpy(result.rewards).tolist() == [0.0, 1.0, 0.0]
    assert result.observations[0][0]["content"] == "5\n"  # type: ignore[index]
    assert "NameError" in result.observations[2][0]["content"]  # type: ignore[index]


def test_another_worker_goes_on_with_a_session(
    world: CodeInterpreterEnvironment,
) -> None:
    chat = Conversation(world)
    chat.run("x = 6")
    chat.row = pickle.loads(pickle.dumps(chat.row))
    chat.world = pickle.loads(pickle.dumps(world))
    try:
        assert chat.run("x * 7") == "42\n"
    finally:
        chat.world.shutdown()


def test_a_call_that_is_made_again_gives_the_same(
    world: CodeInterpreterEnvironment,
) -> None:
    log = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": fenced("x = globals().get('x', 0) + 1\nx")},
    ]
    row = {"answer": "42"}
    for _ in range(2):
        result = world.step([log], [row])
        assert result.observations[0][0]["content"] == "1\n"  # type: ignore[index]
    assert row == {"answer": "42"}


def test_after_the_last_turn_the_response_is_judged() -> None:
    world = CodeInterpreterEnvironment({**SETTINGS, "max_turns": 1})
    try:
        chat = Conversation(world)
        chat.run("1")
        chat.run("42")
        assert chat.has_ended
        assert chat.reward == 0.0
    finally:
        world.shutdown()


def test_calls_in_json() -> None:
    world = CodeInterpreterEnvironment({**SETTINGS, "call_format": "json"})
    try:
        [schema] = world.tool_schemas()
        assert schema["function"]["name"] == "python"
        assert list(schema["function"]["parameters"]["properties"]) == ["code"]
        chat = Conversation(world)
        call = (
            '<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>'
        )
        assert chat.say(call) == "42\n"
        # In this format a block is not a call.
        chat.say(fenced("1"))
        assert chat.has_ended
    finally:
        world.shutdown()


def test_the_final_response_is_compared_by_its_meaning() -> None:
    world = CodeInterpreterEnvironment({**SETTINGS, "judge": "math"})
    try:
        chat = Conversation(world, "1/2")
        assert chat.run("2 / 4") == "0.5\n"
        chat.say("So it is \\boxed{0.5}.")
        assert chat.reward == 1.0
    finally:
        world.shutdown()


def test_a_closed_sandbox_is_not_counted_as_wrong(
    monkeypatch: pytest.MonkeyPatch, world: CodeInterpreterEnvironment
) -> None:
    chat = Conversation(world)
    chat.run("1")
    pool = world._pool
    assert pool is not None
    result = pool.run("import sys; sys.exit(0)")
    lost = type(result)("sandbox", "", "", None, None, 0.0, 0)
    monkeypatch.setattr(pool, "run", lambda *_, **__: lost)
    chat.run("1")
    assert chat.has_ended
    assert math.isnan(chat.reward)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("no code", None),
        ("```\nx\n```", None),
        ("```json\n{}\n```", None),
        ("```python\nx\n```", "x\n"),
        ("a\n```py\nx\n```\nb\n``` python\ny\n```\n", "x\n\ny\n"),
        ("```python\nx = 1", "x = 1"),
        ("inline ```python\nx``` no", None),
    ],
)
def test_blocks_of_python_are_calls(response: str, code: str | None) -> None:
    calls = FencedCallParser()(response)
    assert [call.arguments["code"] for call in calls] == (
        [] if code is None else [code]
    )


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        CodeInterpreterEnvironment({"timeout_s": 0})
