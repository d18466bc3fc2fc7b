"""The driver imports no model code: workers do, in parallel."""

from __future__ import annotations

import subprocess
import sys

import pytest
from matrix_cells import cells

from rl_algorithms import algorithm_names

# What model classes need: a third of all imports at start-up.
MODEL_CODE = (
    "transformers.modeling_utils",
    "transformers.models.auto.auto_factory",
    "torch._dynamo",
    "torch.distributed.tensor",
)
PROGRAM = f"""
import sys
import rl_models
from rl_algorithms import get_algorithm
from rl_models.tokens.tokenizer import load_tokenizer

get_algorithm(sys.argv[1])
rl_models.TrainingPolicy, rl_models.GenerationPolicy, rl_models.WeightSynchronizer
load_tokenizer(sys.argv[2])
print([name for name in {MODEL_CODE!r} if name in sys.modules])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Built elsewhere: this process must not import model code itself.
    folder = tmp_path_factory.mktemp("model") / "model"
    program = (
        "import sys; from rl_models import ModelBuildConfig, build_model\n"
        "build_model(ModelBuildConfig(hidden_size=16), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    return str(folder)


@pytest.mark.parametrize("algorithm", cells(algorithm_names(), ["grpo", "sft"]))
def test_a_driver_imports_no_code_of_models(model, algorithm):
    command = [sys.executable, "-c", PROGRAM, algorithm, model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
