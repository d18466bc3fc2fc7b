"""The generation backend `openai`: `rl serve` and stand-ins behind real addresses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed import BatchedDataDict, RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models import GenerationConfig, GenerationPolicy, HuggingFacePolicy
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.openai import OpenAIGenerationBackend, Traits
from rl_models.serving import Server, serve
from rl_models.testing import (
    TokenCrossEntropy,
    build_tiny_model,
    check_generation_backend,
    reference_logprobs,
)
from rl_models.weights.sync import WeightSynchronizer

WEIGHTS_KEY = "key-for-weights"
VARIABLE = "RL_TEST_WEIGHTS_KEY"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openai")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return build_tiny_model(root / "model")


@pytest.fixture(scope="module")
def server(folder: Path, root: Path, ray_cluster: None) -> Iterator[Server]:
    settings = {"weights_key": WEIGHTS_KEY, "weights_root": str(root)}
    with serve(folder, port=0, engine="huggingface", **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, WEIGHTS_KEY)


def config_of(*addresses: str, **settings: Any) -> GenerationConfig:
    sampling = {
        name: settings.pop(name)
        for name in ("max_new_tokens", "temperature", "stop_token_ids")
        if name in settings
    }
    return GenerationConfig.from_dict(
        {
            "backend": "openai",
            "max_new_tokens": 8,
            "num_replicas": 1,
            "openai": {"addresses": list(addresses), **settings},
            **sampling,
        }
    )


def made(folder: Path, *addresses: str, **settings: Any) -> OpenAIGenerationBackend:
    backend = OpenAIGenerationBackend()
    backend.setup(
        config_of(*addresses, **settings).to_dict(),
        model_name=str(folder),
        load_weights=settings.get("load_weights", True),
    )
    return backend


def prompts(num_rows: int = 4) -> BatchedDataDict[Any]:
    ids = torch.randint(
        3, 12, (num_rows, 5), generator=torch.Generator().manual_seed(3)
    )
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((num_rows,), 5),
        seeds=torch.arange(num_rows),
    )


@pytest.mark.slow
def test_it_keeps_the_contract_with_rl_serve(
    server: Server, folder: Path, root: Path
) -> None:
    def make() -> OpenAIGenerationBackend:
        return made(
            folder,
            f"{server.url}/v1",
            weights_key_variable=VARIABLE,
            weights_folder=str(root / "versions"),
        )

    check_generation_backend(make, folder)
    # Only the served version was kept, and shutdown removes it.
    assert list((root / "versions").iterdir()) == []


@pytest.mark.slow
def test_a_policy_is_followed_and_each_version_is_confirmed(
    server: Server, folder: Path, root: Path
) -> None:
    settings = config_of(
        server.url,
        weights_key_variable=VARIABLE,
        weights_folder=str(root / "synced"),
        temperature=0.7,
    )
    with RayVirtualCluster(
        [1], use_gpus=False, max_colocated_worker_groups=2
    ) as cluster:
        policy = HuggingFacePolicy(
            str(folder),
            cluster,
            generation=settings.to_dict(),
            optimizer={"kwargs": {"lr": 1e-2}},
            max_total_sequence_length=32,
        )
        generator = GenerationPolicy(
            cluster, settings, model_name=str(folder), load_weights=False
        )
        sync = WeightSynchronizer(policy, generator)
        for version in (1, 2):
            # The first sync is probed: trainer and server compute the same log-probs.
            assert sync.sync_weights() == version
            output = generator.generate(prompts())
            assert set(output["weight_version"].tolist()) == {version}
            rows = _training_rows(output)
            apart = policy.get_logprobs(rows)["logprobs"] - output["logprobs"]
            assert (apart * rows["token_mask"]).abs().max() < 1e-4
            policy.train(rows, TokenCrossEntropy())
            sync.mark_stale()
        generator.shutdown()
        policy.shutdown()


def _training_rows(output: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    mask = (output["token_versions"] >= 0).long()
    return BatchedDataDict(
        input_ids=output["output_ids"],
        input_lengths=output["unpadded_sequence_lengths"],
        token_mask=mask,
        sample_mask=torch.ones(len(mask)),
    )


Answers = Callable[[str, dict[str, Any]], tuple[int, Any]]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *arguments: Any) -> None:
        """Ignore disconnected clients."""


class StandIn:
    """A loopback server that answers by a function, and records requests."""

    def __init__(self, answer: Answers) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                self._answer(json.loads(self.rfile.read(size)) if size else {})

            def _answer(self, body: dict[str, Any]) -> None:
                key = self.headers.get("Authorization")
                stand_in.asked.append((self.path, body, key))
                if self.path == "/v1/models":
                    status, found = 200, {"data": [{"id": "tiny"}]}
                else:
                    status, found = answer(self.path, body)
                text = found if isinstance(found, str | bytes) else json.dumps(found)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode() if isinstance(text, str) else text)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    @property
    def paths(self) -> list[str]:
        return [path for path, *_ in self.asked]


@pytest.fixture
def stand_in() -> Iterator[Callable[[Answers], StandIn]]:
    made: list[StandIn] = []

    def make(answer: Answers) -> StandIn:
        made.append(StandIn(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def choice(**changes: Any) -> dict[str, Any]:
    whole = {
        "token_ids": [5, 1],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "finish_reason": "stop",
    }
    return {"choices": [{**whole, **changes}]}


def test_rows_go_to_the_least_busy_server_and_elsewhere_when_it_fails(
    stand_in: Callable[[Answers], StandIn], folder: Path
) -> None:
    whole = stand_in(lambda path, body: (200, choice()))
    failing = stand_in(lambda path, body: (503, {"error": {"message": "no engine"}}))
    backend = made(folder, failing.address, whole.address)
    output = backend.generate(prompts(6))
    assert output["output_ids"][:, 5:].tolist() == [[5, 1]] * 6
    assert output["logprobs"][:, 5:].tolist() == [[-0.5, -0.25]] * 6
    assert whole.paths.count("/v1/completions") == 6
    assert 1 <= failing.paths.count("/v1/completions") <= 6
    both = [stand_in(lambda path, body: (200, choice())) for _ in range(2)]
    made(folder, *(one.address for one in both)).generate(prompts(6))
    assert all("/v1/completions" in one.paths for one in both)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (200, choice(token_ids=None)),
            r"must have token ids .*got none; take a server",
        ),
        ((200, choice(logprobs=None)), r"log-prob for each of its 2 tokens: got 0"),
        ((200, choice(finish_reason="abort")), r"end by stop or length: got 'abort'"),
        (
            (200, choice(logprobs={"token_logprobs": [-0.5, float("nan")]})),
            r"no number \(nan\); the weights may have diverged",
        ),
        (
            (401, {"error": {"message": "bad key"}}),
            r"401: bad key; name .*api_key_vari",
        ),
        (
            (400, {"error": {"message": "too long"}}),
            r"completions: refused, .*too long",
        ),
        ((500, "out of memory"), r"status 500: out of memory"),
        ((200, b"\xff\xfe"), r"the answer must be JSON"),
        (
            (200, "<html>"),
            r"the answer must be JSON: got '<html>'; is this the address",
        ),
    ],
)
def test_what_a_server_may_say_wrong_is_one_clear_error(
    stand_in: Callable[[Answers], StandIn],
    folder: Path,
    answer: tuple[int, Any],
    message: str,
) -> None:
    server = stand_in(lambda path, body: answer)
    backend = made(folder, server.address)
    with pytest.raises(GenerationError, match=message):
        backend.generate(prompts(1))
    tries = server.paths.count("/v1/completions")
    assert tries == (3 if answer[0] == 500 else 1)


def test_a_server_that_is_not_there_or_has_another_model(
    stand_in: Callable[[Answers], StandIn], folder: Path
) -> None:
    gone = stand_in(lambda path, body: (200, choice()))
    gone.close()
    with pytest.raises(GenerationError, match=r"cannot be reached .*openai\.addresses"):
        made(folder, gone.address)
    other = stand_in(lambda path, body: (200, choice()))
    with pytest.raises(
        GenerationError, match=r"must serve the model 'big': it lists tiny"
    ):
        made(folder, other.address, model="big")


def test_a_server_that_dies_during_a_request_is_named(
    stand_in: Callable[[Answers], StandIn], folder: Path
) -> None:
    def die(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        # Closes the connection without an answer.
        raise ConnectionAbortedError

    server = stand_in(die)
    backend = made(folder, server.address, num_attempts=2)
    with pytest.raises(
        GenerationError, match=rf"{server.address}/v1/completions: .*cannot be reached"
    ):
        backend.generate(prompts(1))
    assert server.paths.count("/v1/completions") == 2


def test_a_server_that_is_slow_is_given_up_at_the_deadline(
    stand_in: Callable[[Answers], StandIn], folder: Path
) -> None:
    goes_on = threading.Event()

    def wait(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        goes_on.wait(60)
        return 200, choice()

    server = stand_in(wait)
    backend = made(folder, server.address, request_deadline_s=0.2, num_attempts=1)
    try:
        with pytest.raises(
            GenerationError, match=r"no answer within 0\.2 s; raise pol"
        ):
            backend.generate(prompts(1))
    finally:
        goes_on.set()


def weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    yield from ((name, value.detach()) for name, value in model.named_parameters())


def test_vllm_s_own_server_is_paused_loaded_and_asked(
    stand_in: Callable[[Answers], StandIn], folder: Path, root: Path
) -> None:
    seen = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/collective_rpc":
            seen.append(Path(body["kwargs"]["weights_path"]))
            # The folder is complete, with the trainer's weights.
            ids = prompts()["input_ids"]
            assert torch.equal(
                reference_logprobs(seen[-1], ids), reference_logprobs(folder, ids)
            )
        if path == "/weight_info":
            return 200, {"weight_version": "7"}
        return 200, choice() if path == "/v1/completions" else {}

    server = stand_in(answer)
    backend = made(
        folder,
        server.address,
        server="vllm",
        weights_folder=str(root / "vllm"),
        weights_key_variable=VARIABLE,
        stop_token_ids=[1],
    )
    assert backend.load_weights(weights_of(folder), 7) == 7
    assert server.paths[1:] == [
        "/pause?mode=wait",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
        "/weight_info",
    ]
    assert server.asked[1][2] == f"Bearer {WEIGHTS_KEY}"
    output = backend.generate(prompts(1))
    assert output["weight_version"].tolist() == [7]
    _, body, _ = server.asked[-1]
    assert body["stop_token_ids"] == [1]
    assert body["ignore_eos"] is True
    assert body["seed"] == 0
    assert seen[0].exists()
    backend.shutdown()
    assert not seen[0].exists()


def test_rows_by_weights_that_nobody_has_sent_are_refused(
    stand_in: Callable[[Answers], StandIn], folder: Path, root: Path
) -> None:
    served = 4

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal served
        if path == "/rl/status":
            return 200, {"weight_version": served}
        if path == "/rl/weights":
            served = body["version"]
            return 200, {"version": served, "num_updated": 1}
        spans = [{"version": served, "start": 0, "end": 2}]
        return 200, choice(weight_versions=spans)

    settings = {"weights_folder": str(root / "rl"), "weights_key_variable": VARIABLE}
    server = stand_in(answer)
    backend = made(folder, server.address, **settings)
    # Before the first update, whatever the server was left with by others.
    assert backend.generate(prompts(1))["weight_version"].tolist() == [0]
    backend.load_weights(weights_of(folder), 7)
    assert backend.generate(prompts(1))["weight_version"].tolist() == [7]
    # The weights of another run; then those of its folder, after a new start.
    for other in (6, 0):
        served = other
        with pytest.raises(
            GenerationError, match=rf"its version 5: got version {other}; the server"
        ):
            backend.generate(prompts(1))
    backend.load_weights(weights_of(folder), 8)
    assert backend.generate(prompts(1))["weight_version"].tolist() == [8]
    backend.shutdown()
    lenient = made(folder, server.address, unverified_weights=True, **settings)
    lenient.load_weights(weights_of(folder), 9)
    served = 0
    assert lenient.generate(prompts(1))["weight_version"].tolist() == [9]
    lenient.shutdown()


def test_weights_that_are_not_confirmed_are_refused(
    stand_in: Callable[[Answers], StandIn], folder: Path
) -> None:
    def old(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": "6"} if path == "/weight_info" else {}

    backend = made(folder, stand_in(old).address, server="vllm")
    with pytest.raises(WeightSyncError, match=r"must serve version 7 .*it says .*'6'"):
        backend.load_weights(weights_of(folder), 7)
    with pytest.raises(GenerationError, match="has no weights"):
        backend.generate(prompts())

    def silent(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (404, {"detail": "Not Found"}) if path == "/weight_info" else (200, {})

    address = stand_in(silent).address
    with pytest.raises(ConfigError, match=r"cannot confirm .*unverified_weights=true"):
        made(folder, address, server="vllm").load_weights(weights_of(folder), 1)
    free = made(folder, address, server="vllm", unverified_weights=True)
    assert free.load_weights(weights_of(folder), 1) == 1


@pytest.mark.parametrize(
    ("kind", "load", "go_on"),
    [
        ("vllm", "/collective_rpc", "/resume"),
        ("sglang", "/update_weights_from_disk", "/continue_generation"),
    ],
)
def test_a_failed_load_leaves_no_server_paused_and_no_folder(
    stand_in: Callable[[Answers], StandIn],
    folder: Path,
    tmp_path: Path,
    kind: str,
    load: str,
    go_on: str,
) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (500, {"message": "no such file"}) if path == load else (200, {})

    server = stand_in(answer)
    backend = made(folder, server.address, server=kind, weights_folder=str(tmp_path))
    with pytest.raises(WeightSyncError, match=r"version 7 did not .*no such file"):
        backend.load_weights(weights_of(folder), 7)
    assert server.paths[-1] == go_on
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "free", "message"),
    [
        ("/update_weight_version", False, r"cannot confirm .*unverified_weights=true"),
        ("/update_weight_version", True, None),
        ("/pause?mode=wait", True, r"404.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_routes_that_a_server_lacks(
    stand_in: Callable[[Answers], StandIn],
    folder: Path,
    missing: str,
    free: bool,
    message: str | None,
) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (404, {"detail": "Not Found"}) if path == missing else (200, {})

    server = stand_in(answer)
    backend = made(folder, server.address, server="vllm", unverified_weights=free)
    if message is None:
        assert backend.load_weights(weights_of(folder), 1) == 1
        assert "/resume" in server.paths
        return
    with pytest.raises((ConfigError, WeightSyncError), match=message):
        backend.load_weights(weights_of(folder), 1)


def test_sglang_by_its_documented_routes(
    stand_in: Callable[[Answers], StandIn], folder: Path
) -> None:
    said = {
        "meta_info": {
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 1, None]],
            "finish_reason": {"type": "length"},
        }
    }
    answers = {
        "/generate": said,
        "/update_weights_from_disk": {"success": True},
        "/get_weight_version": {"weight_version": "3"},
    }
    server = stand_in(lambda path, body: (200, answers.get(path, {})))
    backend = made(folder, server.address, server="sglang")
    assert backend.load_weights(weights_of(folder), 3) == 3
    assert server.paths[1:] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
        "/get_weight_version",
    ]
    output = backend.generate(prompts(2))
    assert output["output_ids"][:, 5:].tolist() == [[5, 1]] * 2
    assert output["truncated"].tolist() == [True, True]
    assert output["token_versions"][:, 5:].tolist() == [[3, 3]] * 2
    answers["/update_weights_from_disk"] = {"success": False, "message": "no folder"}
    with pytest.raises(WeightSyncError, match=r"did not load version 4: no folder"):
        backend.load_weights(weights_of(folder), 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_replicas": None}, r"num_replicas must be 1 with the backend openai"),
        ({"max_batch_size": 4}, r"max_batch_size must be null .*openai\.max_requests"),
        ({"openai": {}}, r"addresses must name a server .*got \[\]"),
        (
            {"openai": {"addresses": ["127.0.0.1:8000"]}},
            r"addresses such as http://127\.0\.0\.1:8000: got .127\.0\.0\.1:8000.",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    whole = config_of("http://127.0.0.1:1").to_dict()
    with pytest.raises(ConfigError, match=message):
        Traits.check_config(
            GenerationConfig.from_dict({**whole, **changes}), on_gpu=False
        )


def test_keys_come_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("http://127.0.0.1:1", api_key_variable=VARIABLE)
    found = Traits.process_variables(config, on_gpu=False)
    assert found == {VARIABLE: WEIGHTS_KEY}
    assert WEIGHTS_KEY not in json.dumps(config.to_dict())
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=rf"{VARIABLE} is not; export it"):
        Traits.process_variables(config, on_gpu=False)


@pytest.mark.parametrize("key", ["", "key\n", "a\rb"])
def test_a_key_that_no_header_can_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(VARIABLE, key)
    config = config_of("http://127.0.0.1:1", weights_key_variable=VARIABLE)
    with pytest.raises(ConfigError, match=rf"{VARIABLE} .*without line breaks"):
        Traits.process_variables(config, on_gpu=False)
