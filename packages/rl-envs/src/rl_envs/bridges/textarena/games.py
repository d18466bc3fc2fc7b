"""Games of the package by name, made offline and without its global effects."""

from __future__ import annotations

import contextlib
import json
import platform
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_distributed.errors import MissingExtraError
from rl_distributed.suggestion import did_you_mean
from rl_envs.errors import TaskError

__all__ = ["GameSpec", "Luck", "build_game"]

# These ask a hosted model in the middle of a game, so that they are not a function of
# seed and actions, and send text of the policy away.
_JUDGED = ("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions")
_NLTK_DATA = re.compile(r"Resource\W+(?:\x1b\[\d+m)?(\w+)(?:\x1b\[0m)?\W+not found")
_PACKAGE_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class GameSpec:
    """What a game is made of."""

    game: str
    """Registered name."""
    seed: int
    settings_json: str = "{}"
    """Arguments of the game, as a JSON object."""


class Luck:
    """State of chance of one game.

    The package draws from the global generators of Python and NumPy, which games that
    run side by side would share.

    Args:
        seed: Where it starts.
    """

    def __init__(self, seed: int) -> None:
        with _PACKAGE_LOCK, _restored():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self._state = random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Let what runs inside draw from this state alone, offline, one at a time."""
        with _PACKAGE_LOCK, _restored(), _no_downloads():
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()


def build_game(spec: GameSpec) -> Any:
    """Return a game that is not yet reset.

    Raises:
        TaskError: There is no such game, or it cannot be played here; with the reason.
        MissingExtraError: The package is not installed.
    """
    registry = _registry()
    if spec.game not in registry:
        raise TaskError(
            f"game {spec.game!r} must be a game of TextArena, such as 'TicTacToe-v0'"
            f"{did_you_mean(spec.game, registry)}"
        )
    module = str(registry[spec.game].entry_point).partition(":")[0]
    if module.split(".")[-2] in _JUDGED:
        raise TaskError(
            f"game {spec.game!r} cannot be played offline: a hosted model decides it; "
            "choose another game"
        )
    try:
        game = sys.modules["textarena"].make(
            spec.game, **json.loads(spec.settings_json)
        )
    except Exception as error:
        # Missing data, code for another Python, wrong settings, or any other.
        raise TaskError(
            f"game {spec.game!r} of TextArena cannot be made with the settings "
            f"{spec.settings_json}: {_reason(error)}"
        ) from error
    _silence(module.rpartition(".")[0])
    return game


def _registry() -> dict[str, Any]:
    try:
        from textarena.envs.registration import (  # noqa: PLC0415 - only this bridge
            ENV_REGISTRY,
        )
    except ImportError as error:
        raise MissingExtraError(
            "environment 'textarena' needs the package textarena, which cannot be "
            f"imported ({error}); pip install 'rl-envs[textarena]'"
        ) from error
    registry: dict[str, Any] = ENV_REGISTRY
    return registry


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"its code needs a newer Python than {platform.python_version()}"
    if isinstance(error, FileNotFoundError):
        return f"the package lacks its data ({error.filename or error})"
    if isinstance(error, LookupError) and (found := _NLTK_DATA.search(str(error))):
        return (
            f"it needs the data {found[1]!r} of NLTK, which are not installed; run: "
            f"python -m nltk.downloader {found[1]}"
        )
    return f"{type(error).__name__}: {error}"


def _silence(package: str) -> None:
    """Let the modules of a game print nothing; some report how they draw a puzzle."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            vars(module)["print"] = lambda *_, **__: None


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Let games find the data of NLTK that are installed, and fetch none."""
    nltk = sys.modules.get("nltk")
    if nltk is None:
        yield
        return
    fetch = nltk.download
    vars(nltk)["download"] = lambda *_, **__: False
    try:
        yield
    finally:
        vars(nltk)["download"] = fetch
