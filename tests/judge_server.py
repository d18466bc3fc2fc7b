"""A server with OpenAI's chat completions, and replies set by a test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = str | int | None


@dataclass
class JudgeServer:
    """Its questions and replies.

    A text is a reply, a number a status, and None keeps the client waiting until the
    server ends.
    """

    reply: Callable[[str], Reply]
    """Called with the question's last message."""
    questions: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    headers: list[Message] = field(default_factory=list)
    most_at_once: int = 0
    address: str = ""
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_once: int = 0


@contextmanager
def judge_server(reply: Callable[[str], Reply]) -> Iterator[JudgeServer]:
    """Serve on 127.0.0.1 while the block runs."""
    judge = JudgeServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(size))
            question = request["messages"][-1]["content"]
            with judge.lock:
                judge.requests.append(request)
                judge.questions.append(question)
                judge.keys.append(self.headers.get("Authorization", ""))
                judge.headers.append(self.headers)
                judge.at_once += 1
                judge.most_at_once = max(judge.most_at_once, judge.at_once)
            try:
                self._answer(judge.reply(question))
            finally:
                with judge.lock:
                    judge.at_once -= 1

        def _answer(self, reply: Reply) -> None:
            if reply is None:
                judge.ended.wait(60)
                return
            status = reply if isinstance(reply, int) else 200
            body: dict[str, Any] = {"error": {"message": "not now"}}
            if isinstance(reply, str):
                message = {"role": "assistant", "content": reply}
                body = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "judge",
                    "choices": [
                        {"index": 0, "message": message, "finish_reason": "stop"}
                    ],
                    "usage": {
                        "prompt_tokens": 7,
                        "completion_tokens": 3,
                        "total_tokens": 10,
                    },
                }
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Suppress log output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.address = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
