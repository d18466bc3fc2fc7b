from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import pickle, sys
from rl_envs.registry import EnvironmentSpec
from rl_envs.environment_host import EnvironmentHost

host = EnvironmentHost("environment")
print("torch" in sys.modules)
outcome = host.load(pickle.dumps(EnvironmentSpec.of("sorting")))
print(outcome.error, "torch" in sys.modules)
"""


def test_torch_is_there_before_the_first_step():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["False", "None True"]
