"""Worker classes import where Ray is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT_RAY = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "rl_models.training.worker",
        "rl_models.training.dtensor.backend",
        "rl_models.training.megatron.backend",
        "rl_models.generation.worker",
        "rl_models.generation.huggingface.backend",
        "rl_models.generation.vllm.backend",
        "rl_models.testing",
    ],
)
def test_a_worker_imports_without_ray(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_RAY, module],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
