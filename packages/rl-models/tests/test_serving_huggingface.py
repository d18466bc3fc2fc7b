"""A server without vLLM: the same routes, called as by a client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rl_distributed.errors import ConfigError
from rl_models.build.config import TokenizerBuildConfig
from rl_models.generation.huggingface.backend import HuggingFaceGenerationBackend
from rl_models.serving import ServeConfig, Server, engine_choice, serve
from rl_models.serving.huggingface_replica import HuggingFaceReplica
from rl_models.testing import build_tiny_model, reference_logprobs

pytestmark = pytest.mark.usefixtures("ray_cluster")

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
PROMPT = [5, 6, 7, 8]
DEADLINE_S = 120.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = TokenizerBuildConfig(characters="0123456789 >=", chat_template=TEMPLATE)
    return [
        build_tiny_model(
            folder / f"model-{seed}",
            seed=seed,
            max_position_embeddings=256,
            tokenizer=tokenizer,
        )
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def server(models: list[Path]) -> Iterator[Server]:
    with serve(models[0], port=0, engine="huggingface") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "model-0", "temperature": 0, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return _body(messages=[{"role": "user", "content": "12"}], **fields)


def _events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_has_the_log_probs_of_the_model(
    client: httpx.Client, models: list[Path]
) -> None:
    body = _body(prompt=PROMPT, max_tokens=9, logprobs=0, return_token_ids=True)
    answer = client.post(COMPLETIONS, json=body).json()
    (choice,) = answer["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    truth = reference_logprobs(models[0], torch.tensor([ids]))[0].tolist()[4:]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(truth, abs=1e-5)
    length = len(choice["token_ids"])
    assert answer["usage"]["total_tokens"] == 4 + length
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": length}]


def test_a_chat_whole_and_as_a_stream(client: httpx.Client) -> None:
    body = _chat(max_tokens=12, logprobs=True, return_token_ids=True, seed=4)
    body["temperature"] = 1
    said = client.post(CHAT, json=body)
    assert said.headers["x-rl-weight-version"] == "0"
    whole = said.json()
    # "1", "2" and the template's "=".
    assert whole["prompt_token_ids"] == [4, 5, 15]
    (choice,) = whole["choices"]
    options = {"include_usage": True}
    events = _events(client, CHAT, {**body, "stream_options": options})
    assert events[-1]["usage"] == whole["usage"]
    parts = [event["choices"][0] for event in events[:-1]]
    assert parts[0]["delta"]["role"] == "assistant"
    text = "".join(part["delta"]["content"] for part in parts)
    assert text == choice["message"]["content"]
    # The role, then tokens: one at a time, or several on a busy machine.
    assert len(parts) >= 2
    tokens = [token for part in parts[1:] for token in part["token_ids"]]
    assert tokens == choice["token_ids"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_many_answers_and_a_stop_text(client: httpx.Client) -> None:
    body = _body(prompt=["12", "3"], n=3, max_tokens=20, seed=1, temperature=1)
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    texts = [choice["text"] for choice in choices]
    assert len(set(texts)) > 3
    stop = next(text for text in texts if len(text) > 6)[3:5]
    stopped = client.post(COMPLETIONS, json={**body, "stop": stop}).json()["choices"]
    for before, after in zip(texts, stopped, strict=True):
        assert after["text"] == before.split(stop)[0]
    events = _events(client, COMPLETIONS, {**body, "stop": stop})
    streamed = [""] * 6
    for event in events:
        (part,) = event["choices"]
        streamed[part["index"]] += part["text"]
    assert streamed == [choice["text"] for choice in stopped]


def test_requests_at_the_same_time_are_all_answered(client: httpx.Client) -> None:
    wanted = client.post(COMPLETIONS, json=_body(prompt="12", max_tokens=8)).json()
    found: list[str] = []

    def ask() -> None:
        body = _body(prompt="12", max_tokens=8)
        answer = client.post(COMPLETIONS, json=body).json()
        found.append(answer["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [wanted["choices"][0]["text"]] * 6


def _said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"response_format": {"type": "json_object"}}, 400, "--engine vllm"),
        ({"tools": [{"type": "function"}]}, 400, "--engine vllm"),
        ({"top_logprobs": 3, "logprobs": True}, 400, "no top_logprobs"),
        ({"temperature": -1}, 400, "temperature must be >= 0: got -1"),
        ({"top_p": "x"}, 400, "top_p must be a number: got 'x'"),
        ({"max_tokens": 10**30}, 400, "max_tokens must be a whole number"),
        ({"max_tokens": 400}, 400, "context of 256"),
        ({"n": 0}, 400, "n must be a whole number from 1"),
        ({"temperature": 10**400}, 400, "temperature must be >= 0: got 1000"),
        ({"stream": "false"}, 400, "stream must be true or false: got 'false'"),
        ({"return_token_ids": 1}, 400, "return_token_ids must be true or false"),
        ({"messages": [_said([{"type": ["text"]}])]}, 400, "a text or a list of texts"),
        ({"messages": []}, 400, "at least one message"),
        ({"model": "other"}, 404, "'other' does not exist"),
    ],
)
def test_what_is_wrong_or_not_supported_is_said(
    client: httpx.Client, fields: dict[str, Any], status: int, said: str
) -> None:
    answer = client.post(CHAT, json={**_chat(), **fields})
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_neutral_values_of_such_fields_pass(client: httpx.Client) -> None:
    fields = {"response_format": {"type": "text"}, "presence_penalty": 0, "user": "u"}
    answer = client.post(CHAT, json=_chat(max_tokens=2, tools=None, **fields))
    assert answer.status_code == 200


def test_the_other_routes(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("model-0", 256)
    body = {"model": "model-0", "prompt": "12"}
    assert client.post("/tokenize", json=body).json()["tokens"] == [4, 5]
    body = {"model": "model-0", "tokens": [4, 5]}  # type: ignore[dict-item]
    assert client.post("/detokenize", json=body).json() == {"prompt": "12"}


def test_weights_change_between_requests(
    server: Server, client: httpx.Client, models: list[Path]
) -> None:
    body = _body(prompt=PROMPT, max_tokens=6, logprobs=0, return_token_ids=True)
    assert server.update_weights(models[1], 7).num_updated == 1
    (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
    truth = reference_logprobs(models[1], torch.tensor([PROMPT + choice["token_ids"]]))
    values = choice["logprobs"]["token_logprobs"]
    assert values == pytest.approx(truth[0].tolist()[4:], abs=1e-5)
    assert choice["weight_versions"][0]["version"] == 7


def test_a_failure_has_its_cause_for_the_routers_log(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setenv("KEY_OF_THE_TEST", "inner")
    config = ServeConfig(engine="huggingface").generation().to_dict()
    replica = HuggingFaceReplica(config, str(models[0]), "model-0", "KEY_OF_THE_TEST")
    url = f"http://127.0.0.1:{replica.start(DEADLINE_S)['port']}"
    monkeypatch.setattr(HuggingFaceGenerationBackend, "generate", fail)
    try:
        assert httpx.post(url + CHAT, json=_chat()).status_code == 401
        headers = {"Authorization": "Bearer inner"}
        for body in (_chat(), _chat(stream=True)):
            answer = httpx.post(url + CHAT, json=body, headers=headers)
            assert answer.status_code == 500
            assert "no memory" not in answer.json()["error"]["message"]
            cause = answer.json()["rl_cause"]
            assert cause[0] == "RuntimeError: no memory is left"
            assert "Traceback" in cause[1]
    finally:
        replica.stop()


def test_the_engine_is_vllm_where_it_is_installed_or_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_choice, "has_vllm", lambda: True)
    assert engine_choice.with_engine(ServeConfig()).engine == "vllm"
    monkeypatch.setattr(engine_choice, "has_vllm", lambda: False)
    asked = ServeConfig(tool_call_parser="hermes")
    assert engine_choice.with_engine(asked).engine == "vllm"
    assert caplog.messages == []
    assert engine_choice.with_engine(ServeConfig()).engine == "huggingface"
    (line,) = caplog.messages
    assert "vLLM is not installed" in line
    for field in ({"tool_call_parser": "hermes"}, {"dtype": "float16"}):
        with pytest.raises(ConfigError, match="not read by engine huggingface"):
            ServeConfig.from_dict({"engine": "huggingface", **field}, source="test")
