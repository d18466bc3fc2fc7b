"""Splits the tests of a row into calls for the sandbox and rules checked outside.

| columns | form of | a test is |
|---|---|---|
| `tests`: mappings of `input` and `output` | APPS, CodeContests | a run on that input |
| `tests` or `test_list`: texts `assert ...` | MBPP | an assertion |
| `test` with `def check(candidate)`, `entry_point` | HumanEval | an assertion in it |

The calls in an assertion such as `assert add(1, 2) == 3` are made in the sandbox
(`add(1, 2)`); the rest (`... == 3`) is evaluated outside, by `rules`, on their results.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_envs.errors import MessageLogError
from rl_envs.sandbox.languages import LANGUAGES
from rl_envs.worlds.code.rules import BUILTINS, check_rule

__all__ = ["Assertion", "Checks", "InputOutput", "checks_of"]

_COUNTERS = frozenset({"Counter", "collections.Counter"})


@dataclass(frozen=True, slots=True)
class InputOutput:
    """A run of the program with a given input and expected output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class Assertion:
    """Calls of the program's functions and a rule for their results."""

    calls: tuple[str, ...]
    """Expressions evaluated in the sandbox."""
    rule: ast.expr
    """Expression that must be true; the name `_i` is the result of call i."""


@dataclass(frozen=True, slots=True)
class Checks:
    """The tests of a row."""

    runs: tuple[InputOutput, ...] = ()
    assertions: tuple[Assertion, ...] = ()
    preamble: str = ""
    """Code of the row, prepended to a program that does not define `entry_point`: the
    start of a function that the response completes."""
    entry_point: str | None = None
    language: str = "python"
    """Which the program is in."""

    @property
    def size(self) -> int:
        """Number of tests."""
        return len(self.runs) + len(self.assertions)


def checks_of(columns: Mapping[str, Any], row: int) -> Checks:
    """Read the tests of a row.

    Args:
        columns: The row's columns.
        row: Its index, for error messages.

    Raises:
        MessageLogError: There are none, or one cannot be checked outside of the
            sandbox, or does not fit the row's language.
    """
    language = _language(columns, row)
    found = _checks_of(columns, row)
    if found.assertions and language != "python":
        raise MessageLogError(
            f"metadata[{row}]: tests of a program in {language!r} must have 'input' "
            "and 'output': assertions are of Python"
        )
    return dataclasses.replace(found, language=language)


def _language(columns: Mapping[str, Any], row: int) -> str:
    language = columns.get("language")
    if language is None:
        return "python"
    # Data sets name languages as Markdown does: py, js, c++.
    named = str(language).strip().lower()
    for name, known in LANGUAGES.items():
        if named in known.fences:
            return name
    raise MessageLogError(
        f"metadata[{row}]: the column 'language' must be one of "
        f"{', '.join(LANGUAGES)}: got {language!r}"
    )


def _checks_of(columns: Mapping[str, Any], row: int) -> Checks:
    given: Any = columns.get("tests", columns.get("test_list"))
    if isinstance(given, str):
        given = _from_json(given, row)
    if isinstance(given, Mapping):
        given = _paired(given, row)
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        if all(isinstance(test, Mapping) for test in given):
            return Checks(runs=tuple(_run(test, row) for test in given))
        if all(isinstance(test, str) for test in given):
            body = [node for test in given for node in _parsed(test, row)]
            return Checks(assertions=_assertions(body, row))
    text, entry = columns.get("test"), columns.get("entry_point")
    if isinstance(text, str) and isinstance(entry, str):
        body = _body_of_check(text, row)
        prompt = columns.get("prompt")
        preamble = prompt if isinstance(prompt, str) else ""
        assertions = _assertions(body, row, renamed={"candidate": entry})
        return Checks((), assertions, preamble, entry)
    raise MessageLogError(
        f"metadata[{row}] must have tests: a column 'tests' with a list of "
        "{'input': ..., 'output': ...} or of texts 'assert ...', a column 'test_list' "
        "of such texts, or 'test' with 'def check(candidate)' and 'entry_point'; it "
        f"has {sorted(columns)}"
    )


