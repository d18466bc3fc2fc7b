"""An MCP server on the standard library alone: notes, and ways to misbehave."""

import json
import os
import socket
import sys
import time

NOTES: list[str] = []
TEXT = {"type": "string", "maxLength": 20}
TOOLS = [
    {
        "name": "add",
        "description": "Add a note.",
        "inputSchema": {
            "type": "object",
            "properties": {"text": TEXT, "times": {"type": "integer", "minimum": 1}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
    {"name": "show", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "refuse", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "flood", "inputSchema": {"type": "object"}},
    {"name": "look", "inputSchema": {"type": "object"}},
]


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def say(message: dict) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}))


def text(value: str, is_error: bool = False) -> dict:
    return {"content": [{"type": "text", "text": value}], "isError": is_error}


def look() -> str:
    """Return what can be seen of the machine."""
    seen = [
        f"uid={os.getuid()}",
        f"processes={sum(n.isdigit() for n in os.listdir('/proc'))}",
    ]
    seen.append(f"secret={os.environ.get('SECRET_OF_THE_TEST', '')}")
    seen.append(f"root={os.path.exists('/root')} home={os.environ.get('HOME')}")
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2)
        seen.append("connected")
    except OSError:
        seen.append("unreachable")
    return " ".join(seen)


def call(name: str, given: dict) -> dict:
    if name == "add":
        NOTES.extend([given["text"]] * given.get("times", 1))
        return text(f"{len(NOTES)} notes")
    if name == "show":
        return text(",".join(NOTES))
    if name == "die":
        sys.stderr.write("out of ink")
        sys.stderr.flush()
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "flood":
        return text("x" * (8 << 20))
    if name == "look":
        return text(look())
    return text("the pen is broken", True)


for line in sys.stdin:
    asked = json.loads(line)
    method = asked.get("method")
    if method == "initialize":
        write("a line that is no message")
        version = asked["params"]["protocolVersion"]
        info = {"name": "notes", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {}, "serverInfo": info}
        say({"id": asked["id"], "result": result})
    elif method == "tools/list":
        # Two pages, with a request of the server's own in between.
        say({"id": "mine", "method": "ping"})
        at = int(asked["params"].get("cursor", 0))
        page = {"tools": TOOLS[at : at + 5]}
        if at + 5 < len(TOOLS):
            page["nextCursor"] = str(at + 5)
        say({"id": asked["id"], "result": page})
    elif method == "tools/call":
        name = asked["params"]["name"]
        if name == "refuse":
            say({"id": asked["id"], "error": {"code": -32000, "message": "not now"}})
        else:
            result = call(name, asked["params"].get("arguments", {}))
            say({"id": asked["id"], "result": result})
