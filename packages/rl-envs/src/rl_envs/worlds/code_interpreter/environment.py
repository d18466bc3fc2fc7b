"""The code interpreter environment."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field

from rl_envs.errors import EnvsError, ToolUnavailableError
from rl_envs.interfaces import EnvironmentReturn, MessageLog, last_response
from rl_envs.registry import register_env
from rl_envs.sandbox import Sandbox
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.task_limits import limits_of
from rl_envs.tools.calls import JsonToolCallParser, ToolCall, ToolCallParser
from rl_envs.tools.environment import ToolEnvironment, ToolLimits
from rl_envs.tools.functions import Tool
from rl_envs.worlds.code_interpreter.session import program_of_session
from rl_envs.worlds.math import MathEnvironment
from rl_envs.worlds.verdict import same_last_line

__all__ = ["CodeInterpreterConfig", "CodeInterpreterEnvironment", "FencedCallParser"]

Columns: TypeAlias = Mapping[str, Any]

_BLOCK = re.compile(
    r"^```[ \t]*(?:python3?|py)[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE
)
_CELLS = "cells"
# Added to a cell's own limit, as a dead sandbox process is replaced before it runs.
_RESTART_S = 90.0
_WHY_LOST = {
    "time": "it took longer than its limit",
    "memory": "it used more memory than its limit",
    "output": "it printed more than its limit",
    "signal": "its process was ended",
    "error": "its process ended early",
}


class CellUndoneError(EnvsError, RuntimeError):
    """A cell was stopped and undone; the message is shown to the model."""


class CodeInterpreterConfig(SandboxConfig):
    """Settings of the code interpreter.

    `timeout_s` and `memory_mib` are those of a turn, in which the earlier cells run
    again.
    """

    call_format: Literal["fences", "json"] = "fences"
    """Syntax of calls: a block between ` ```python ` and ` ``` `, or
    `<tool_call>{"name": "python", "arguments": {"code": ...}}</tool_call>`."""
    judge: Literal["math", "text"] = "math"
    """Comparison of the final response with the row's answer. `math`: by meaning, as in
    the environment `math` (`rl-envs[math]`). `text`: its stripped last line must equal
    the column `answer`."""
    max_turns: int | None = Field(default=4, ge=1)
    """Maximum number of turns with calls, after which a response is scored regardless.
    null: only the limit on turns applies."""
    max_result_chars: int = Field(default=4096, ge=1)
    """Length, in characters, beyond which results are cut off."""


@dataclass(frozen=True, slots=True)
class FencedCallParser:
    """Reads fenced blocks of Python as one call of `python`, joining several.

    The last block may be unclosed, because generation may stop there.
    """

    def __call__(self, response: str) -> list[ToolCall]:
        """See `ToolCallParser`."""
        blocks = _BLOCK.findall(response)
        if not blocks:
            return []
        return [ToolCall("python", {"code": "\n".join(blocks)})]


@register_env("code_interpreter")
class CodeInterpreterEnvironment(ToolEnvironment):
    """Runs Python between turns, and scores the response that runs none.

    Names defined by a cell are available in the next one. Cells run in the sandbox
    (`rl_envs.sandbox`). A cell that exceeds a limit is reported and undone: the session
    continues as if it had not run.

    Args:
        config: The settings, or a mapping of them.

    Raises:
        ConfigError: The settings are invalid.
    """

    config_class = CodeInterpreterConfig
    runs_programs = True

    def __init__(
        self, config: CodeInterpreterConfig | Mapping[str, Any] | None = None
    ) -> None:
        if not isinstance(config, CodeInterpreterConfig):
            config = CodeInterpreterConfig.from_dict(
                dict(config or {}), source="environment 'code_interpreter'"
            )
        self.config = config
        self._pool: Sandbox | None = None
        parser: ToolCallParser = (
            FencedCallParser()
            if config.call_format == "fences"
            else JsonToolCallParser()
        )
        super().__init__(
            [Tool(self._python, "python")],
            MathEnvironment() if config.judge == "math" else same_last_line,
            parser=parser,
            limits=ToolLimits(
                # Each cell of a session depends on the ones before it.
                max_calls_per_turn=1,
                max_tool_turns=config.max_turns,
                # More threads than slots would only wait, with their deadline running.
                max_concurrency=config.num_workers,
                call_deadline_s=config.timeout_s + _RESTART_S,
                max_result_chars=config.max_result_chars,
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The pool's processes cannot be pickled; a copy starts its own.
        return type(self), (self.config,)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Run the cell of each last response; score those without one.

        Raises:
            MessageLogError: A conversation has no response, or a row no answer.
            SandboxError: The level of the config is not available here.
        """
        # Started here and not in the tool, where its error would go to the model.
        rows = [_with_cells(columns) for columns in metadata]
        if self._pool is None and any(
            self._parser(last_response(log, row=row))
            for row, log in enumerate(message_log_batch)
        ):
            self._pool = self.config.open_sandbox()
        return super().step(message_log_batch, rows)

    def shutdown(self) -> None:
        """Close the sandbox and the judge; a later step starts others."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        super().shutdown()

    def _python(self, code: str, row: dict[str, Any]) -> str:
        """Run Python; names stay defined for the next call.

        Args:
            code: The program. The value of its last line is shown, as is what it
                prints.
            row: The columns of the conversation.
        """
        if self._pool is None:
            raise ToolUnavailableError("the sandbox is closed")
        # Random, so that a cell cannot print the mark and exit to look complete.
        mark = secrets.token_hex(8)
        program = program_of_session([*row[_CELLS], code], mark)
        limits = self.config.run_limits(limits_of(row))
        result = self._pool.run(program, limits=limits)
        if result.status == "sandbox":
            raise ToolUnavailableError("the sandbox could not run the cell")
        shown = result.stdout.removesuffix(mark) + result.stderr
        if result.status != "ok" or not result.stdout.endswith(mark):
            why = _WHY_LOST.get(result.status, _WHY_LOST["error"])
            raise CellUndoneError(
                f"{why}, and is undone" + (f"; it printed:\n{shown}" if shown else "")
            )
        # Only after a complete run: an undone cell must not run again in later turns.
        row[_CELLS].append(code)
        return shown or "(no output)"


def _with_cells(columns: Any) -> Any:
    """Return columns with a copy of their list of cells, which calls append to."""
    if columns is None:
        return {_CELLS: []}
    if not isinstance(columns, Mapping):
        return columns
    return {**columns, _CELLS: list(columns.get(_CELLS, ()))}