def _from_json(text: str, row: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise MessageLogError(
            f"metadata[{row}]: the column 'tests' must be a list, or JSON of one: "
            f"{error}"
        ) from None


def _paired(given: Mapping[str, Any], row: int) -> list[dict[str, Any]]:
    """Read `{"inputs": [...], "outputs": [...]}`."""
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise MessageLogError(
            f"metadata[{row}]: 'tests' must have lists 'inputs' and 'outputs': it has "
            f"{sorted(given)}"
        )
    if len(inputs) != len(outputs):
        raise MessageLogError(
            f"metadata[{row}]: 'tests' must have an output for each input: got "
            f"{len(inputs)} and {len(outputs)}"
        )
    pairs = zip(inputs, outputs, strict=True)
    return [{"input": given_, "output": wanted} for given_, wanted in pairs]


def _run(test: Mapping[str, Any], row: int) -> InputOutput:
    stdin, stdout = test.get("input"), test.get("output")
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise MessageLogError(
            f"metadata[{row}]: a test must have the texts 'input' and 'output': got "
            f"{dict(test)!r}"
        )
    return InputOutput(stdin, stdout)


def _parsed(text: str, row: int) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MessageLogError(
            f"metadata[{row}]: the test {_short(text)} is not Python: {error}"
        ) from None


def _body_of_check(text: str, row: int) -> list[ast.stmt]:
    for node in _parsed(text, row):
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return node.body
    raise MessageLogError(
        f"metadata[{row}]: the column 'test' must define check(candidate): got "
        f"{_short(text)}"
    )


def _assertions(
    body: Sequence[ast.stmt], row: int, renamed: Mapping[str, str] | None = None
) -> tuple[Assertion, ...]:
    found = []
    for node in body:
        if isinstance(node, ast.Assert):
            found.append(_assertion(node.test, row, renamed or {}))
        elif not _does_nothing(node):
            raise MessageLogError(
                f"metadata[{row}]: a test must be an assertion, as only its calls run "
                f"beside the program: got {_short(ast.unparse(node))}"
            )
    if not found:
        raise MessageLogError(f"metadata[{row}]: there is no assertion in the tests")
    return tuple(found)


def _does_nothing(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Pass)


def _assertion(test: ast.expr, row: int, renamed: Mapping[str, str]) -> Assertion:
    taken = _Calls(renamed, own=_own_names(test))
    try:
        rule = taken.visit(test)
        # It would hold or fail whatever the program does.
        if not taken.calls:
            raise ValueError("it calls nothing that a program could define")
        check_rule(rule)
    except ValueError as error:
        raise MessageLogError(
            f"metadata[{row}]: the test {_short(ast.unparse(test))} cannot be checked "
            f"outside of the sandbox: {error}; write it as assert f(...) == value"
        ) from None
    return Assertion(tuple(taken.calls), rule)


def _own_names(test: ast.expr) -> frozenset[str]:
    """Return the name `Counter` if it is what the test calls of the program.

    Beside calls of the program's functions it is that of the standard library.
    """
    called = {
        ast.unparse(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)
    }
    return frozenset() if called - BUILTINS.keys() - _COUNTERS else _COUNTERS


class _Calls(ast.NodeTransformer):
    """Replaces all calls but those of a rule's builtins in an expression.

    Args:
        renamed: Names that functions have in the sandbox.
        own: Names of the program that builtins have as well.
    """

    def __init__(self, renamed: Mapping[str, str], own: frozenset[str]) -> None:
        self._renamed, self._own = renamed, own
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of the program's function, with its arguments, by a name."""
        name = ast.unparse(node.func)
        # Evaluated outside; a program could redefine it to make its tests pass.
        if name == "math.isclose":
            return self._visit_isclose(node)
        if name in BUILTINS.keys() | _COUNTERS and name not in self._own:
            if name in _COUNTERS:
                node.func = ast.Name("Counter", ast.Load())
            return self.generic_visit(node)
        # A program could replace it, too, and would be given what it compares.
        if "." in name and name.partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(f"{name} is not one of {', '.join(BUILTINS)}")
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                # HumanEval calls the function `candidate`, but in the sandbox it has
                # its own name.
                part.id = self._renamed.get(part.id, part.id)
        self.calls.append(ast.unparse(node))
        return ast.Name(f"_{len(self.calls) - 1}", ast.Load())

    def _visit_isclose(self, node: ast.Call) -> ast.AST:
        """Return a call by position, as rules have no keywords."""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        relative = given.pop("rel_tol", ast.Constant(1e-9))
        absolute = given.pop("abs_tol", ast.Constant(0.0))
        if len(node.args) != 2 or given:
            raise ValueError("math.isclose takes two numbers, rel_tol and abs_tol")
        args = [self.visit(part) for part in (*node.args, relative, absolute)]
        return ast.Call(ast.Name("math.isclose", ast.Load()), args, [])


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "...")
