"""Tasks of a server of OpenEnv: options of a reset, with a seed."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from typing import Any, Literal

from rl_envs.bridges.openenv.config import OpenEnvServer
from rl_envs.bridges.openenv.environment import RESET, START
from rl_envs.bridges.openenv.episodes import Episode, ResetSpec, Server
from rl_envs.bridges.openenv.wire import (
    ActionRefusedError,
    NoReplyError,
    SessionLostError,
    StepFailedError,
)
from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource

__all__ = ["OpenEnvTasks"]

_PROBED = 8
_INSTRUCTION = "Answer each observation with one action, as <move>...</move>."


@register_task_source("openenv")
class OpenEnvTasks(TaskSource):
    """Draws seeds of the environment of a server.

    A task has no gold answer: the environment says what each action earns.

    Args:
        reset: Further options of the reset, of JSON values.
        instruction: First part of the prompt, before the first observation.
        split_by: What keeps the splits apart. `start`: tasks that start alike share a
            split. `seed`: the seed alone, for environments that always start alike.
            None: `start` if seeds start differently.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.
        **server: Fields of `OpenEnvServer`: `address` or `command`, and others.

    Raises:
        TaskError: An episode cannot be started, or a setting is invalid.
        ConfigError: A setting of the server is invalid.
        EnvironmentServerError: The server is out of reach, or none of OpenEnv.
        MissingExtraError: The package is not installed.
    """

    def __init__(
        self,
        *,
        reset: Mapping[str, Any] | None = None,
        instruction: str = _INSTRUCTION,
        split_by: Literal["start", "seed"] | None = None,
        seed: int = 0,
        held_out_fraction: float = 0.1,
        **server: Any,
    ) -> None:
        super().__init__("openenv", seed=seed, held_out_fraction=held_out_fraction)
        if split_by not in (None, "start", "seed"):
            raise TaskError(f"split_by must be 'start' or 'seed': got {split_by!r}")
        try:
            self.options = dict(reset or {})
            json.dumps(self.options)
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"reset must be a mapping of JSON values: got {reset!r:.160}"
            ) from error
        if "seed" in self.options:
            raise TaskError(
                "reset must not hold 'seed', as each task has its own: got "
                f"{self.options['seed']!r}; set the seed of the tasks"
            )
        self.instruction = instruction
        self._server = Server(
            OpenEnvServer.from_dict(server, source="settings of the tasks of 'openenv'")
        )
        self.split_by = split_by or self._found_split()
        self._arguments = {
            "reset": reset,
            "instruction": instruction,
            "split_by": self.split_by,
            "seed": seed,
            "held_out_fraction": held_out_fraction,
            **server,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # A started server cannot be pickled; a copy starts its own.
        return functools.partial(OpenEnvTasks, **self._arguments), ()

    def propose(self, rng: random.Random) -> Task:
        """Start an episode with a drawn seed.

        Raises:
            TaskError: The episode cannot be started.
        """
        seed = rng.randrange(2**31)
        shown, digest = self._started(seed)
        parts = [part for part in (self.instruction, shown) if part]
        options = json.dumps({**self.options, "seed": seed}, sort_keys=True)
        return Task("\n".join(parts), "", {RESET: options, START: digest})

    def key(self, task: Task) -> str:
        """Return how the episode starts, or its options."""
        return str(task.metadata[START if self.split_by == "start" else RESET])

    def identity(self, task: Task) -> str:
        """Return what makes a task another one: its start, or its options."""
        return self.key(task)

    def _started(self, seed: int) -> tuple[str, str]:
        """Return what an episode shows first, and the digest of it."""
        spec = ResetSpec.of({**self.options, "seed": seed})
        try:
            episode = Episode(self._server, spec)
        except (
            ActionRefusedError,
            NoReplyError,
            SessionLostError,
            StepFailedError,
        ) as error:
            raise TaskError(
                f"an episode with the options {spec.options_json} cannot be started: "
                f"{error}"
            ) from error
        episode.close()
        return episode.shown, episode.digest

    def _found_split(self) -> Literal["start", "seed"]:
        starts = {self._started(seed)[1] for seed in range(_PROBED)}
        return "start" if len(starts) > 1 else "seed"
