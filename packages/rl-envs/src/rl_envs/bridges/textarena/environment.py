"""The environment that plays games of TextArena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from rl_envs.bridges.kept_episodes import KeptEpisodes
from rl_envs.bridges.textarena.episodes import Match
from rl_envs.bridges.textarena.games import GameSpec
from rl_envs.bridges.textarena.opponents import ListedMoves, ServedMoves, ServedPlayer
from rl_envs.bridges.textarena.rows import GameRow
from rl_envs.errors import TaskError
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

__all__ = ["TextArenaConfig", "TextArenaEnvironment"]


# Moves of the other player between two of the policy, most of them illegal.
_MOST_MOVES = 100


class TextArenaConfig(GameConfig):
    """Settings of the textarena environment."""

    max_illegal: int | None = Field(None, ge=1)
    """Number of illegal responses at which a conversation ends as `illegal`, without a
    reward. null: as the game itself ends it, most at the second in succession."""
    opponent: Literal["random", "first", "model"] = "random"
    """The other player of two. `random`: a drawn legal move. `first`: the first legal
    one of `opponent_moves`. `model`: the served model of `server`."""
    opponent_moves: tuple[str, ...] = ()
    """Moves among which `random` and `first` choose; empty: those known of the game."""
    server: ServedPlayer | None = None
    """The model of `opponent: model`."""
    credit: Literal["rewards", "solved"] = "rewards"
    """`rewards`: those of the game, at its end. `solved`: 1 for a solved game, else
    0."""
    solved_reward: float = 1.0
    """Reward of the game from which it counts as solved."""
    max_kept: int = Field(256, ge=1)
    """Maximum number of running games kept between turns. Others are played again from
    their start, with equal results."""

    @model_validator(mode="after")
    def _check_server(self) -> TextArenaConfig:
        if (self.opponent == "model") != (self.server is not None):
            raise ValueError(
                "server must be given with opponent=model, and only then: got "
                f"opponent={self.opponent} and server={self.server!r}"
            )
        if self.opponent == "first" and not self.opponent_moves:
            raise ValueError("opponent=first needs opponent_moves, in their order")
        return self


@dataclass(slots=True)
class _Turn:
    """A response that is being answered."""

    spec: GameSpec
    player: int
    state: Mapping[str, Any]
    actions: list[str]
    match: Match
    said: str
    is_legal: bool = True

    @property
    def waits(self) -> bool:
        """Whether the other player is to move."""
        return not self.match.has_ended and self.match.player != self.player


@register_env("textarena")
class TextArenaEnvironment(GameEnvironment):
    """Takes the action of a response in a game of TextArena, then lets the other play.

    Rows come from `TextArenaTasks`. The action is the content of the last `<move>` tag
    or, without one, the last line.

    Args:
        config: The settings.
    """

    config_class = TextArenaConfig

    def __init__(self, config: TextArenaConfig | None = None) -> None:
        self.config = config or TextArenaConfig()
        super().__init__(self.config)
        self._matches = KeptEpisodes(Match, self.config.max_kept)
        self._other: ServedMoves | ListedMoves
        if self.config.server is not None:
            self._other = ServedMoves(self.config.server)
        else:
            self._other = ListedMoves(
                self.config.opponent_moves, drawn=self.config.opponent == "random"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TextArenaEnvironment, (self.config,)

    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return a game with the moves that the row starts with.

        Raises:
            MessageLogError: A column is missing, or the game starts otherwise here.
        """
        read = GameRow.read(columns, row)
        try:
            match = self._matches.take(read.spec, ())
        except (TaskError, ValueError) as error:
            raise read.error(str(error)) from error
        read.begin(match)
        self._matches.keep(read.spec, read.opening, match)
        return {"actions": list(read.opening)}

    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Take the action of a response."""
        return self.play_all([(columns, state, response)])[0]

    def play_all(
        self, turns: Sequence[tuple[Columns, Mapping[str, Any], str]]
    ) -> list[GameTurn]:
        """Take the actions of responses; other players move at the same time."""
        begun = [self._begin(*turn) for turn in turns]
        for _ in range(_MOST_MOVES):
            waiting = [turn for turn in begun if turn.waits]
            if not waiting:
                break
            for turn, move in zip(waiting, self._moves(waiting), strict=True):
                _act(turn, move)
        else:
            raise TaskError(
                f"the other player in {waiting[0].spec.game!r} must let the policy "
                f"move: it is still to move after {_MOST_MOVES} moves, the last "
                f"{waiting[0].actions[-1]!r:.80}"
            )
        return [self._end(turn) for turn in begun]

    def close(self, metadata: Sequence[Columns]) -> None:
        """Release the matches of conversations that a limit of the rollout ended."""
        for columns in metadata:
            state = columns.get(GAME_KEY)
            if isinstance(state, Mapping) and OUTCOME_KEY not in columns:
                spec = GameRow.read(columns, 0).spec
                self._matches.drop(spec, state["actions"])

    def shutdown(self) -> None:
        """Release the kept games and the client."""
        self._matches.close()
        self._other.close()

    def _moves(self, waiting: Sequence[_Turn]) -> list[str]:
        if isinstance(self._other, ServedMoves):
            return self._other.moves([turn.match for turn in waiting])
        return [
            self._other.move(
                turn.match, turn.spec.game, f"{turn.spec.seed}/{turn.actions}"
            )
            for turn in waiting
        ]

    def _begin(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> _Turn:
        read = GameRow.read(columns, 0)
        actions: list[str] = list(state["actions"])
        match = self._matches.take(read.spec, actions)
        said = said_action(response)
        turn = _Turn(read.spec, read.player, state, actions, match, said)
        turn.is_legal = _act(turn, turn.said)
        return turn

    def _end(self, turn: _Turn) -> GameTurn:
        match, player = turn.match, turn.player
        shown, reward, outcome = match.shown(player), 0.0, None
        if match.has_ended:
            reward = match.reward(player)
            outcome = self._outcome(match, player, reward)
            shown = "\n".join(part for part in (shown, match.reason) if part)
            if self.config.credit == "solved":
                reward = float(outcome is ConversationOutcome.SOLVED)
        else:
            self._matches.keep(turn.spec, turn.actions, match)
        state = {**turn.state, "actions": turn.actions}
        return GameTurn(state, shown, reward, outcome, turn.is_legal, turn.said)

    def _outcome(self, match: Match, player: int, reward: float) -> ConversationOutcome:
        if match.broke_rules(player):
            return ConversationOutcome.ILLEGAL
        if reward >= self.config.solved_reward:
            return ConversationOutcome.SOLVED
        return ConversationOutcome.LOST


def _act(turn: _Turn, text: str) -> bool:
    """Take and record an action; return whether it was legal."""
    turn.match, text, is_legal = turn.match.advanced(turn.actions, text)
    turn.actions.append(text)
    return is_legal
