"""The nim environment, with a perfect or a random opponent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl_envs.errors import MessageLogError
from rl_envs.outcomes import ConversationOutcome
from rl_envs.registry import register_env
from rl_envs.worlds.game import (
    Columns,
    GameConfig,
    GameEnvironment,
    GameTurn,
    said_move,
)
from rl_envs.worlds.nim.solver import (
    HEAP_NAMES,
    NimMove,
    after_move,
    best_move,
    random_move,
)

__all__ = ["NimConfig", "NimEnvironment", "nim_prompt"]

_MOVE = re.compile(rf"([{HEAP_NAMES}])\s*(\d{{1,3}})", re.IGNORECASE)


class NimConfig(GameConfig):
    """Settings of nim."""

    opponent: Literal["perfect", "random"] = "perfect"
    """Strategy of the opponent. `perfect`: wins from every winnable position.
    `random`: any legal move, drawn from the row's `opponent_seed` and the position."""


@register_env("nim")
class NimEnvironment(GameEnvironment):
    """Plays the move of a response and the opponent's reply; rewards 1 for a win.

    A row has the column `heaps`, a list of one to eight whole numbers, and optionally
    `misere` (the player who takes last loses; default false), `opponent_seed` (default
    0) and `style`, `compact` or `words` (the default). A response names a heap and a
    number: "B2" takes two objects from the second heap. An illegal response changes
    nothing.

    Args:
        config: The settings.
    """

    config_class = NimConfig

    def __init__(self, config: NimConfig | None = None) -> None:
        self.config = config or NimConfig()
        super().__init__(self.config)
        self._errs = self.config.opponent == "random"

    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return the heaps of the row.

        Raises:
            MessageLogError: A column is invalid.
        """
        heaps = columns.get("heaps")
        misere, seed = columns.get("misere", False), columns.get("opponent_seed", 0)
        style = columns.get("style", "words")
        if not _are_heaps(heaps):
            raise MessageLogError(
                f"metadata[{row}] must have the column 'heaps', a list of one to "
                f"{len(HEAP_NAMES)} whole numbers from 0 to 999, not all 0: got "
                f"{heaps!r}"
            )
        if type(misere) is not bool or type(seed) is not int:
            raise MessageLogError(
                f"metadata[{row}]: 'misere' must be true or false, and 'opponent_seed' "
                f"a whole number: got {misere!r} and {seed!r}"
            )
        if style not in ("compact", "words"):
            raise MessageLogError(
                f"metadata[{row}]: 'style' must be 'compact' or 'words': got {style!r}"
            )
        return {"heaps": list(heaps or ())}

    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Play the move of a response and the opponent's reply."""
        heaps: list[int] = state["heaps"]
        misere = columns.get("misere", False)
        compact = columns.get("style") == "compact"
        move = _read_move(said_move(response))
        if move is None or not _is_legal(heaps, move):
            problem = (
                "That is no move: name a heap and a number, such as A1."
                if move is None
                else f"{move.text} is not possible."
            )
            said = "!" if compact else f"{problem}\n"
            said += _shown(heaps, compact)
            return GameTurn(
                state, said, is_legal=False, answer=move.text if move else None
            )
        heaps = after_move(heaps, move)
        reply, outcome = None, None
        if not any(heaps):
            # The policy took last: it wins, but loses in misère play.
            outcome = _ending(won=not misere)
        else:
            reply = self._reply(heaps, misere, columns.get("opponent_seed", 0))
            heaps = after_move(heaps, reply)
            if not any(heaps):
                outcome = _ending(won=misere)
        return GameTurn(
            {**state, "heaps": heaps},
            _told(heaps, reply, outcome, compact),
            float(outcome is ConversationOutcome.SOLVED),
            outcome,
            answer=move.text,
        )

    def _reply(self, heaps: list[int], misere: bool, seed: int) -> NimMove:
        if self._errs:
            # A function of the seed and the position, so that a repeated call gets the
            # same reply.
            return random_move(heaps, seed=seed)
        return best_move(heaps, misere=misere)


def _are_heaps(heaps: Any) -> bool:
    return (
        isinstance(heaps, Sequence)
        and not isinstance(heaps, str)
        and 1 <= len(heaps) <= len(HEAP_NAMES)
        # Not isinstance: a bool would count as an int. Three digits at most, as moves
        # have.
        and all(type(size) is int and 0 <= size <= 999 for size in heaps)
        and any(heaps)
    )


def _read_move(text: str) -> NimMove | None:
    found = _MOVE.fullmatch(text)
    if found is None:
        return None
    return NimMove(HEAP_NAMES.index(found[1].upper()), int(found[2]))


def _is_legal(heaps: Sequence[int], move: NimMove) -> bool:
    return move.heap < len(heaps) and 1 <= move.taken <= heaps[move.heap]


def _ending(*, won: bool) -> ConversationOutcome:
    return ConversationOutcome.SOLVED if won else ConversationOutcome.LOST


def _told(
    heaps: list[int],
    reply: NimMove | None,
    outcome: ConversationOutcome | None,
    compact: bool,
) -> str:
    if compact:
        return f"{reply.text if reply else ''};{_shown(heaps, compact)}"
    said = f"I take {reply.taken} from {HEAP_NAMES[reply.heap]}.\n" if reply else ""
    if outcome is not None:
        won = outcome is ConversationOutcome.SOLVED
        return f"{said}{'You win.' if won else 'You lose.'}"
    return said + _shown(heaps, compact)


def _shown(heaps: Sequence[int], compact: bool) -> str:
    if compact:
        return f"{','.join(map(str, heaps))}>"
    return ", ".join(f"{HEAP_NAMES[heap]}: {size}" for heap, size in enumerate(heaps))


def nim_prompt(heaps: Sequence[int], style: str, *, misere: bool = False) -> str:
    """Return the first message of a conversation.

    Args:
        heaps: Number of objects in each heap.
        style: `compact`: "3,4,5>", with a leading "-" for misère play. `words`: the
            rules and the heaps.
        misere: True if the player who takes last loses.
    """
    if style == "compact":
        return f"{'-' if misere else ''}{_shown(heaps, True)}"
    return (
        "We take objects in turn, any number of one heap. Whoever takes the last "
        f"object {'loses' if misere else 'wins'}. Answer with a heap and a number, as "
        "<move>...</move>; A1 takes one object from the first heap. You begin.\n"
        f"{_shown(heaps, False)}"
    )
