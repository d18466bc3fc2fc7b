"""`rl serve` without an engine: mistakes are reported at once, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_cli.engine_environment
import rl_distributed
import rl_models.serving
from rl_cli.main import _run
from rl_models import ModelBuildConfig, build_model
from rl_models.serving import ServeConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = ModelBuildConfig(hidden_size=16, num_hidden_layers=1)
    return str(build_model(config, tmp_path_factory.mktemp("model") / "m"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/folder"], "no/such/folder"),
        (["MODEL", "num_replica=2"], "num_replicas"),
        (["MODEL", "vllm.max_num_seq=2"], "max_num_seqs"),
        (["MODEL", "vllm.tensor_parallel_size=2"], "has one GPU: got 2"),
        (["MODEL", "--api-key", "two words"], "api_key"),
        (["MODEL", "--weights-key", "k"], "got no weights_root"),
        (["MODEL", "--weights-root", "no/such"], "got no weights_key"),
        (["MODEL", "--weights-root", "no/such", "weights_key=k"], "weights_root must"),
        (["MODEL", "--replicas", "2", "num_replicas=3"], "num_replicas is given twice"),
        (["MODEL", "--port", "70000"], "70000"),
        (
            ["MODEL", "--engine", "huggingface", "--tool-call-parser", "hermes"],
            "tool_call_parser is not read by engine huggingface",
        ),
        (["MODEL", "--engine", "vlm"], "'vllm'"),
        (["MODEL", "--tool-call-parser", "herms"], "hermes, hf, hunyuan_a13b"),
        (["MODEL", "--host", "203.0.113.1", "--api-key", "k"], "--host"),
    ],
)
def test_wrong_input_is_named_with_exit_code_2(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    arguments = [model if part == "MODEL" else part for part in arguments]
    assert _run(["serve", *arguments], False) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_port_that_is_taken_is_told_at_once(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert _run(["serve", model, "--port", str(port)], False) == 2
    err = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in err
    assert "--port" in err


class FakeServer:
    """Starts at once, and ends as the test sets."""

    made: FakeServer

    def __init__(self, model: str, config: ServeConfig) -> None:
        self.model, self.config = model, config
        self.model_name, self.url = "m", "http://127.0.0.1:1"
        key = config.api_key
        self.has_generated_key = key is None and config.host == "0.0.0.0"
        self.api_key = "made" if key is None else key.get_secret_value()
        self.hopeless: Any = threading.Event()
        self.calls: list[str] = []
        FakeServer.made = self

    def bind(self) -> None:
        self.calls.append("bind")

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, drain_s: float | None = None) -> bool:
        self.calls.append(f"stop {drain_s}")
        return True


class Interrupting:
    """Raises SIGINT instead of waiting until all replicas are gone."""

    def wait(self, timeout: float) -> bool:
        signal.raise_signal(signal.SIGINT)
        return False


def _no_engine(name: str, terminal: object) -> None:
    assert name == "rl_models.generation.vllm"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rl_models.serving, "Server", FakeServer, raising=False)
    monkeypatch.setattr("rl_models.checkpoint.hub.check_model", lambda model: None)
    monkeypatch.setattr(rl_distributed, "init_ray", lambda count: True)
    monkeypatch.setattr(rl_cli.engine_environment, "prepare_engine", _no_engine)
    monkeypatch.setattr(rl_distributed, "shutdown_ray", lambda: None)
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("fake")
def test_ctrl_c_drains_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: FakeServer) -> None:
        self.calls.append("start")
        self.hopeless = Interrupting()

    monkeypatch.setattr(FakeServer, "start", start)
    assert _run(["serve", "m", "--json", "drain_deadline_s=7"], False) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"url": "http://127.0.0.1:1", "model": "m"}
    assert "7 s" in captured.err
    assert FakeServer.made.calls == ["bind", "start", "stop None", "stop 0.0"]


@pytest.mark.usefixtures("fake")
def test_ctrl_c_while_it_starts_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        FakeServer, "start", lambda self: signal.raise_signal(signal.SIGINT)
    )
    assert _run(["serve", "m"], False) == 130
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "stopped before the server was ready"
    assert captured.out == ""
    assert FakeServer.made.calls == ["bind", "stop 0.0"]


@pytest.mark.usefixtures("fake")
def test_settings_come_from_options_keys_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: FakeServer) -> None:
        self.hopeless.set()

    monkeypatch.setattr(FakeServer, "start", start)
    monkeypatch.setenv("RL_API_KEY", "hidden")
    monkeypatch.setenv("RL_WEIGHTS_KEY", "hidden-too")
    arguments = ["--replicas", "2", "vllm.max_num_seqs=8", "--max-model-len", "64"]
    arguments += ["--weights-root", "."]
    # No replica is left: the command has failed.
    assert _run(["serve", "m", *arguments, "--dtype", "bfloat16"], False) == 1
    config = FakeServer.made.config
    assert (config.num_replicas, config.max_model_len) == (2, 64)
    assert (config.dtype, config.vllm.max_num_seqs) == ("bfloat16", 8)
    assert config.api_key is not None
    assert config.api_key.get_secret_value() == "hidden"
    assert config.weights_key is not None
    assert config.weights_key.get_secret_value() == "hidden-too"
    assert config.weights_root == "."
    captured = capsys.readouterr()
    assert captured.out == "m is served at http://127.0.0.1:1/v1\n"
    assert "hidden" not in captured.err + repr(config)


@pytest.mark.usefixtures("fake")
def test_a_key_that_was_made_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RL_API_KEY", raising=False)
    monkeypatch.setattr(FakeServer, "start", lambda self: self.hopeless.set())
    assert _run(["serve", "m", "--host", "0.0.0.0", "--json"], False) == 1
    assert json.loads(capsys.readouterr().out)["api_key"] == "made"


def test_a_server_that_others_reach_makes_a_key(model: str) -> None:
    for host, made in (("0.0.0.0", True), ("127.0.0.1", False), ("::1", False)):
        server = rl_models.serving.Server(model, ServeConfig(host=host, port=0))
        assert server.has_generated_key is made
        assert len(server.api_key or "") == (32 if made else 0)


def test_a_checkpoint_is_served_by_its_weights(model: str, tmp_path: Path) -> None:
    step = tmp_path / "step-3"
    (step / "policy").mkdir(parents=True)
    (step / "policy" / "weights").symlink_to(model)
    server = rl_models.serving.Server(step, ServeConfig(port=0))
    assert server.model_name == "step-3"
    assert server.model == str(Path(model).resolve())


@pytest.mark.usefixtures("fake")
def test_a_run_stands_for_its_weights_and_names_them(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "grpo-007"
    for step in (4, 10):
        (run / "checkpoints" / f"step_{step}" / "policy").mkdir(parents=True)
    weights = run / "checkpoints" / "step_10" / "policy" / "weights"
    weights.symlink_to(model)
    (run / "run.json").write_text('{"kind": "trainer"}')
    monkeypatch.setattr(FakeServer, "start", lambda self: self.hopeless.set())
    assert _run(["serve", str(run)], False) == 1
    assert FakeServer.made.model == str(weights)
    assert FakeServer.made.config.model_name == "grpo-007"
    assert _run(["serve", str(run), "--name", "mine"], False) == 1
    assert FakeServer.made.config.model_name == "mine"
