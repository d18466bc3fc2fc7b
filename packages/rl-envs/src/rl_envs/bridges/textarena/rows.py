"""Rows of `TextArenaTasks`: which game, and what it starts with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rl_envs.bridges.textarena.episodes import Match
from rl_envs.bridges.textarena.games import GameSpec
from rl_envs.errors import MessageLogError, TaskError
from rl_envs.worlds.game import Columns

__all__ = ["GameRow", "first_message"]


def first_message(match: Match) -> str:
    """Return what the player to move is asked first: all it was told, and the form."""
    return (
        f"{match.told(match.player)}\nAnswer each observation with one action, as "
        "<move>...</move>."
    )


@dataclass(frozen=True, slots=True)
class GameRow:
    """The columns of a row."""

    spec: GameSpec
    player: int
    """The player that the row is for: 0 or 1."""
    opening: tuple[str, ...]
    """Actions that are taken before that player moves first."""
    start_digest: str
    """`Match.start_digest` when the row was made."""
    index: int
    """Where the row is in its batch, for error messages."""

    @classmethod
    def read(cls, columns: Columns, index: int) -> GameRow:
        """Read a row.

        Raises:
            MessageLogError: A column is missing or has a wrong value.
        """
        game, seed = columns.get("ta_game"), columns.get("ta_seed")
        settings, player = columns.get("ta_settings"), columns.get("ta_player")
        opening, digest = columns.get("ta_opening"), columns.get("ta_start")
        if (
            isinstance(game, str)
            and type(seed) is int
            and _is_object(settings)
            and player in (0, 1)
            and isinstance(opening, list | tuple)
            and isinstance(digest, str)
        ):
            spec = GameSpec(game, seed, str(settings))
            return cls(spec, int(player), tuple(opening), digest, index)
        raise MessageLogError(
            f"metadata[{index}] must have the columns ta_game, ta_seed, ta_settings, "
            "ta_player, ta_opening and ta_start of TextArenaTasks: got "
            f"{dict(columns)!r:.160}"
        )

    def begin(self, match: Match) -> None:
        """Take the opening actions in a match that has just started.

        Raises:
            MessageLogError: The game starts otherwise than when the row was made.
        """
        try:
            if match.start_digest != self.start_digest:
                raise TaskError(
                    f"the installed {self.spec.game!r} starts otherwise with the seed "
                    f"{self.spec.seed}; make the rows again"
                )
            for action in self.opening:
                match.repeat(action)
        except (TaskError, ValueError) as error:
            raise self.error(str(error)) from error
        if match.has_ended or match.player != self.player:
            raise MessageLogError(
                f"metadata[{self.index}]['ta_player'] must be the player that moves "
                f"after ta_opening: got {self.player}; make the rows again"
            )

    def error(self, message: str) -> MessageLogError:
        """Return an error that names the row."""
        return MessageLogError(f"metadata[{self.index}]: {message}")


def _is_object(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
