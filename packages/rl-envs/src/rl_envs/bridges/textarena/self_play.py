"""Self-play: the policy plays both sides of a game of TextArena, and learns from both.

```
row -> match --player to move--> its conversation -> policy -> action -+
         ^                                                             |
         +-------------------- until the game has ended ---------------+
```
Each player has a conversation of its own, with what it alone is told, and is rewarded
by what it alone earns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from rl_envs.agents.config import AgentConfig
from rl_envs.agents.environment import AgentEnvironment
from rl_envs.agents.functions import RunAgent, build_agent, conversation
from rl_envs.agents.tasks import AgentReward, AgentTask
from rl_envs.bridges.textarena.episodes import Match
from rl_envs.bridges.textarena.rows import GameRow, first_message
from rl_envs.errors import MessageLogError, TaskError
from rl_envs.registry import register_env
from rl_envs.worlds.game import said_action

__all__ = ["OTHER_PLAYER", "SelfPlayConfig", "TextArenaSelfPlay"]

OTHER_PLAYER = "other_player"
"""Name of the conversation of the player that the row is not for."""


class SelfPlayConfig(AgentConfig):
    """Settings of the textarena_self_play environment."""

    max_turns: int = Field(50, ge=1)
    """Number of responses of one player, legal or not, after which a game ends without
    a reward for either."""
    max_illegal: int | None = Field(None, ge=1)
    """Number of illegal responses of one player at which a game ends, likewise. null:
    as the game itself ends it, most at the second in succession."""
    credit: Literal["rewards", "solved"] = "rewards"
    """`rewards`: each player earns that of the game, at its end. `solved`: 1 for a game
    that it has solved, else 0."""
    solved_reward: float = 1.0
    """Reward of the game from which it counts as solved by a player."""

    @model_validator(mode="after")
    def _check_calls(self) -> SelfPlayConfig:
        if self.max_calls < 2 * self.max_turns:
            raise ValueError(
                "max_calls must be at least twice max_turns, as both players ask the "
                f"policy: got max_calls={self.max_calls} and max_turns="
                f"{self.max_turns}; raise max_calls or lower max_turns"
            )
        return self


@register_env("textarena_self_play")
class TextArenaSelfPlay(AgentEnvironment):
    """Lets the policy play both players of a game, each trained on with its own reward.

    Rows come from `TextArenaTasks`, with a game for two. The player that the row is
    for has the reward of the task; that of the other one is the reward of the
    conversation `OTHER_PLAYER`, compared with the other players of other games from
    the same start.

    Args:
        config: The settings.
    """

    config_class = SelfPlayConfig

    def __init__(self, config: SelfPlayConfig | None = None) -> None:
        self._settings = config or SelfPlayConfig()
        self._begin(self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextArenaSelfPlay, (self._settings,)

    def _run_agent(self) -> RunAgent:
        settings = self._settings

        async def agent(task: AgentTask, client: Any) -> AgentReward:
            # In a thread: the first game imports the package.
            row, match = await asyncio.to_thread(_begin_match, task.columns)
            return await _Game(row, match, task, client, settings).play()

        return build_agent(agent)

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Return the rows with which no game for two can start."""
        found: dict[int, str] = {}
        for index, columns in enumerate(metadata):
            try:
                _begin_match(columns if isinstance(columns, Mapping) else {}, index)
            except MessageLogError as error:
                found[index] = str(error)
        return found


def _begin_match(columns: Mapping[str, Any], index: int = 0) -> tuple[GameRow, Match]:
    """Return a row and its match, in which the row's player is to move.

    Raises:
        MessageLogError: A column is missing, or the game cannot start.
    """
    row = GameRow.read(columns, index)
    try:
        match = Match(row.spec)
    except (TaskError, ValueError) as error:
        raise row.error(str(error)) from error
    if match.num_players != 2:
        raise row.error(
            f"self-play needs a game for two: {row.spec.game!r} is for "
            f"{match.num_players}; use the environment 'textarena'"
        )
    row.begin(match)
    return row, match


@dataclass(slots=True)
class _Side:
    """What one player has been told and has said."""

    client: Any
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_illegal: int = 0
    num_turns: int = 0


class _Game:
    """One game of the policy against itself."""

    def __init__(
        self,
        row: GameRow,
        match: Match,
        task: AgentTask,
        client: Any,
        settings: SelfPlayConfig,
    ) -> None:
        self._match, self._player, self._settings = match, row.player, settings
        self._actions, self._model = list(row.opening), task.model
        # A system prompt is for both.
        rules = [one for one in task.messages if one["role"] == "system"]
        mine = _Side(client, list(task.messages))
        other = _Side(conversation(client, OTHER_PLAYER), rules)
        self._sides = {row.player: mine, 1 - row.player: other}

    async def play(self) -> AgentReward:
        """Play to the end of the game, or to a limit."""
        settings = self._settings
        while not self._match.has_ended:
            side = self._sides[self._match.player]
            if side.num_turns >= settings.max_turns:
                return self._ended("out_of_turns")
            await self._move(self._match.player, side)
            # Equality, since `max_illegal` may be None; the count rises by one at most.
            if not self._match.has_ended and side.num_illegal == settings.max_illegal:
                return self._ended("illegal")
        return self._ended(None)

    async def _move(self, player: int, side: _Side) -> None:
        if side.num_turns:
            side.messages.append({"role": "user", "content": self._match.shown(player)})
        elif player != self._player:
            told = first_message(self._match)
            side.messages.append({"role": "user", "content": told})
        answer = await side.client.chat.completions.create(
            model=self._model, messages=side.messages
        )
        text = answer.choices[0].message.content or ""
        side.messages.append({"role": "assistant", "content": text})
        side.num_turns += 1
        self._match, action, is_legal = self._match.advanced(
            self._actions, said_action(text)
        )
        self._actions.append(action)
        side.num_illegal += not is_legal

    def _ended(self, limit: str | None) -> AgentReward:
        earned = dict.fromkeys(self._sides, 0.0)
        if limit is None:
            earned = {player: self._match.reward(player) for player in self._sides}
        broke = any(self._match.broke_rules(player) for player in self._sides)
        solved = {p: r >= self._settings.solved_reward for p, r in earned.items()}
        if self._settings.credit == "solved":
            earned = {player: float(is_solved) for player, is_solved in solved.items()}
        sides = self._sides.values()
        parts = {
            "player_0": earned[0],
            "player_1": earned[1],
            "solved": float(solved[self._player]),
            "illegal_end": float(broke or limit == "illegal"),
            "out_of_turns": float(limit == "out_of_turns"),
            "turns": float(sum(side.num_turns for side in sides)),
            "illegal": float(sum(side.num_illegal for side in sides)),
        }
        # One that has not moved has nothing to be rewarded for.
        others = {OTHER_PLAYER: earned[1 - self._player]}
        moved = self._sides[1 - self._player].num_turns > 0
        return AgentReward(earned[self._player], parts, others if moved else {})
