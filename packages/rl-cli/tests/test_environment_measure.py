"""`rl envs run`: a model folder and a stand-in server, evaluated on tasks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - first, as in a process that trains: batches are tensors

from rl_cli.main import _run
from rl_models import ModelBuildConfig, build_model

Capture = pytest.CaptureFixture[str]
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class StandIn(ThreadingHTTPServer):
    """A chat-completions server whose answers are a function of the request."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        self.answer, self.requests, self.keys = answer, [], set()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    requests: list[dict[str, Any]]
    keys: set[str | None]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({**body, "path": self.path})
            self.server.keys.add(self.headers.get("Authorization"))
        status, answer = self.server.answer(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        return


def completion(text: str, reason: str = "stop") -> tuple[int, Any]:
    message = {"role": "assistant", "content": text}
    return 200, {
        "choices": [{"message": message, "finish_reason": reason}],
        "usage": {"completion_tokens": len(text)},
    }


def sorts(body: dict[str, Any]) -> tuple[int, Any]:
    """Sort the digits; even seeds are wrong."""
    right = "".join(sorted(body["messages"][-1]["content"].removesuffix("=")))
    return completion(right if body["seed"] % 2 else "0")


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], StandIn]]:
    servers: list[StandIn] = []

    def start(answer: Answer) -> StandIn:
        servers.append(StandIn(answer))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


SORTING = ["sorting", "tasks.num_digits=5", "--tasks", "4"]


def run(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    done = _run(["envs", "run", *arguments], False)
    out, err = capsys.readouterr()
    assert done == code, err
    return out if code == 0 else err


def test_a_server_is_measured(
    serve: Callable[[Answer], StandIn], tmp_path: Path, capsys: Capture
) -> None:
    server = serve(sorts)
    (tmp_path / "key").write_text("secret\n")
    file = tmp_path / "out" / "lines.jsonl"
    arguments = [*SORTING, "--address", f"{server.address}/v1", "-n", "2"]
    arguments += ["--served-model", "m", "--key-file", str(tmp_path / "key")]
    arguments += ["--temperature", "0.5", "--max-new-tokens", "9"]
    found = json.loads(run(capsys, *arguments, "-o", str(file), "--json"))
    assert (found["num_tasks"], found["num_generations"]) == (4, 2)
    metrics = found["metrics"]
    assert metrics["reward"] == metrics["pass@1"] == metrics["env/accuracy"] == 0.5
    assert metrics["pass@2"] == 1.0
    assert metrics["mean_response_tokens"] == metrics["mean_response_chars"] == 3.0
    assert metrics["time_s"] > 0
    assert server.keys == {"Bearer secret"}
    assert len(server.requests) == 8
    for request in server.requests:
        assert request["path"] == "/v1/chat/completions"
        assert (request["model"], request["temperature"]) == ("m", 0.5)
        assert request["max_tokens"] == 9
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["idx"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
    for line in lines:
        roles = [message["role"] for message in line["messages"]]
        assert roles == ["user", "assistant"]
        assert line["correct"] == (line["reward"] == 1.0)
    table = run(capsys, *arguments)
    assert "pass@2" in table
    assert "secret" not in table


def test_many_turns_are_played_with_a_server(
    serve: Callable[[Answer], StandIn], tmp_path: Path, capsys: Capture
) -> None:
    def calculates(body: dict[str, Any]) -> tuple[int, Any]:
        first, *others = body["messages"]
        if not others:
            return completion(f"[{first['content'].removesuffix('=')}]")
        return completion(others[-1]["content"])

    server = serve(calculates)
    arguments = ["calculator", "call_format=brackets", "--tasks", "3"]
    arguments += ["--address", server.address, "--served-model", "m"]
    file = tmp_path / "lines.jsonl"
    found = json.loads(run(capsys, *arguments, "--json", "-o", str(file)))
    assert found["metrics"]["pass@1"] == 1.0
    assert len(server.requests) == 6
    for request in server.requests:
        assert {m["role"] for m in request["messages"]} <= {"user", "assistant"}
    (first, *_) = [json.loads(line) for line in file.read_text().splitlines()]
    assert len([m for m in first["messages"] if m["role"] == "assistant"]) == 2
    cut = json.loads(run(capsys, *arguments, "--json", "--max-turns", "1"))
    assert cut["metrics"]["pass@1"] == 0.0


def test_failures_are_tried_again_and_counted(
    serve: Callable[[Answer], StandIn], tmp_path: Path, capsys: Capture
) -> None:
    tried: dict[int, int] = {}

    def flaky(body: dict[str, Any]) -> tuple[int, Any]:
        seed = body["seed"]
        tried[seed] = tried.get(seed, 0) + 1
        if seed == 0 or tried[seed] == 1:
            return 503, {"error": "busy"}
        return sorts({**body, "seed": 1})

    server = serve(flaky)
    file = tmp_path / "lines.jsonl"
    arguments = [*SORTING, "--address", server.address, "--served-model", "m"]
    found = json.loads(run(capsys, *arguments, "--json", "-o", str(file)))
    assert found["metrics"]["unscored_rate"] == 0.25
    assert found["metrics"]["reward"] == 1.0
    assert found["metrics"]["pass@1"] == 0.75
    assert tried == {0: 3, 1: 2, 2: 2, 3: 2}
    first = json.loads(file.read_text().splitlines()[0])
    assert (first["reward"], first["problem"]) == (None, "status 503")


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (lambda body: (401, {"error": "no key"}), 2, "with status 401"),
        (lambda body: (200, ["hello"]), 2, "must answer with a chat completion"),
        (lambda body: (500, {}), 1, "answered none of 4 requests"),
    ],
)
def test_a_server_that_is_of_no_use_is_named(
    answer: Answer,
    code: int,
    message: str,
    serve: Callable[[Answer], StandIn],
    capsys: Capture,
) -> None:
    server = serve(answer)
    arguments = [*SORTING, "--address", server.address, "--served-model", "m"]
    assert message in run(capsys, *arguments, code=code)


