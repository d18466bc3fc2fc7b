"""A running game, as a function of its seed and the actions of all players so far."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

from rl_envs.bridges.textarena.games import GameSpec, Luck, build_game
from rl_envs.errors import TaskError

__all__ = ["Match"]


class Match:
    """A running game.

    Args:
        spec: What it is made of.

    Raises:
        TaskError: It cannot be played here, or not by one or two players.
        MissingExtraError: The package is not installed.
    """

    def __init__(self, spec: GameSpec) -> None:
        self.spec = spec
        self._luck = Luck(spec.seed)
        with self._luck.drawn():
            # The first import draws from the generators, too.
            build_game(spec)
        self._luck = Luck(spec.seed)
        with self._luck.drawn():
            self._game = build_game(spec)
            self.num_players = _reset(self._game, spec)
        self._base = self._game
        while hasattr(self._base, "is_wrapped_with"):
            self._base = self._base.env
        self._said: list[list[str]] = [[] for _ in range(self.num_players)]
        self._mark = [0] * self.num_players
        self._collect()

    @property
    def player(self) -> int:
        """The player whose turn it is."""
        return int(self._base.state.current_player_id)

    @property
    def has_ended(self) -> bool:
        """Whether the game is over."""
        return bool(self._base.state.done)

    @property
    def reason(self) -> str:
        """Why it is over, in words of the game."""
        return str(self._info(0).get("reason") or "")

    def shown(self, player: int) -> str:
        """Return what a player has been told since its last action."""
        return "\n".join(self._said[player][self._mark[player] :]).strip("\n")

    def told(self, player: int) -> str:
        """Return all that a player has been told, with its own actions."""
        return "\n".join(self._said[player]).strip("\n")

    @property
    def start_digest(self) -> str:
        """Digest of what the players are told first, which a version may change."""
        told = "\0".join(self.told(player) for player in range(self.num_players))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def take(self, text: str) -> bool:
        """Take an action of the player whose turn it is.

        Returns:
            Whether it was legal. An illegal one may count against the player.

        Raises:
            ValueError: The game fails on it; it must not be used any more.
        """
        player, turn = self.player, self._base.state.turn
        self._mark[player] = len(self._said[player])
        with self._luck.drawn():
            try:
                self._game.step(text)
            except Exception as error:
                # A game may raise anything on text that it does not expect.
                raise ValueError(f"{type(error).__name__}: {error}") from error
        self._collect(player)
        return self._base.state.turn > turn and not self.broke_rules(player)

    def advanced(self, actions: Sequence[str], text: str) -> tuple[Match, str, bool]:
        """Take an action, also one that the game fails on.

        Args:
            actions: All actions so far.
            text: The action.

        Returns:
            The match to go on with, the action that was taken, and whether it was
            legal. An empty action, which games refuse, stands for one that the game
            fails on.
        """
        try:
            return self, text, self.take(text)
        except ValueError:
            # This match may be half changed.
            again = Match(self.spec)
            for action in actions:
                again.repeat(action)
            return again, "", again.take("")

    def repeat(self, action: str) -> None:
        """Take an action that was taken before."""
        self.take(action)

    def broke_rules(self, player: int) -> bool:
        """Return whether the game ended for a player by illegal actions."""
        return bool(self._info(player).get("invalid_move"))

    def reward(self, player: int) -> float:
        """Return the reward of a player at the end; 0 if the game gives none."""
        return float((self._base.state.rewards or {}).get(player, 0.0))

    def is_legal(self, text: str) -> bool:
        """Return whether an action would be legal now, which changes nothing."""
        trial = copy.deepcopy(self)
        try:
            return trial.take(text)
        except ValueError:
            return False

    def close(self) -> None:
        """Release it; a game holds nothing but memory."""

    def _info(self, player: int) -> dict[str, Any]:
        info: dict[str, Any] = self._base.state.game_info.get(player) or {}
        return info

    def _collect(self, actor: int | None = None) -> None:
        """Take over the messages of the game, except an actor's own action."""
        state = self._base.state
        for player, said in enumerate(self._said):
            for sender, message, kind in state.observations[player]:
                text = str(message)
                is_action = getattr(kind, "name", "") == "PLAYER_ACTION"
                if is_action and sender == player == actor:
                    # The conversation has it; what is new begins after it.
                    said.append(f"[{state.role_mapping.get(sender, sender)}] {text}")
                    self._mark[player] = len(said)
                    continue
                name = state.role_mapping.get(sender, f"Player {sender}")
                said.append(f"[{name}] {text}" if is_action else text)
            state.observations[player] = []


def _reset(game: Any, spec: GameSpec) -> int:
    """Start a game for the players that it is made for; return their number."""
    errors = []
    for num_players in (1, 2):
        try:
            game.reset(num_players=num_players, seed=spec.seed)
        except Exception as error:
            # Games check the number of players in ways of their own.
            errors.append(f"{num_players}: {type(error).__name__}: {error}")
            continue
        # Some that are made for two start with one.
        if num_players == 2 or type(game.state).__name__ == "SinglePlayerState":
            return num_players
    raise TaskError(
        f"game {spec.game!r} must be for one or two players, and start: "
        f"{'; '.join(errors)}"
    )
