"""The environment whose tools are those of an MCP server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field

from rl_distributed.errors import ConfigError
from rl_envs.bridges.mcp.server import McpServer, import_types
from rl_envs.bridges.mcp.tools import McpTool
from rl_envs.errors import EnvsError
from rl_envs.interfaces import EnvironmentReturn, MessageLog
from rl_envs.registry import EnvironmentSpec, register_env
from rl_envs.sandbox import Sandbox
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.runs import SandboxLimits
from rl_envs.tools.environment import ToolEnvironment, ToolLimits
from rl_envs.worlds.verdict import same_last_line

__all__ = ["McpConfig", "McpEnvironment"]

Columns: TypeAlias = Mapping[str, Any]

_CALLS = "mcp_calls"
# Added to a run's own limit, as a dead sandbox process is replaced before it runs.
_RESTART_S = 90.0
_MOST_CALLS = 8


class ToolFailedError(EnvsError, RuntimeError):
    """A tool of the server says that it failed; the message is shown to the model."""


class McpConfig(SandboxConfig):
    """Settings of the mcp environment.

    `timeout_s` and `memory_mib` are those of a call, in which the server starts and the
    earlier calls run again.
    """

    command: list[str] = Field(min_length=1)
    """Command line of the server, as the sandbox has it: programs in `/usr`, or those
    of the image of `sandbox: container`. The sandbox must have `python3` as well."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files of the server's working folder: the path on this machine, by name."""
    tools: list[str] | None = Field(default=None, min_length=1)
    """Tools that the policy may call; null: all of the server."""
    is_stateful: bool = True
    """Whether a call depends on earlier ones. true: a turn has one call, and the
    server first gets the earlier ones of the conversation again. false: each call has
    a fresh server, several a turn."""
    judge: str = "text"
    """Judge of the response without calls. `text`: its last line must equal the column
    `answer`; or the name of an environment, such as `math`."""
    judge_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment that judges."""
    timeout_s: float = Field(default=10.0, gt=0.0)
    """Time limit of a call, in seconds."""
    scratch_mib: int = Field(default=64, ge=1)
    """Size of the server's working folder, which lies in memory."""
    max_message_kib: int = Field(default=1024, ge=1)
    """Maximum size of a server's reply, and of what it logs."""
    max_turns: int | None = Field(default=8, ge=1)
    """Maximum number of turns with calls, after which a response is scored regardless.
    null: only the limit on turns applies."""
    max_result_chars: int = Field(default=4096, ge=1)
    """Length, in characters, beyond which results are cut off."""


@register_env("mcp")
class McpEnvironment(ToolEnvironment):
    """Offers the tools of an MCP server, and scores the response that calls none.

    The server runs in the sandbox, a new one for each call: nothing of one
    conversation reaches another, and a server that hangs or dies costs its call only.
    Rows have `prompt` and the columns that the judge reads.

    Args:
        config: The settings.

    Raises:
        ConfigError: The server does not start, or lacks a tool.
        SandboxError: The sandbox cannot be had here.
        MissingExtraError: The package is not installed.
    """

    config_class = McpConfig

    def __init__(self, config: McpConfig) -> None:
        # Before the sandbox, which takes a while to start.
        import_types()
        self.config = config
        files = _read_files(config.files)
        judge: Any = same_last_line
        if config.judge != "text":
            judge = EnvironmentSpec.of(config.judge, config.judge_settings).make()
        elif config.judge_settings:
            raise ConfigError(
                "judge_settings are for an environment as the judge: got "
                f"{config.judge_settings!r:.80} with judge 'text'"
            )
        self._sandbox: Sandbox | None = config.open_sandbox()
        try:
            self._server = McpServer(config.command, files, self._sandbox, self._limits)
            tools = [McpTool(tool, self._call) for tool in self._offered()]
            super().__init__(
                tools,
                judge,
                limits=ToolLimits(
                    max_calls_per_turn=1 if config.is_stateful else _MOST_CALLS,
                    max_tool_turns=config.max_turns,
                    # More threads than slots would only wait, with their deadline
                    # running.
                    max_concurrency=config.num_workers,
                    call_deadline_s=config.timeout_s + _RESTART_S,
                    max_result_chars=config.max_result_chars,
                ),
            )
        except BaseException:
            self._sandbox.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # Zygotes and connections cannot be pickled; a copy starts its own.
        return McpEnvironment, (self.config,)

    @property
    def _limits(self) -> SandboxLimits:
        return SandboxLimits(
            time_s=self.config.timeout_s,
            memory_bytes=self.config.memory_mib << 20,
            output_bytes=self.config.max_message_kib << 10,
            scratch_bytes=self.config.scratch_mib << 20,
        )

    def step(
        self,
        message_log_batch: Sequence[MessageLog],
        metadata: Sequence[Columns | None],
    ) -> EnvironmentReturn[Columns | None]:
        """Make the calls of each last response; score those without one.

        Raises:
            MessageLogError: A conversation has no response, or a row no answer.
            SandboxError: The sandbox cannot be started again.
        """
        if self._sandbox is None:
            self._sandbox = self.config.open_sandbox()
            files = _read_files(self.config.files)
            self._server = McpServer(
                self.config.command, files, self._sandbox, self._limits
            )
        return super().step(message_log_batch, [_with_calls(row) for row in metadata])

    def shutdown(self) -> None:
        """Close the sandbox and the judge; a later step starts them again."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()
        super().shutdown()

    def _offered(self) -> list[Any]:
        found = {tool.name: tool for tool in self._server.tools()}
        asked = list(found) if self.config.tools is None else self.config.tools
        unknown = [name for name in asked if name not in found]
        if unknown or not found:
            raise ConfigError(
                f"tools must name tools of the MCP server: got {unknown or 'none'}; it "
                f"has {sorted(found)}"
            )
        return [found[name] for name in asked]

    def _call(self, name: str, arguments: dict[str, Any], row: dict[str, Any]) -> str:
        call = {"name": name, "arguments": arguments}
        earlier = row[_CALLS] if self.config.is_stateful else ()
        text, is_error = self._server.call(earlier, call)
        if self.config.is_stateful:
            # After the call: one that was undone must not be replayed later.
            row[_CALLS].append(call)
        # The call is kept even so, as an error may have changed the server's state.
        if is_error:
            raise ToolFailedError(text)
        return text


def _read_files(files: Mapping[str, str]) -> dict[str, bytes]:
    found = {}
    for name, path in files.items():
        try:
            found[name] = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"files[{name!r}] must be the path of a file that can be read: {error}"
            ) from error
    return found


def _with_calls(columns: Any) -> Any:
    """Return columns with a copy of their list of calls, which calls append to."""
    if columns is None:
        return {_CALLS: []}
    if not isinstance(columns, Mapping):
        return columns
    return {**columns, _CALLS: list(columns.get(_CALLS, ()))}
