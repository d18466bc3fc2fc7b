"""The program that talks to an MCP server, inside the sandbox.

It reads `{"command": [...], "messages": [...]}` from standard input, starts the server,
sends each message after the reply to the one before it, and prints the last reply, or
that the server ended. Only the standard library is imported: the sandbox may hold
another Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__: list[str] = []

_METHOD_NOT_FOUND = -32601


def _write(server: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps(message).encode() + b"\n")
    server.stdin.flush()


def _reply_to(server: subprocess.Popen[bytes], message: dict[str, Any]) -> Any:
    """Return the reply to a request; None: the server closed its output."""
    assert server.stdout is not None
    for line in server.stdout:
        try:
            said = json.loads(line)
        except ValueError:
            # Some servers print to their standard output by mistake.
            continue
        if not isinstance(said, dict):
            continue
        if "method" in said:
            # A server may wait for an answer before it goes on.
            if "id" in said:
                _write(server, _answer(said))
        elif said.get("id") == message["id"]:
            return said
    return None


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request of the server: nothing but pings is offered."""
    head = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "ping":
        return {**head, "result": {}}
    error = {"code": _METHOD_NOT_FOUND, "message": "not offered by this client"}
    return {**head, "error": error}


def _talk(command: list[str], messages: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError as error:
        return {"not_started": str(error)}
    reply = None
    try:
        for number, message in enumerate(messages):
            _write(server, message)
            # A notification has no reply.
            if "id" not in message:
                continue
            reply = _reply_to(server, message)
            if reply is None:
                return {"ended": server.wait(), "at": number}
    except BrokenPipeError:
        return {"ended": server.wait(), "at": number}
    finally:
        server.kill()
        server.wait()
    return {"reply": reply}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(_talk(given["command"], given["messages"]), sys.stdout)
