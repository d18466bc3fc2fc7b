"""vLLM's own server behind the router: one start, and all its guarantees."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rl_models.build.config import TokenizerBuildConfig
from rl_models.generation.config import GenerationConfig
from rl_models.registry import get_generation_backend
from rl_models.serving import Server, serve
from rl_models.serving.ray_process import engine_environment
from rl_models.serving.tool_parsers import TOOL_CALL_PARSERS
from rl_models.testing import build_tiny_model, reference_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
# The characters of JSON, and the letters of a tool call.
CHARACTERS = '0123456789 >={}[]":,.-abdegmnrtsu\n<_clo/'
PROMPT = [5, 6, 7, 8]
WEIGHTS_KEY = "another-secret"
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape; the kernels need heads of at least 32."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = TokenizerBuildConfig(characters=CHARACTERS, chat_template=TEMPLATE)
    return [
        build_tiny_model(
            folder / f"model-{seed}",
            seed=seed,
            hidden_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1_024,
            tokenizer=tokenizer,
        )
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def server(models: list[Path]) -> Iterator[Server]:
    with serve(
        models[0],
        port=0,
        api_key="secret",
        weights_key=WEIGHTS_KEY,
        weights_root=str(models[0].parent),
        max_restarts=0,
        engine="vllm",
        tool_call_parser="hermes",
    ) as running:
        yield running


def _open(server: Server, path: str, body: Any = None, key: str = "secret") -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers)
    return urllib.request.urlopen(request, timeout=DEADLINE_S)


def _ask(
    server: Server, path: str, body: Any = None, key: str = "secret"
) -> dict[str, Any]:
    with _open(server, path, body, key) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _change_weights(server: Server, folder: Path) -> dict[str, Any]:
    return _ask(server, "/rl/weights", {"path": str(folder)}, WEIGHTS_KEY)


def _complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": "model-0", "prompt": PROMPT, "temperature": 0, "logprobs": 0}
    answer = _ask(
        server, "/v1/completions", {**body, "return_token_ids": True, **fields}
    )
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        text = line.decode().strip().removeprefix("data: ")
        if text and text != "[DONE]":
            yield json.loads(text)


def _sampled(folder: Path, ids: list[int]) -> list[float]:
    """Return float64 log-probs of the tokens after the prompt."""
    values: list[float] = reference_logprobs(folder, torch.tensor([ids]))[0].tolist()
    return values[len(PROMPT) :]


def test_a_completion_is_what_the_other_backend_gives(
    server: Server, models: list[Path]
) -> None:
    choice = _complete(server, max_tokens=24, ignore_eos=True)
    config = GenerationConfig(max_new_tokens=24, stop_token_ids=[])
    backend = get_generation_backend("huggingface")()
    backend.setup(config.to_dict(), model_name=str(models[0]))
    rows = {"input_ids": torch.tensor([PROMPT]), "input_lengths": torch.tensor([4])}
    ours = backend.generate(rows, greedy=True)["output_ids"][0].tolist()
    assert choice["prompt_token_ids"] + choice["token_ids"] == ours
    truth = _sampled(models[0], ours)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(truth, abs=1e-5)
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 24}]


def test_a_chat_whole_and_as_a_stream(server: Server) -> None:
    body = {
        "model": "model-0",
        "messages": [{"role": "user", "content": "12"}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    whole = _ask(server, "/v1/chat/completions", body)
    # "1", "2" and the template's "=".
    assert whole["prompt_token_ids"] == [4, 5, 15]
    choice = whole["choices"][0]
    with _open(server, "/v1/chat/completions", {**body, "stream": True}) as answer:
        assert answer.headers["x-rl-weight-version"] == "0"
        parts = [event["choices"][0] for event in _events(answer)]
    tokens = [token for part in parts for token in part.get("token_ids") or []]
    assert tokens == choice["token_ids"]
    text = "".join(part["delta"].get("content") or "" for part in parts)
    assert text == choice["message"]["content"]
    values = [
        entry["logprob"]
        for part in parts
        for entry in (part["logprobs"] or {"content": []})["content"]
    ]
    assert values == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert parts[-1]["weight_versions"] == choice["weight_versions"]


def test_what_is_wrong_is_said(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        _complete(server, model="other")
    assert "other" in json.load(caught.value)["error"]["message"]
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        _complete(server, prompt=[3] * 2_000)
    assert "1024" in json.load(caught.value)["error"]["message"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        _open(server, "/v1/models", key="wrong")
    port = server.url.rpartition(":")[2]
    # Nothing bypasses the router: the replica has a key of its own.
    (row,) = server.status()["replicas"]
    listening = {
        c.laddr.port
        for c in psutil.Process(row["pid"]).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.ip == "127.0.0.1"
    }
    assert int(port) not in listening
    assert _ask(server, "/v1/models")["data"][0]["id"] == "model-0"


def _chat(server: Server, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "12"}]
    body = {"model": "model-0", "messages": messages, "max_tokens": 200, "seed": 1}
    return _ask(server, "/v1/chat/completions", {**body, **fields})["choices"][0]


def _form(key: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": [key],
        "additionalProperties": False,
    }
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def test_an_answer_follows_a_json_schema(server: Server) -> None:
    choice = _chat(server, response_format=_form("a"), temperature=0)
    answer = json.loads(choice["message"]["content"])
    assert list(answer) == ["a"]
    assert 0 <= answer["a"] <= 99


def test_a_schema_that_the_vocabulary_cannot_write_is_the_requests_fault(
    server: Server,
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        _chat(server, response_format=_form("Z"))
    error = json.load(caught.value)["error"]
    assert error["code"] == "form_not_in_vocabulary"
    assert "vocabulary of this model" in error["message"]
    body = {"model": "model-0", "messages": [{"role": "user", "content": "1"}]}
    body |= {"stream": True, "response_format": _form("Z")}
    with _open(server, "/v1/chat/completions", body) as answer:
        events = list(_events(answer))
    assert events[-1]["error"]["code"] == "form_not_in_vocabulary"
    assert _complete(server, max_tokens=2)["finish_reason"] == "length"


def test_tool_calls_are_switched_on(server: Server) -> None:
    parameters = _form("a")["json_schema"]["schema"]
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    # Calling one is left to the model, and a random one does not.
    assert _chat(server, tools=[tool], max_tokens=4)["message"]["content"]
    message = _chat(server, tools=[tool], tool_choice="required")["message"]
    call = message["tool_calls"][0]["function"]
    assert call["name"] == "a"
    assert isinstance(json.loads(call["arguments"]), dict)


def test_one_tool_can_be_named(server: Server) -> None:
    parameters = _form("a")["json_schema"]["schema"]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("b", "a")
    ]
    named = {"type": "function", "function": {"name": "a"}}
    message = _chat(server, tools=tools, tool_choice=named)["message"]
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "a"
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_the_parsers_of_tool_calls_are_those_of_the_engine() -> None:
    prepared = engine_environment().prepare()
    python = shlex.split(prepared.runtime_env["py_executable"])
    program = (
        "from vllm.tool_parsers import ToolParserManager as Manager\n"
        "print(*sorted(Manager.list_registered()))"
    )
    said = subprocess.run(
        [*python, "-c", program], capture_output=True, text=True, check=True
    )
    assert tuple(said.stdout.splitlines()[-1].split()) == TOOL_CALL_PARSERS


def test_weights_change_in_the_middle_of_a_stream(
    server: Server, models: list[Path]
) -> None:
    body = {
        "model": "model-0",
        "prompt": PROMPT,
        "max_tokens": 900,
        "ignore_eos": True,
        "seed": 3,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    said: list[dict[str, Any]] = []

    def update() -> None:
        said.append(_change_weights(server, models[1]))

    thread = threading.Thread(target=update)
    ids, values, spans = list(PROMPT), [], []
    with _open(server, "/v1/completions", body) as answer:
        for number, event in enumerate(_events(answer)):
            if number == 5:
                thread.start()
            (choice,) = event["choices"]
            ids += choice["token_ids"]
            values += choice["logprobs"]["token_logprobs"]
            spans = choice.get("weight_versions", spans)
    thread.join(DEADLINE_S)
    assert said == [{"version": 1, "num_updated": 1}]
    assert [span["version"] for span in spans] == [0, 1]
    switch = spans[0]["end"]
    assert 0 < switch == spans[1]["start"] < spans[1]["end"] == 900
    truth = _sampled(models[0], ids)[:switch] + _sampled(models[1], ids)[switch:]
    assert values == pytest.approx(truth, abs=2e-5)
    after = _complete(server, max_tokens=8, ignore_eos=True)
    assert after["weight_versions"] == [{"version": 1, "start": 0, "end": 8}]


def test_weights_that_do_not_fit_change_nothing(
    server: Server, models: list[Path], tiny_folder: Path
) -> None:
    before = _complete(server, max_tokens=8)
    misfit = shutil.copytree(tiny_folder, models[0].parent / "misfit")
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        _change_weights(server, misfit)
    assert "hidden_size" in json.load(caught.value)["error"]["message"]
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        _change_weights(server, tiny_folder)
    assert json.load(caught.value)["error"]["code"] == "path_refused"
    assert _complete(server, max_tokens=8) == before


def test_a_kill_in_the_middle_of_a_stream_leaves_an_error_and_no_process(
    server: Server,
) -> None:
    (row,) = server.status()["replicas"]
    process = psutil.Process(row["pid"])
    family = [process, *process.children(recursive=True)]
    body = {"model": "model-0", "prompt": PROMPT, "max_tokens": 900, "stream": True}
    events = []
    with _open(server, "/v1/completions", {**body, "ignore_eos": True}) as answer:
        for event in _events(answer):
            events.append(event)
            if len(events) == 5:
                process.kill()
    assert events[-1]["error"]["code"] == "replica_lost"
    assert all("choices" in event for event in events[:-1])
    # It must not be replaced (max_restarts is 0), and everyone is notified.
    assert server.hopeless.wait(DEADLINE_S)
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        _complete(server)
    assert json.load(caught.value)["error"]["code"] == "no_replica"
    assert psutil.wait_procs(family, DEADLINE_S)[1] == []
