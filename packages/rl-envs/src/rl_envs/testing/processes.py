"""Scoring with a copy of an environment in another process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_distributed.batch.arrays import to_numpy
from rl_distributed.extras import leave_torch_out
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import EnvironmentInterface, MessageLog, total_reward
from rl_envs.python_file import load_module, loaded_files

__all__ = ["judge_copy", "rewards_in_another_process", "says_it_pickles"]

_PROGRAM = """
import sys
from rl_envs.testing.processes import judge_copy
judge_copy(sys.argv[1], sys.argv[2])
"""
_SHOWN_CHARACTERS = 400


def says_it_pickles(env: EnvironmentInterface[Any]) -> bool:
    """Return True if a class of `env` below the interface defines how to pickle it."""
    ours = type(env).__mro__[: type(env).__mro__.index(EnvironmentInterface)]
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(name in vars(cls) for cls in ours for name in names)


def rewards_in_another_process(
    pickled: bytes,
    logs: Sequence[MessageLog],
    metadata: Sequence[Any],
    deadline_s: float,
) -> list[float]:
    """Unpickle an environment in a new Python process and score conversations there.

    Args:
        pickled: The environment.
        logs: Conversations.
        metadata: One entry per conversation.
        deadline_s: Time limit of the process, from start to end, in seconds.

    Raises:
        EnvironmentContractError: It cannot be unpickled there, or fails to score.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "asked.pickle", Path(folder) / "told.pickle"
        has_torch = "torch" in sys.modules
        request = (loaded_files(), has_torch, pickled, list(logs), list(metadata))
        asked.write_bytes(pickle.dumps(request))
        # The new process must find the same modules, including those of test folders.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, str(asked), str(told)],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentContractError(
                f"it does not score within {deadline_s:g} s in another process"
            ) from None
        if done.returncode or not told.exists():
            last = done.stderr.strip()[-_SHOWN_CHARACTERS:]
            raise EnvironmentContractError(
                f"it does not score in another process: exit code {done.returncode}: "
                f"{last.splitlines()[-1] if last else 'no message'}"
            )
        rewards: list[float] = pickle.loads(told.read_bytes())
    return rewards


def judge_copy(asked: str, told: str) -> None:
    """Score a request and write the rewards; runs in the other process.

    Args:
        asked: File with the request.
        told: File for the rewards.
    """
    request = pickle.loads(Path(asked).read_bytes())
    files, has_torch, pickled, logs, metadata = request
    # Where the caller has not needed torch, its import would take most of the time.
    if not has_torch:
        leave_torch_out()
    for name, file in files.items():
        load_module(name, file, kind="Python")
    env = pickle.loads(pickled)
    try:
        rewards = to_numpy(total_reward(env.step(logs, metadata).rewards))
    finally:
        env.shutdown()
    Path(told).write_bytes(pickle.dumps([float(reward) for reward in rewards]))
