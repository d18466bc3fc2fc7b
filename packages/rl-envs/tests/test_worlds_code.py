"""The world `code`: test formats, what passes, and which cheats fail."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

import pytest

from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError, SandboxError
from rl_envs.registry import env_registry
from rl_envs.sandbox import SandboxPool
from rl_envs.testing import check_environment
from rl_envs.worlds.code import CodeConfig, CodeEnvironment
from rl_envs.worlds.code.checks import checks_of
from rl_envs.worlds.code.programs import extract_program, same_output
from rl_envs.worlds.code.rules import holds

ADD = {"test_list": ["assert add(1, 2) == 3", "assert add(-5, 2) == -3"]}
DOUBLE = {
    "tests": [{"input": "7\n", "output": "14\n"}, {"input": "-3", "output": "-6"}]
}
HUMAN = {
    "prompt": "def half(x):\n    '''Half of x.'''\n",
    "entry_point": "half",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n"
    "    assert abs(candidate(3) - 1.5) < 1e-6\n"
    "    assert candidate(0) == 0, 'zero'\n"
    "    assert not candidate(0)\n",
}


@pytest.fixture(scope="module")
def world() -> Iterator[CodeEnvironment]:
    yield from made(num_workers=2, timeout_s=4.0)


@pytest.fixture(scope="module")
def sharing() -> Iterator[CodeEnvironment]:
    yield from made(num_workers=2, timeout_s=4.0, credit="share")


def made(**settings: Any) -> Iterator[CodeEnvironment]:
    world = CodeEnvironment(settings)
    try:
        reward(world, "print(1)", DOUBLE)
    except SandboxError as error:
        pytest.skip(str(error))
    yield world
    world.shutdown()


def reward(world: CodeEnvironment, response: str, columns: dict[str, Any]) -> float:
    log = [
        {"role": "user", "content": "Write it."},
        {"role": "assistant", "content": response},
    ]
    return float(world.step([log], [columns]).rewards[0])


@pytest.mark.parametrize(
    ("columns", "right", "wrong"),
    [
        (
            ADD,
            "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.",
            "```python\ndef add(a, b):\n    return a - b\n```",
        ),
        (DOUBLE, "print(int(input()) * 2)", "print(int(input()) * 3)"),
        (HUMAN, "    return x / 2\n", "    return x\n"),
        (HUMAN, "```\ndef half(x):\n    return x / 2\n```", "def half(x): pass"),
    ],
    ids=["assertions", "outputs", "completion", "whole function"],
)
def test_right_programs_pass_and_wrong_ones_do_not(
    world: CodeEnvironment, columns: dict[str, Any], right: str, wrong: str
) -> None:
    assert reward(world, right, columns) == 1.0
    assert reward(world, wrong, columns) == 0.0
    assert reward(world, "", columns) == 0.0
    assert reward(world, "I cannot.", columns) == 0.0


def test_a_share_is_that_of_the_tests_and_all_means_all(
    world: CodeEnvironment, sharing: CodeEnvironment
) -> None:
    assert CodeConfig().credit == "all"
    assert reward(sharing, "print(14)", DOUBLE) == 0.5
    assert reward(world, "print(14)", DOUBLE) == 0.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("collections.Counter([1, 1, 2])", "{1: 2, 2: 1}"),
        ("collections.defaultdict(list, {1: [2]})", "{1: [2]}"),
        ("[collections.namedtuple('P', 'a b')(1, 'x')]", "[(1, 'x')]"),
        ("frozenset([1, 2])", "{1, 2}"),
        (
            "[math.inf, (-math.inf,), set(), ()]",
            "[float('inf'), (-float('inf'),), set(), ()]",
        ),
        ("-math.inf", "float('-inf')"),
    ],
)
def test_values_that_equal_plain_ones_count_as_these(
    world: CodeEnvironment, returned: str, expected: str
) -> None:
    program = f"import collections, math\ndef f(x): return {returned}"
    assert reward(world, program, {"tests": [f"assert f(1) == {expected}"]}) == 1.0
    assert reward(world, program, {"tests": [f"assert f(1) != {expected}"]}) == 0.0


def test_closeness_is_judged_outside(world: CodeEnvironment) -> None:
    columns = {"tests": ["assert math.isclose(f(3), 4188.79, rel_tol=0.001)"]}
    assert reward(world, "def f(x): return 4189.0", columns) == 1.0
    assert reward(world, "def f(x): return 4289.0", columns) == 0.0
    cheat = "class math:\n    isclose = lambda *_, **__: True\ndef f(x): return 0"
    assert reward(world, cheat, columns) == 0.0


@pytest.mark.parametrize("name", ["Counter", "collections.Counter"])
def test_counters_are_compared_outside(world: CodeEnvironment, name: str) -> None:
    columns = {"tests": [f"assert {name}(f(2)) == {name}(['a', 'b', 'b'])"]}
    assert reward(world, "def f(x): return ['b', 'a', 'b']", columns) == 1.0
    assert reward(world, "def f(x): return 'bba'", columns) == 1.0
    assert reward(world, "def f(x): return {'b': 2, 'a': 1}", columns) == 1.0
    assert reward(world, "def f(x): return ['b', 'a']", columns) == 0.0
    assert reward(world, "def f(x): return 3", columns) == 0.0
    cheat = "def Counter(x): return 1\nclass collections:\n    Counter = Counter\n"
    assert reward(world, f"{cheat}def f(x): return 'a'", columns) == 0.0


def test_a_function_of_the_program_may_be_called_counter(
    world: CodeEnvironment,
) -> None:
    columns = {"tests": ["assert Counter(4) == 5"]}
    assert reward(world, "def Counter(x): return x + 1", columns) == 1.0
    assert reward(world, "def Counter(x): return x", columns) == 0.0


CHEATS = {
    "leaves early": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "equal to all": "class All:\n    def __eq__(self, other): return True\n"
    "    def __repr__(self): return 'All()'\ndef add(a, b): return All()",
    "patched builtins": "import builtins\nbuiltins.repr = lambda value: '3'\n"
    "builtins.eval = lambda *_: 0\ndef add(a, b): return 0",
    "patched json": "import json\njson.dumps = lambda value: '[true, true]'\n"
    "def add(a, b): return 0",
    "prints results": "import sys\nrequest = sys._getframe(1).f_globals['_request']\n"
    'for _ in range(9): print(f\'["{request["mark"]}", "0"]\')\nsys.exit(0)',
    "reads its tests": "import sys\nfound = sys._getframe(1).f_globals\n"
    "text = repr(found)\nassert '== 3' not in text and '== -3' not in text\n"
    "def add(a, b): return text",
    "never ends": "while True: pass",
    "takes all memory": "held = 'x' * (1 << 40)",
    "raises": "raise SystemExit('passed')",
    "huge result": "def add(a, b): return '9' * 10_000_000",
    "deep result": "def add(a, b):\n    r = []\n    for _ in range(900): r = [r]\n"
    "    return r",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_not_rewarded(world: CodeEnvironment, name: str) -> None:
    assert reward(world, CHEATS[name], ADD) == 0.0


def test_the_next_program_sees_nothing_of_the_last(world: CodeEnvironment) -> None:
    assert reward(world, "import builtins\nbuiltins.kept = 3", ADD) == 0.0
    assert reward(world, "def add(a, b): return kept", ADD) == 0.0


def test_rows_keep_their_order_and_say_how_they_ended(sharing: CodeEnvironment) -> None:
    responses = ["def add(a, b): return a + b", "while True: pass", "print(14)"]
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in responses
    ]
    found = sharing.step(logs, [ADD, ADD, DOUBLE])
    assert found.rewards.tolist() == [1.0, 0.0, 0.5]
    assert [row["status"] for row in found.metadata] == ["ok", "time", "ok"]
    outcomes = [row["outcome"] for row in found.metadata]
    assert outcomes == ["solved", "out_of_time", "lost"]
    assert [row["correct"] for row in found.metadata] == [True, False, False]
    assert "1 of 2 tests" in found.observations[2]["content"]
    assert "a run ended by: time" in found.observations[1]["content"]
    batch = {"rewards": found.rewards, "metadata": found.metadata}
    _, metrics = sharing.global_post_process_and_metrics(batch)
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["status/time"] == pytest.approx(1 / 3)


def test_a_row_has_its_own_memory(world: CodeEnvironment) -> None:
    program = "held = bytearray(150 << 20)\ndef add(a, b): return a + b"
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": program}]
    small = {**ADD, "task_limits": {"memory_mib": 100}}
    found = world.step([log, log], [small, ADD])
    assert found.rewards.tolist() == [0.0, 1.0]
    assert found.metadata[0]["outcome"] == "out_of_memory"


def test_what_the_sandbox_failed_to_run_is_not_scored(
    world: CodeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world._pool is not None
    slot = world._pool._slots[0]
    monkeypatch.setattr(type(slot), "_write", lambda self, data: False)
    assert math.isnan(reward(world, "print(14)", DOUBLE))
    monkeypatch.undo()
    assert reward(world, "print(int(input()) * 2)", DOUBLE) == 1.0


def test_programs_of_other_languages_are_judged_by_what_they_print(
    world: CodeEnvironment,
) -> None:
    with SandboxPool(1) as sandbox:
        missing = sandbox.missing_languages()
    rows = {
        "bash": ("read x\necho $((x * 2))", "read x\necho 14"),
        "c++": (
            "#include <iostream>\nint main() { int x; std::cin >> x;"
            " std::cout << 2 * x; }",
            "int main( {",
        ),
    }
    for language, (right, wrong) in rows.items():
        if missing["cpp" if language == "c++" else language]:
            continue
        columns = {**DOUBLE, "language": language}
        # The last block of the language counts, whatever follows it.
        response = f"```{language}\n{right}\n```\n```text\nprints twice\n```"
        assert reward(world, response, columns) == 1.0
        assert reward(world, wrong, columns) == 0.0
    if not missing["cpp"]:
        log = [{"role": "assistant", "content": "int main( {"}]
        result = world.step([log], [{**DOUBLE, "language": "cpp"}])
        assert result.metadata[0]["status"] == "build"
        assert "could not be compiled" in result.observations[0]["content"]


def test_rows_name_a_language_that_can_judge_them() -> None:
    found = CodeEnvironment().unusable_rows(
        [
            {**ADD, "language": "bash"},
            {**DOUBLE, "language": "cobol"},
            {**DOUBLE, "language": "C++"},
            {**ADD, "language": "Python3"},
        ]
    )
    assert set(found) == {0, 1}
    assert "'bash' must have 'input' and 'output'" in found[0]
    assert "'language' must be one of python, bash" in found[1]


def test_the_sandbox_is_chosen_by_its_settings() -> None:
    world = CodeEnvironment({"sandbox": "container", "sandbox_settings": {"imag": 1}})
    with pytest.raises(ConfigError, match="they may be image, engine"):
        reward(world, "print(1)", DOUBLE)
    world = CodeEnvironment({"sandbox_settings": {"network_namespace": True}})
    with pytest.raises(ConfigError, match="must not hold network_namespace"):
        reward(world, "print(1)", DOUBLE)
    world = CodeEnvironment({"level": "container"})
    with pytest.raises(SandboxError, match="must reach level CONTAINER"):
        reward(world, "print(1)", DOUBLE)


def test_it_fulfils_the_contract(world: CodeEnvironment) -> None:
    assert env_registry.get("code") is CodeEnvironment
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in ("def add(a, b): return a + b", "print(14)", "")
    ]
    check_environment(CodeEnvironment(), logs, [ADD, DOUBLE, HUMAN])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": "3"}, "must have tests"),
        ({"tests": "[{"}, "JSON of one"),
        ({"tests": []}, "must have tests"),
        ({"tests": [{"input": 1, "output": "2"}]}, "'input' and 'output'"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "an output for each input"),
        ({"test_list": ["assert f(1) =="]}, "is not Python"),
        ({"test_list": ["x = f(1)"]}, "must be an assertion"),
        ({"test_list": ["assert 1 == 1"]}, "calls nothing"),
        ({"test_list": ["assert f(1) ** 9 == 1"]}, "operator Pow"),
        ({"test_list": ["assert f(1) == y"]}, "the name y"),
        ({"test_list": ["assert f(4) == math.sqrt(4)"]}, "math.sqrt is not one of"),
        ({"test_list": ["assert math.isclose(f(4))"]}, "takes two numbers"),
        ({"test_list": ["assert [f(x) for x in (1, 2)] == [1, 2]"]}, "ListComp"),
        ({"test": "def other(): pass", "entry_point": "f"}, "define check"),
    ],
)
def test_rows_that_cannot_be_judged_are_named(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(MessageLogError, match=message):
        checks_of(columns, 4)
    found = CodeEnvironment().unusable_rows([ADD, columns])
    assert list(found) == [1]


def test_apps_form_is_read() -> None:
    text = '{"inputs": ["1\\n", "2\\n"], "outputs": ["2", "4"]}'
    assert [run.stdout for run in checks_of({"tests": text}, 0).runs] == ["2", "4"]


@pytest.mark.parametrize(
    ("rule", "results", "expected"),
    [
        ("_0 == {'a': [1, (2, 3)]}", [{"a": [1, (2, 3)]}], True),
        ("abs(_0 - 1.5) < 1e-6", [1.5000001], True),
        ("1 < _0 <= 3 and not _1", [3, []], True),
        ("sorted(_0)[1:] == [2, 3] if _1 else False", [[3, 1, 2], 1], True),
        ("_0 in (1, 2) or _1 is None", [5, None], True),
        ("_0 * 10 == 1", ["aaaa"], False),
        ("_0 < 3", ["text"], False),
        ("_0[7] == 1", [[1]], False),
        ("_0 * _0 == 1", [10**400], False),
    ],
)
def test_rules_mean_what_python_means(
    rule: str, results: list[Any], expected: bool
) -> None:
    assert holds(ast.parse(rule, mode="eval").body, results) is expected


def test_programs_are_found_in_what_is_said_around_them() -> None:
    text = "```sh\nls\n```\n```python\na\n```\nor\n```Python\nb\n```\n```\nc\n```"
    assert extract_program(text) == "b\n"
    assert extract_program("say ```\nc\n``` so") == "c\n"
    assert extract_program("```python\ncut off") == "cut off"
    assert extract_program("print(1)") == "print(1)"


def test_blanks_at_the_ends_do_not_count() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert not same_output("1  2\n3", "1 2\n3")
    assert not same_output("", "0")
