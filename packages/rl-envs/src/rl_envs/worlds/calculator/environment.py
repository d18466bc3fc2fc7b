"""The calculator environment and its tool."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rl_distributed.config import Config
from rl_envs.interfaces import EnvironmentReturn
from rl_envs.registry import register_env
from rl_envs.tools.calls import JsonToolCallParser, ToolCall, ToolCallParser
from rl_envs.tools.environment import ToolEnvironment, ToolLimits

__all__ = [
    "BracketCallParser",
    "CalculatorConfig",
    "CalculatorEnvironment",
    "calculate",
]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MAX_CHARS = 100


class CalculatorConfig(Config):
    """Settings of the calculator environment."""

    call_format: Literal["json", "brackets"] = "json"
    """Syntax of calls: `<tool_call>{"name": "calculate", ...}</tool_call>` as in chat
    models, or `[2+3]`, which the smallest models can learn."""
    max_calls: int | None = Field(None, ge=1)
    """Maximum number of turns with calls, after which a response is scored. null: no
    limit."""


def calculate(expression: str) -> int:
    """Compute a sum of products of whole numbers.

    Args:
        expression: Numbers, `+`, `-`, `*` and parentheses, such as `2*(3+4)`.
    """
    # A model may write anything; a limit keeps nesting and numbers small.
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression has at most {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise ValueError(f"{expression!r} is not an expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    # Not isinstance: True would count as 1.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, -, * and parentheses can be computed")


@dataclass(frozen=True, slots=True)
class BracketCallParser:
    """Reads `[2+3]` as a call of `calculate`."""

    def __call__(self, response: str) -> list[ToolCall]:
        """Return the calls; an unclosed bracket is malformed."""
        calls = []
        for inside, closing in re.findall(r"\[([^\[\]]*)(\]?)", response):
            error = None if closing else "a bracket was not closed"
            calls.append(ToolCall("calculate", {"expression": inside}, error))
        return calls


def _is_right(response: str, answer: str) -> float:
    return float(response.strip() == answer.strip())


@register_env("calculator")
class CalculatorEnvironment(ToolEnvironment):
    """Offers `calculate`, with a reward of 1 if the final response is the `answer`.

    Args:
        config: The settings.
    """

    config_class = CalculatorConfig

    def __init__(self, config: CalculatorConfig | None = None) -> None:
        self.config = config or CalculatorConfig()
        parser: ToolCallParser = (
            BracketCallParser()
            if self.config.call_format == "brackets"
            else JsonToolCallParser()
        )
        super().__init__(
            [calculate],
            _is_right,
            parser=parser,
            limits=ToolLimits(max_tool_turns=self.config.max_calls),
        )

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        """Run the calculator, or score; responses that are scored become answers."""
        result = super().step(message_log_batch, metadata)
        done = result.terminateds.tolist()
        said = [log[-1]["content"].strip() for log in message_log_batch]
        answers = [text if end else None for text, end in zip(said, done, strict=True)]
        return result._replace(answers=answers)
