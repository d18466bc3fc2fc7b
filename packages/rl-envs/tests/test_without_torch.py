"""rl-envs where torch is not installed, and where it is but unused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_envs import (
    EnvironmentContractError,
    EnvironmentInterface,
    EnvironmentReturn,
    ToolEnvironment,
    check_environment,
    scored_mask,
    total_reward,
)
from rl_envs.interfaces import as_columns
from rl_envs.joined_returns import join_returns

SCRIPT = Path(__file__).parent / "scripts" / "numpy_or_torch.py"
NO_TORCH = Path(__file__).parents[2] / "rl-distributed/tests/scripts/no_torch"
DEADLINE_S = 240.0


def run(*arguments: str | Path, **variables: str) -> Any:
    # Variables of the surrounding session must not reach the script's own cluster.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RL_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=kept | variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_everything_works_without_torch() -> None:
    assert (NO_TORCH / "sitecustomize.py").exists()
    assert run(SCRIPT, PYTHONPATH=str(NO_TORCH)) == {"torch": False}


def test_importing_every_module_does_not_import_torch() -> None:
    code = (
        "import json, pkgutil, sys, rl_envs\n"
        "for found in pkgutil.walk_packages(rl_envs.__path__, 'rl_envs.'):\n"
        "    __import__(found.name)\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    assert run("-c", code) is False


class Given(EnvironmentInterface[Any]):
    """Returns rewards and ends in the requested form."""

    def __init__(self, rewards: Any, terminateds: Any) -> None:
        self.rewards, self.terminateds = rewards, terminateds

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=self.rewards([0.5] * size),
            terminateds=self.terminateds([True] * size),
            answers=None,
        )


def shout(text: str) -> str:
    """Write in capitals.

    Args:
        text: What to write.
    """
    return text.upper()


def flags(values: list[bool]) -> Any:
    return np.array(values, dtype=bool)


FORMS: dict[str, tuple[Any, Any]] = {
    "lists": (list, list),
    "arrays": (np.array, flags),
    "named lists": (lambda rewards: {"reward/a": rewards}, list),
    "mixed": (list, lambda values: torch.tensor(values, dtype=torch.bool)),
}


@pytest.mark.parametrize("form", FORMS)
def test_rewards_may_be_lists_arrays_or_tensors(form: str) -> None:
    environment = Given(*FORMS[form])
    check_environment(environment)
    log = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    joined = join_returns([environment.step([log] * n, [{}] * n) for n in (1, 2)])
    assert torch.equal(total_reward(joined.rewards), torch.full((3,), 0.5))
    assert torch.equal(joined.terminateds, torch.ones(3, dtype=torch.bool))
    tools = ToolEnvironment([shout], environment)
    assert total_reward(tools.step([log], [{}]).rewards).tolist() == [0.5]


def test_of_lists_and_arrays_tensors_are_made() -> None:
    assert torch.equal(scored_mask([1.0, float("nan")]), torch.tensor([True, False]))
    result = Given(np.array, flags).step([[], []], [None, None])
    columns = as_columns(result)
    assert columns.rewards.dtype == torch.float32
    assert columns.terminateds.dtype == torch.bool
    assert as_columns(columns).rewards is columns.rewards


@pytest.mark.parametrize("wrong", [None, 0.5, ["good"], [[1.0], [1.0, 2.0]]])
def test_what_is_no_number_per_row_is_named(wrong: Any) -> None:
    with pytest.raises(EnvironmentContractError, match=r"^rewards must be a tensor, a"):
        total_reward(wrong)


def test_a_program_may_leave_torch_out_and_still_use_it() -> None:
    program = (
        "import sys\n"
        "from rl_distributed.extras import installed_torch, leave_torch_out, torch\n"
        "leave_torch_out()\n"
        "from rl_distributed.batch.arrays import full\n"
        "found = [type(full(2, True, 'bool')).__name__, installed_torch() is None]\n"
        "found += ['torch' in sys.modules, torch.zeros(2).shape[0]]\n"
        "print(*found, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.split() == ["ndarray", "True", "False", "2", "True"]
