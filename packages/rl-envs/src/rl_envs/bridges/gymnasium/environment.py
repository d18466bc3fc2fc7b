"""The environment that plays episodes of Gymnasium."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rl_envs.bridges.gymnasium.episodes import Episode, GymSpec
from rl_envs.bridges.kept_episodes import KeptEpisodes
from rl_envs.errors import MessageLogError, TaskError
from rl_envs.outcomes import OUTCOME_KEY, ConversationOutcome
from rl_envs.registry import register_env
from rl_envs.worlds.game import (
    GAME_KEY,
    Columns,
    GameConfig,
    GameEnvironment,
    GameTurn,
    said_action,
)

__all__ = ["GymnasiumConfig", "GymnasiumEnvironment"]


class GymnasiumConfig(GameConfig):
    """Settings of the gymnasium environment."""

    credit: Literal["steps", "solved"] = "steps"
    """`steps`: the rewards of the environment, as it gives them. `solved`: 1 with the
    action that ends a solved episode, else 0."""
    solved_return: float | None = None
    """Sum of rewards from which an episode that has ended is solved; null: above 0."""
    max_kept: int = Field(256, ge=1)
    """Maximum number of running episodes kept between turns. Others are played again
    from their start, with equal results."""


@register_env("gymnasium")
class GymnasiumEnvironment(GameEnvironment):
    """Takes the action of a response in an environment of Gymnasium.

    Rows come from `GymnasiumTasks`. The action is the content of the last `<move>` tag
    or, without one, the last line. One that cannot be read, or that the environment's
    action mask excludes, is illegal and changes nothing.

    Args:
        config: The settings.
    """

    config_class = GymnasiumConfig

    def __init__(self, config: GymnasiumConfig | None = None) -> None:
        self.config = config or GymnasiumConfig()
        super().__init__(self.config)
        self._episodes = KeptEpisodes(Episode, self.config.max_kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return GymnasiumEnvironment, (self.config,)

    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return an episode without actions.

        Raises:
            MessageLogError: A column is missing, or the episode starts otherwise here.
        """
        spec = _spec_of(columns, row)
        try:
            episode = self._episodes.take(spec, ())
        except TaskError as error:
            raise MessageLogError(f"metadata[{row}]: {error}") from error
        if episode.start_digest != columns["gym_start"]:
            episode.close()
            raise MessageLogError(
                f"metadata[{row}]: the installed {spec.env_id!r} starts otherwise with "
                f"the seed {spec.seed}; make the rows again"
            )
        # Its first turn follows, and need not make the environment again.
        self._episodes.keep(spec, (), episode)
        return {"actions": []}

    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Take the action of a response."""
        spec = _spec_of(columns, 0)
        actions: list[str] = list(state["actions"])
        episode = self._episodes.take(spec, actions)
        try:
            action, name = episode.reader.read(said_action(response))
            if episode.is_masked(action):
                raise ValueError(f"{name} is not possible now.")
        except ValueError as error:
            # Nothing was stepped, so the episode is still the one after these actions.
            self._episodes.keep(spec, actions, episode)
            told = f"{error} {episode.reader.instruction}\n{episode.shown}"
            return GameTurn(state, told, is_legal=False)
        reward = episode.take(action)
        actions.append(name)
        shown = episode.shown
        outcome = self._outcome(episode)
        if outcome is None:
            self._episodes.keep(spec, actions, episode)
        else:
            episode.close()
        if self.config.credit == "solved":
            reward = float(outcome is ConversationOutcome.SOLVED)
        return GameTurn(
            {**state, "actions": actions}, shown, reward, outcome, True, name
        )

    def close(self, metadata: Sequence[Columns]) -> None:
        """Release the episodes of conversations that a limit of the rollout ended."""
        for columns in metadata:
            state = columns.get(GAME_KEY)
            if isinstance(state, Mapping) and OUTCOME_KEY not in columns:
                self._episodes.drop(_spec_of(columns, 0), state["actions"])

    def shutdown(self) -> None:
        """Release the kept episodes."""
        self._episodes.close()

    def _outcome(self, episode: Episode) -> ConversationOutcome | None:
        if not (episode.has_ended or episode.was_cut):
            return None
        least = self.config.solved_return
        # Checked before a loss: environments end an episode on success as well.
        if episode.total > 0 if least is None else episode.total >= least:
            return ConversationOutcome.SOLVED
        if episode.has_ended:
            return ConversationOutcome.LOST
        return ConversationOutcome.OUT_OF_TURNS


def _spec_of(columns: Columns, row: int) -> GymSpec:
    name, seed = columns.get("gym_id"), columns.get("gym_seed")
    settings, names = columns.get("gym_settings"), columns.get("action_names", ())
    show = columns.get("gym_show", "auto")
    if (
        isinstance(name, str)
        and type(seed) is int
        and _is_object(settings)
        and isinstance(names, list | tuple)
        and all(isinstance(each, str) for each in names)
        and show in ("auto", "drawing", "values")
        and isinstance(columns.get("gym_start"), str)
    ):
        return GymSpec(name, seed, str(settings), tuple(names), show)
    found = {key: columns.get(key) for key in ("gym_id", "gym_seed", "gym_settings")}
    raise MessageLogError(
        f"metadata[{row}] must have the columns gym_id, gym_seed, gym_settings, "
        f"gym_show, gym_start and action_names, as GymnasiumTasks writes them: got "
        f"{found!r:.160}"
    )


def _is_object(text: Any) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False
