"""Tasks of TextArena: a game, a seed and a player."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from rl_envs.bridges.textarena.episodes import Match
from rl_envs.bridges.textarena.games import GameSpec
from rl_envs.bridges.textarena.opponents import ListedMoves
from rl_envs.bridges.textarena.rows import first_message
from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, settings_json

__all__ = ["TextArenaTasks"]

_Begins = Literal["policy", "opponent", "drawn"]
_PROBED = 16


@register_task_source("textarena")
class TextArenaTasks(TaskSource):
    """Draws seeds of one game of TextArena.

    A task has no gold answer: the game says what was earned.

    Args:
        game: A registered name, such as `TicTacToe-v0`.
        settings: Arguments of the game, of JSON values.
        begins: The player that moves first in a game of two. `opponent`: a drawn legal
            move is part of the task.
        opening_moves: Moves among which that move is drawn; empty: those known.
        split_by: What keeps the splits apart. `start`: tasks that start alike share a
            split. `seed`: the seed alone, for games that always start alike. None:
            `start` if seeds start differently.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: There is no such game, it cannot be played here, or a setting is
            invalid.
        MissingExtraError: The package is not installed.
    """

    def __init__(
        self,
        game: str = "TicTacToe-v0",
        *,
        settings: Mapping[str, Any] | None = None,
        begins: _Begins = "policy",
        opening_moves: Sequence[str] = (),
        split_by: Literal["start", "seed"] | None = None,
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("textarena", seed=seed, held_out_fraction=held_out_fraction)
        check_choice("begins", begins, *get_args(_Begins))
        if split_by not in (None, "start", "seed"):
            raise TaskError(f"split_by must be 'start' or 'seed': got {split_by!r}")
        self._settings_json = settings_json("settings", settings)
        self.game, self.begins = game, begins
        self._opening = ListedMoves(opening_moves)
        probe = Match(self._spec(0))
        if begins != "policy" and probe.num_players == 1:
            raise TaskError(f"begins must be 'policy': {game!r} is for one player")
        self.split_by = split_by or self._found_split()

    def propose(self, rng: random.Random) -> Task:
        """Start a game with a drawn seed.

        Raises:
            TaskError: The game cannot be started.
        """
        spec = self._spec(rng.randrange(2**31))
        match = Match(spec)
        digest = match.start_digest
        opening: list[str] = []
        begins = rng.choice(("policy", "opponent"))
        if self.begins != "drawn":
            begins = self.begins
        if begins == "opponent":
            first = match.player
            while match.player == first and not match.has_ended:
                opening.append(
                    self._opening.move(match, self.game, f"{spec.seed}/{opening}")
                )
                match.take(opening[-1])
        prompt = first_message(match)
        columns = {
            "ta_game": spec.game,
            "ta_seed": spec.seed,
            "ta_settings": spec.settings_json,
            "ta_start": digest,
            "ta_player": match.player,
            "ta_opening": opening,
        }
        return Task(prompt, "", columns)

    def key(self, task: Task) -> str:
        """Return how the game starts, or its seed."""
        if self.split_by == "start":
            return str(task.metadata["ta_start"])
        return f"{self.game}/{task.metadata['ta_seed']}"

    def identity(self, task: Task) -> str:
        """Return what makes a task another one: its start, or its seed."""
        return f"{self.key(task)}/{'|'.join(task.metadata['ta_opening'])}"

    def _spec(self, seed: int) -> GameSpec:
        return GameSpec(self.game, seed, self._settings_json)

    def _found_split(self) -> Literal["start", "seed"]:
        starts = {Match(self._spec(seed)).start_digest for seed in range(_PROBED)}
        return "start" if len(starts) > 1 else "seed"
