"""Actions of Gymnasium as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_envs.errors import TaskError

__all__ = ["ActionReader"]

# Gymnasium's own environments document the meaning of actions only in prose.
_KNOWN_NAMES = {
    "Acrobot": ("left", "none", "right"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
_MOST_NUMBERS = 32
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# Few enough digits that every match fits into int64.
_INTEGER = re.compile(r"[-+]?\d{1,18}")


class ActionReader:
    """Reads the actions of one environment.

    Args:
        space: Its action space.
        env_id: Its name.
        names: Names of its discrete actions, in order; empty: known ones or numbers.

    Raises:
        TaskError: The space has no textual form, or the names do not fit it.
    """

    def __init__(self, space: Any, env_id: str, names: Sequence[str] = ()) -> None:
        self._space = space
        self._kind = type(space).__name__
        self.names: tuple[str, ...] = ()
        if self._kind == "Discrete":
            self.names = _names_of(space, env_id, names)
        elif names:
            raise TaskError(
                f"action_names are for discrete actions: those of {env_id!r} are "
                f"{space}; leave action_names out"
            )
        elif self._kind not in ("Text", "MultiDiscrete", "MultiBinary", "Box"):
            raise TaskError(
                f"the actions of {env_id!r} must be discrete, text or a row of "
                f"numbers: got {space}; wrap the environment"
            )
        elif self._kind != "Text" and not _is_short_row(space):
            raise TaskError(
                f"the actions of {env_id!r} must be a row of at most {_MOST_NUMBERS} "
                f"numbers: got {space}; wrap the environment"
            )

    @property
    def instruction(self) -> str:
        """Text that tells a model what actions there are."""
        if self._kind == "Discrete":
            return f"Actions: {', '.join(self.names)}."
        if self._kind == "Text":
            return f"An action is text of at most {self._space.max_length} characters."
        return f"An action is {self._space.shape[0]} numbers of {self._space}."

    def read(self, text: str) -> tuple[Any, str]:
        """Return the action that a text names, and its canonical name.

        Raises:
            ValueError: It names none; the message is for the model.
        """
        if self._kind == "Discrete":
            return self._read_name(text)
        if self._kind == "Text":
            if not self._space.contains(text):
                raise ValueError("That is no action.")
            return text, text
        return self._read_numbers(text)

    def is_masked(self, action: Any, mask: Any) -> bool:
        """Return whether an action mask of the environment excludes the action."""
        if self._kind != "Discrete" or mask is None:
            return False
        # A mask counts from 0, actions from the start of the space.
        return not np.asarray(mask).reshape(-1)[int(action) - int(self._space.start)]

    def _read_name(self, text: str) -> tuple[Any, str]:
        # Models quote names or end them with a period.
        said = " ".join(text.casefold().split()).strip(".\"'`")
        start = int(self._space.start)
        names = [name.casefold() for name in self.names]
        numbers = [str(start + place) for place in range(len(names))]
        # All names first, as they may be numbers themselves: -1, 0, 1.
        for known in (names, numbers):
            if said in known:
                place = known.index(said)
                return np.int64(start + place), self.names[place]
        raise ValueError("That is no action.")

    def _read_numbers(self, text: str) -> tuple[Any, str]:
        words = [word for word in re.split(r"[\s,]+", text.strip("[]() ")) if word]
        size = self._space.shape[0]
        if len(words) != size or not all(_NUMBER.fullmatch(word) for word in words):
            raise ValueError(f"That is no action: it must be {size} numbers.")
        integers = np.issubdtype(self._space.dtype, np.integer)
        if integers and not all(_INTEGER.fullmatch(word) for word in words):
            raise ValueError("That is no action: its numbers must be whole.")
        wide = np.array([int(w) if integers else float(w) for w in words])
        action = wide.astype(self._space.dtype)
        # A narrow type would wrap a number around into the space.
        if (integers and (action != wide).any()) or not self._space.contains(action):
            raise ValueError("That is no action: a number is out of range.")
        return action, " ".join(words)


def _names_of(space: Any, env_id: str, names: Sequence[str]) -> tuple[str, ...]:
    size = int(space.n)
    # An id may have a module and a namespace in front of the name, and a version
    # behind.
    base = env_id.rpartition("/")[2].rpartition(":")[2]
    base = re.sub(r"-v\d+$", "", base)
    known = tuple(names) or _KNOWN_NAMES.get(base, ())
    # A variant of a known environment with other actions gets numbers, not wrong names.
    if not names and len(known) != size:
        return tuple(str(int(space.start) + place) for place in range(size))
    folded = {name.casefold() for name in known if name.strip()}
    if len(known) != size or len(folded) != size:
        raise TaskError(
            f"action_names must be {size} different names, one for each action of "
            f"{env_id!r}: got {list(known)}"
        )
    return known


def _is_short_row(space: Any) -> bool:
    return len(space.shape) == 1 and 1 <= space.shape[0] <= _MOST_NUMBERS
