"""The generation backend `openai` with vLLM's own server, in vLLM's environment."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from rl_distributed.cluster.ports import PortAllocator
from rl_models.environments import VLLM
from rl_models.generation.config import GenerationConfig
from rl_models.generation.openai import OpenAIGenerationBackend
from rl_models.generation.vllm.engine_args import engine_variables
from rl_models.testing import build_tiny_model, check_generation_backend

pytestmark = pytest.mark.slow

START_S = 240.0
ARGUMENTS = (
    "--served-model-name tiny --host 127.0.0.1 --dtype float32 --enforce-eager "
    "--logprobs-mode processed_logprobs --generation-config vllm "
    "--kv-cache-memory-bytes 50000000 --no-enable-chunked-prefill"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's CPU attention needs heads of 32.
    return build_tiny_model(
        tmp_path_factory.mktemp("served") / "model",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    prepared = VLLM.resolve().prepare().runtime_env
    (python,) = shlex.split(prepared["py_executable"])
    (port,) = PortAllocator().allocate("vLLM's server")
    config = GenerationConfig(max_new_tokens=8, backend="vllm")
    log = folder.parent / "log"
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--port", str(port), *ARGUMENTS.split()]
    variables = {
        **os.environ,
        **prepared["env_vars"],
        **engine_variables(config, on_gpu=False),
        "VLLM_SERVER_DEV_MODE": "1",  # routes that change weights
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process, log)
        yield url
    finally:
        _end(process)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            with urlopen(f"{url}/v1/models", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"vLLM's server did not come up: {log.read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    process.terminate()
    _, alive = psutil.wait_procs(family, 30)
    for one in alive:
        one.kill()
    psutil.wait_procs(alive, 30)
    process.wait(30)


@pytest.mark.matrix
def test_it_keeps_the_contract_with_the_server_of_vllm(
    address: str, folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "backend": "openai",
        "max_new_tokens": 8,
        "num_replicas": 1,
        "openai": {
            "addresses": [address],
            "server": "vllm",
            "weights_folder": str(tmp_path),
        },
    }

    def make() -> OpenAIGenerationBackend:
        backend = OpenAIGenerationBackend()
        config = GenerationConfig.from_dict(settings).to_dict()
        backend.setup(config, model_name=str(folder))
        return backend

    # Sampled log-probs are the model's, and those of weights loaded meanwhile: zeros
    # first, then different ones.
    check_generation_backend(make, folder)
