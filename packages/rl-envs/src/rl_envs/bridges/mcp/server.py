"""`McpServer`: requests to a confined MCP server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError, MissingExtraError
from rl_envs.errors import EnvsError, ToolUnavailableError
from rl_envs.sandbox import Command, Sandbox, SandboxLimits, SandboxResult

__all__ = ["CallUndoneError", "McpServer", "import_types"]

_DIALOGUE = "mcp_dialogue.py"
_MOST_PAGES = 100
_SHOWN_CHARS = 400
_WHY_UNDONE = {
    "time": "the server took longer than its limit",
    "memory": "the server used more memory than its limit",
    "output": "the server sent more than its limit",
}


class CallUndoneError(EnvsError, RuntimeError):
    """A call had no result and is undone; the message is shown to the model."""


class McpServer:
    """Asks a server that is started for each request, and sees earlier ones again.

    Args:
        command: Command line of the server, as the sandbox has it.
        files: Files of its scratch folder, by name.
        sandbox: Where it runs.
        limits: Limits of one run, the start of the server and earlier calls included.
    """

    def __init__(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        sandbox: Sandbox,
        limits: SandboxLimits,
    ) -> None:
        self._types = import_types()
        self._command = list(command)
        self._files = {**files, _DIALOGUE: _program()}
        self._sandbox = sandbox
        self._limits = limits

    def tools(self) -> list[Any]:
        """Return the server's tools, as objects of the protocol.

        Raises:
            ConfigError: The server does not start, or does not speak the protocol.
        """
        found: list[Any] = []
        params: dict[str, Any] = {}
        # A broken server may return the same cursor for ever.
        for _ in range(_MOST_PAGES):
            result = self._run([("tools/list", params)])
            reply = _reply_in(result)
            if reply is None or "result" not in reply:
                raise ConfigError(
                    f"the MCP server {self._command} does not list its tools: "
                    f"{_why(result, reply)}; command must be one that the sandbox has, "
                    "and the sandbox must have python3"
                )
            try:
                page = self._types.ListToolsResult.model_validate(
                    reply["result"], by_name=False
                )
            except ValueError as error:
                raise ConfigError(
                    f"the MCP server {self._command} lists tools that the protocol "
                    f"does not allow: {error}"
                ) from error
            found += page.tools
            if not page.next_cursor:
                return found
            params = {"cursor": page.next_cursor}
        raise ConfigError(
            f"the MCP server {self._command} lists its tools without end: got "
            f"{_MOST_PAGES} pages"
        )

    def call(
        self, earlier: Sequence[Mapping[str, Any]], call: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """Make a call after earlier ones; return its text and whether it is an error.

        Args:
            earlier: Calls of the conversation, with `name` and `arguments`.
            call: The new one.

        Raises:
            CallUndoneError: A limit was reached, or the server ended or refused.
            ToolUnavailableError: The sandbox failed.
        """
        made = [("tools/call", dict(each)) for each in (*earlier, call)]
        result = self._run(made)
        if result.status == "sandbox":
            raise ToolUnavailableError(
                f"the sandbox could not run the MCP server: {_shown(result.stderr)}"
            )
        reply = _reply_in(result)
        if reply is None or "result" not in reply:
            raise CallUndoneError(f"{_why(result, reply)}, and the call is undone")
        try:
            answer = self._types.CallToolResult.model_validate(
                reply["result"], by_name=False
            )
        except ValueError:
            raise CallUndoneError(
                "the server's result is not one of the protocol, and the call is undone"
            ) from None
        return _text_of(answer), bool(answer.is_error)

    def _run(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> SandboxResult:
        messages = [*self._greeting()]
        for number, (method, params) in enumerate(requests, start=1):
            messages.append(
                {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            )
        given = json.dumps({"command": self._command, "messages": messages})
        # Isolated: files of the server in the same folder must not shadow the standard
        # library.
        argv = ("python3", "-I", _DIALOGUE)
        return self._sandbox.run_command(
            Command(argv, self._files, given), self._limits
        )

    def _greeting(self) -> list[dict[str, Any]]:
        types = self._types
        params = types.InitializeRequestParams(
            protocol_version=_protocol_version(),
            capabilities=types.ClientCapabilities(),
            client_info=types.Implementation(name="rl-envs", version="1"),
        ).model_dump(by_alias=True, exclude_none=True, mode="json")
        return [
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
        ]


def _program() -> bytes:
    return Path(__file__).with_name("dialogue.py").read_bytes()


def _reply_in(result: SandboxResult) -> dict[str, Any] | None:
    reply = _said(result).get("reply")
    return reply if isinstance(reply, dict) else None


def _said(result: SandboxResult) -> dict[str, Any]:
    try:
        said = json.loads(result.stdout)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _why(result: SandboxResult, reply: Mapping[str, Any] | None) -> str:
    if reply is not None:
        error = reply.get("error")
        told = error.get("message") if isinstance(error, Mapping) else error
        return f"the server refused it: {_shown(str(told))}"
    if result.status in _WHY_UNDONE:
        return _WHY_UNDONE[result.status]
    said, told = _said(result), _shown(result.stderr)
    if "not_started" in said:
        return f"it cannot be started: {said['not_started']}"
    if "ended" in said:
        return f"the server ended with exit code {said['ended']}" + (
            f" ({told})" if told else ""
        )
    return f"its run ended by {result.status!r}" + (f" ({told})" if told else "")


def _shown(text: str) -> str:
    """Return the end of a text: there stands what went wrong."""
    text = text.strip()
    return text if len(text) <= _SHOWN_CHARS else f"...{text[-_SHOWN_CHARS:]}"


def _text_of(answer: Any) -> str:
    parts = [
        part.text if part.type == "text" else f"[{part.type}]"
        for part in answer.content
    ]
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content)
    return "\n".join(parts) or "(no output)"


def import_types() -> Any:
    """Return the package of the protocol's types.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import mcp_types  # noqa: PLC0415 - only this bridge needs it
    except ImportError as error:
        raise MissingExtraError(
            f"environment 'mcp' needs the package mcp, which cannot be imported "
            f"({error}); pip install 'rl-envs[mcp]'"
        ) from error
    return mcp_types


def _protocol_version() -> str:
    from mcp_types.version import (  # noqa: PLC0415 - only this bridge needs it
        HANDSHAKE_PROTOCOL_VERSIONS,
    )

    return str(HANDSHAKE_PROTOCOL_VERSIONS[-1])