def test_a_request_has_a_deadline(
    serve: Callable[[Answer], StandIn], capsys: Capture
) -> None:
    end = threading.Event()

    def never(body: dict[str, Any]) -> tuple[int, Any]:
        end.wait(60)
        return completion("1")

    server = serve(never)
    arguments = ["sorting", "tasks.num_digits=5", "--tasks", "1", "--deadline-s", "0.2"]
    arguments += ["--address", server.address, "--served-model", "m"]
    try:
        assert "no reply within 0.2 s" in run(capsys, *arguments, code=1)
    finally:
        end.set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --model or --address"),
        (["--model", "m", "--address", "http://a"], "give either --model or --address"),
        (["--address", "http://127.0.0.1:1"], "needs --served-model"),
        (["--model", "m", "--key-file", "k"], "--key-file requires --address"),
        (["--model", "./none"], "'./none' does not exist"),
        (["--address", "here", "--served-model", "m"], "must be an address such as"),
        (
            ["--address", "http://a", "--served-model", "m", "--key-file", "none"],
            "--key-file none cannot be read",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    assert message in run(capsys, *SORTING, *arguments, code=2)


def test_a_model_folder_is_measured(tmp_path: Path, capsys: Capture) -> None:
    config = ModelBuildConfig.from_dict(
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "tokenizer": {"characters": "0123456789="},
        }
    )
    model = str(build_model(config, tmp_path / "m", seed=3))
    file = tmp_path / "lines.jsonl"
    arguments = [*SORTING, "--model", model, "-n", "2", "--max-new-tokens", "4"]
    found = json.loads(run(capsys, *arguments, "--json", "-o", str(file)))
    assert (found["num_tasks"], found["num_generations"]) == (4, 2)
    assert {"reward", "pass@2", "time_s", "env/accuracy"} <= set(found["metrics"])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 8
    for line in lines:
        prompt, response = line["messages"]
        assert prompt["content"] == line["prompt"]
        assert response["content"] == line["response"]
        assert 1 <= line["num_tokens"] <= 4


