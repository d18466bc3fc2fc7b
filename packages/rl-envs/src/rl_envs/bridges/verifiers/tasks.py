"""Tasks of verifiers: the rows of an environment's data set."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Literal

from rl_envs.bridges.verifiers.config import VerifiersHost
from rl_envs.bridges.verifiers.environment import INPUT
from rl_envs.bridges.verifiers.host_process import HostProcess
from rl_envs.errors import AgentError, AgentSetupError, TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource

__all__ = ["VerifiersTasks"]


@register_task_source("verifiers")
class VerifiersTasks(TaskSource):
    """Draws rows of an environment's data set.

    Rows with equal prompts share a split. A gold answer is in the column `answer` where
    the row has one.

    Args:
        dataset: `train` or `eval`: which of the environment's data sets.
        seed: Seed of the samples.
        held_out_fraction: Share of all prompts that are held out.
        **host: Fields of `VerifiersHost`: `env`, `args`, `python` and others.

    Raises:
        TaskError: A setting is invalid, or the data set is empty.
        AgentSetupError: The environment cannot be loaded.
        ConfigError: A setting of the host is invalid.
    """

    def __init__(
        self,
        *,
        dataset: Literal["train", "eval"] = "train",
        seed: int = 0,
        held_out_fraction: float = 0.1,
        **host: Any,
    ) -> None:
        super().__init__("verifiers", seed=seed, held_out_fraction=held_out_fraction)
        if dataset not in ("train", "eval"):
            raise TaskError(f"dataset must be 'train' or 'eval': got {dataset!r}")
        settings = VerifiersHost.from_dict(
            host, source="settings of the tasks of 'verifiers'"
        )
        self._tasks = [_task_of(row) for row in _read_rows(settings, dataset)]
        if not self._tasks:
            raise TaskError(
                f"the {dataset} data set of the environment {settings.env!r} of "
                "verifiers must have rows: it has none"
            )

    def propose(self, rng: random.Random) -> Task:
        """Draw a row."""
        return rng.choice(self._tasks)

    def identity(self, task: Task) -> str:
        """Return the row."""
        return str(task.metadata[INPUT])


def _read_rows(settings: VerifiersHost, dataset: str) -> list[dict[str, Any]]:
    host = HostProcess(settings)
    try:
        _, future = host.submit({"do": "rows", "dataset": dataset})
        rows: list[dict[str, Any]] = future.result(settings.start_s)
    except TimeoutError:
        raise TaskError(
            f"the rows of {settings.env!r} were not read within {settings.start_s:g} s "
            "(start_s)"
        ) from None
    except AgentSetupError:
        raise
    except AgentError as error:
        raise TaskError(
            f"the rows of {settings.env!r} cannot be read: {error}"
        ) from error
    finally:
        host.close()
    return rows


def _task_of(row: Mapping[str, Any]) -> Task:
    text = json.dumps(row, sort_keys=True)
    return Task(_prompt_text(row), str(row.get("answer") or ""), {INPUT: text})


def _prompt_text(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt or ())
