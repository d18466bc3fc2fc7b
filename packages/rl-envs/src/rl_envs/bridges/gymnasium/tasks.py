"""Tasks of Gymnasium: an environment and a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl_envs.bridges.gymnasium.episodes import Episode, GymSpec, Show
from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, settings_json

__all__ = ["GymnasiumTasks"]

_PROBED = 16


@register_task_source("gymnasium")
class GymnasiumTasks(TaskSource):
    """Draws seeds of one environment of Gymnasium.

    A task has no gold answer: the environment says what each action earns.

    Args:
        env_id: A registered name; `module:Name` imports the module that registers it.
        settings: Arguments of the environment, of JSON values.
        action_names: Names of its discrete actions, in order; empty: those known of
            Gymnasium's own environments, or numbers.
        instruction: First part of the prompt; empty: that the model acts in `env_id`.
        show: `drawing`: what the environment draws as text (render mode `ansi`).
            `values`: its observations, as text or JSON. `auto`: a drawing if it can.
        split_by: What keeps the splits apart. `start`: tasks that start alike share a
            split. `seed`: the seed alone, for environments that always start alike.
            None: `start` if seeds start differently.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: There is no such environment, it has no textual form, or a setting is
            invalid.
        MissingExtraError: The package is not installed.
    """

    def __init__(
        self,
        env_id: str = "FrozenLake-v1",
        *,
        settings: Mapping[str, Any] | None = None,
        action_names: Sequence[str] = (),
        instruction: str = "",
        show: Show = "auto",
        split_by: Literal["start", "seed"] | None = None,
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("gymnasium", seed=seed, held_out_fraction=held_out_fraction)
        check_choice("show", show, "auto", "drawing", "values")
        if split_by not in (None, "start", "seed"):
            raise TaskError(f"split_by must be 'start' or 'seed': got {split_by!r}")
        self.env_id, self.show = env_id, show
        self.instruction = instruction or f"You act in {env_id}."
        self.action_names = tuple(action_names)
        self._settings_json = settings_json("settings", settings)
        self.split_by = split_by or self._found_split()

    def propose(self, rng: random.Random) -> Task:
        """Start an episode with a drawn seed.

        Raises:
            TaskError: The environment cannot be reset.
        """
        spec = self._spec(rng.randrange(2**31))
        episode = Episode(spec)
        try:
            prompt = (
                f"{self.instruction} {episode.reader.instruction} Answer each "
                f"observation with one action, as <move>...</move>.\n{episode.shown}"
            )
            columns = {
                "gym_id": spec.env_id,
                "gym_seed": spec.seed,
                "gym_settings": spec.settings_json,
                "gym_show": spec.show,
                "gym_start": episode.start_digest,
                "action_names": list(spec.action_names),
            }
        finally:
            episode.close()
        return Task(prompt, "", columns)

    def key(self, task: Task) -> str:
        """Return how the episode starts, or its seed."""
        if self.split_by == "start":
            return str(task.metadata["gym_start"])
        return f"{self.env_id}/{task.metadata['gym_seed']}"

    def identity(self, task: Task) -> str:
        """Return what makes a task another one: its start, or its seed."""
        return self.key(task)

    def _spec(self, seed: int) -> GymSpec:
        return GymSpec(
            self.env_id, seed, self._settings_json, self.action_names, self.show
        )

    def _found_split(self) -> Literal["start", "seed"]:
        starts = set()
        for seed in range(_PROBED):
            episode = Episode(self._spec(seed))
            starts.add(episode.start_digest)
            episode.close()
        return "start" if len(starts) > 1 else "seed"