AGENT = '''
async def agent(task, client):
    """Asks for the digits sorted, then whether that is right."""
    asked = [{"role": "user", "content": task.prompt}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    first = await client.chat.completions.create(
        model=task.model, messages=asked, tools=[tool], max_tokens=5
    )
    said = first.choices[0].message.content
    if first.choices[0].message.tool_calls:
        raise RuntimeError("no tools please")
    asked += [{"role": "assistant", "content": said},
              {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}]
    stream = await client.chat.completions.create(
        model=task.model, messages=asked, stream=True
    )
    text = "".join([part.choices[0].delta.content or "" async for part in stream])
    return {"right": float(said == task["answer"]), "sure": 0.5 * (text == "yes")}
'''


def agent_arguments(tmp_path: Path, server: StandIn) -> list[str]:
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": "4213=", "answer": "1234"}, {"prompt": "21=", "answer": "12"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = ["agent", f"file={tmp_path}/agent.py", "--data", f"{tmp_path}/rows.jsonl"]
    where = ["--address", server.address, "--served-model", "m"]
    return [*named, *where, "--max-new-tokens", "9", "--full-reward", "1.5"]


def test_agents_are_measured_with_a_server(
    serve: Callable[[Answer], StandIn], tmp_path: Path, capsys: Capture
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["messages"]) > 1:
            return completion("yes", "length")
        return sorts(body)

    server = serve(answer)
    file = tmp_path / "lines.jsonl"
    arguments = [*agent_arguments(tmp_path, server), "-n", "2", "-o", str(file)]
    found = json.loads(run(capsys, *arguments, "--json"))
    assert (found["num_tasks"], found["num_generations"]) == (2, 2)
    # Odd seeds are correct.
    metrics = found["metrics"]
    assert (metrics["reward"], metrics["pass@1"], metrics["pass@2"]) == (1.0, 0.5, 1.0)
    assert (metrics["reward/right"], metrics["reward/sure"]) == (0.5, 0.5)
    assert len(server.requests) == 8
    for request in server.requests:
        assert (request["model"], request["temperature"]) == ("m", 1.0)
        assert "stream" not in request
        # The agent's own request, if it is below the command's limit.
        is_first = len(request["messages"]) == 1
        assert request["max_tokens"] == (5 if is_first else 9)
        assert ("tools" in request) == is_first
    assert sorted({request["seed"] for request in server.requests}) == [0, 1, 2, 3]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        prompt, said, sure, yes = line["messages"]
        assert line["prompt"] == prompt["content"]
        assert (sure["content"], yes["content"]) == ("Sure?", "yes")
        assert line["response"] == "yes"
        assert line["truncated"] is True
        assert line["num_tokens"] == len(said["content"]) + 3
        assert line["correct"] == (line["reward"] == 1.5)


def test_agents_that_fail_are_not_scored(
    serve: Callable[[Answer], StandIn], tmp_path: Path, capsys: Capture
) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["seed"] == 0:
            return 503, {}
        call = {"id": "1", "type": "function"}
        call["function"] = {"name": "f", "arguments": "{}"}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    server = serve(answer)
    file = tmp_path / "lines.jsonl"
    arguments = [*agent_arguments(tmp_path, server), "-o", str(file)]
    found = json.loads(run(capsys, *arguments, "--json"))
    assert found["metrics"]["unscored_rate"] == 1.0
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    assert "The server gives no reply: status 503." in first["problem"]
    assert "RuntimeError: no tools please" in second["problem"]


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (lambda body: (401, {"error": "no key"}), 2, "with status 401"),
        (lambda body: (500, {}), 1, "answered none of 2 requests"),
    ],
)
def test_a_server_of_no_use_to_agents_is_named(
    answer: Answer,
    code: int,
    message: str,
    serve: Callable[[Answer], StandIn],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    server = serve(answer)
    assert message in run(capsys, *agent_arguments(tmp_path, server), code=code)
