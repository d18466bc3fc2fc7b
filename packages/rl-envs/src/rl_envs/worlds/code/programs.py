"""Programs extracted from responses, and their results in the sandbox."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from rl_envs.sandbox import LANGUAGES, SandboxResult
from rl_envs.worlds.code.checks import Assertion, Checks
from rl_envs.worlds.code.rules import holds

__all__ = ["extract_program", "passed_assertions", "program_with_calls", "same_output"]

_FENCED = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Limit on a result's text, since parsing a huge literal takes much memory.
_RESULT_CHARACTERS = 20_000

_DRIVER = """
import json as _json, sys as _sys
# Dicts, lists and so on of other classes (Counter, defaultdict, namedtuple, frozenset)
# equal plain ones, and infinity has no literal but this.
def _written(value):
    if isinstance(value, dict):
        pairs = value.items()
        return "{" + ", ".join(_written(k) + ": " + _written(v) for k, v in pairs) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(_written, value)) + "}" if value else "set()"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_written(item) + ", " for item in value) + ")"
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return "1e999" if value > 0 else "-1e999"
    return repr(value)
_request = _json.loads(_sys.stdin.readline())
_names = {"__name__": "program"}
exec(compile(_request["code"], "program.py", "exec"), _names)
for _call in _request["calls"]:
    try:
        _value = eval(_call, _names)
        _text = repr(_value)
        # A longer one is no result anyway, and this takes longer than repr.
        if len(_text) <= _request["characters"]:
            _text = _written(_value)
    except Exception as _error:
        _text = None
    _sys.stdout.write("\\n" + _json.dumps([_request["mark"], _text]))
    _sys.stdout.flush()
"""


def extract_program(response: str, language: str = "python") -> str:
    """Return the last fenced block of a language, or the last of any kind, or all text.

    Args:
        response: Text of the policy.
        language: One of `LANGUAGES`.
    """
    names = LANGUAGES[language].fences
    blocks = _FENCED.findall(response)
    named = [text for name, text in blocks if name.lower() in names]
    if named:
        return str(named[-1])
    return str(blocks[-1][1]) if blocks else response


def program_with_calls(program: str, checks: Checks) -> tuple[str, str, str]:
    """Return the code and standard input that run all assertions, and their mark.

    The mark distinguishes results from the program's own output. A program that forges
    it gains nothing, because it would have to know the right results.
    """
    mark = secrets.token_hex(8)
    if checks.entry_point is not None and not _defines(program, checks.entry_point):
        program = checks.preamble + program
    calls = [call for assertion in checks.assertions for call in assertion.calls]
    request = {
        "code": program,
        "calls": calls,
        "mark": mark,
        "characters": _RESULT_CHARACTERS,
    }
    return _DRIVER, json.dumps(request) + "\n", mark


def passed_assertions(
    assertions: Sequence[Assertion], result: SandboxResult, mark: str
) -> int:
    """Return the number of assertions that hold for the results of a run."""
    results = list(_results(result.stdout, mark))
    passed = first = 0
    for assertion in assertions:
        last = first + len(assertion.calls)
        own = results[first:last]
        first = last
        # Fewer results: the program ended early, and its remaining tests fail.
        if len(own) == len(assertion.calls) and all(is_known for is_known, _ in own):
            passed += holds(assertion.rule, [value for _, value in own])
    return passed


def same_output(found: str, wanted: str) -> bool:
    """Return True if two outputs are equal up to trailing whitespace."""
    return _lines(found) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _results(stdout: str, mark: str) -> Any:
    """Yield for each call whether it returned a plain value, and that value."""
    for line in stdout.splitlines():
        if mark not in line:
            continue
        try:
            found, text = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if found != mark:
            continue
        yield _plain(text)


def _plain(text: Any) -> tuple[bool, Any]:
    if not isinstance(text, str) or len(text) > _RESULT_CHARACTERS:
        return False, None
    # Its text is not a literal.
    if text == "nan":
        return True, float("nan")
    try:
        return True, ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False, None


def _defines(program: str, name: str) -> bool:
    pattern = rf"^(?:async\s+)?def\s+{re.escape(name)}\b"
    return re.search(pattern, program, re.MULTILINE) is not None
