"""Episodes of Gymnasium, as functions of a seed and the actions so far."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from rl_distributed.errors import MissingExtraError
from rl_envs.bridges.gymnasium.actions import ActionReader
from rl_envs.errors import TaskError

__all__ = ["Episode", "GymSpec", "Show"]

Show: TypeAlias = Literal["auto", "drawing", "values"]
_HIGHLIGHT = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0?m", re.DOTALL)
_COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class GymSpec:
    """What an episode is made of."""

    env_id: str
    seed: int
    settings_json: str
    """Arguments of the environment, as a JSON object."""
    action_names: tuple[str, ...] = ()
    show: Show = "auto"


class Episode:
    """A running episode.

    Args:
        spec: What it is made of.

    Raises:
        TaskError: There is no such environment, or it has no textual form.
        MissingExtraError: The package is not installed.
    """

    def __init__(self, spec: GymSpec) -> None:
        self._env = _make(spec)
        self._is_drawn = self._env.render_mode == "ansi"
        try:
            self.reader = ActionReader(
                self._env.action_space, spec.env_id, spec.action_names
            )
            observation, self._info = self._env.reset(seed=spec.seed)
        except TaskError:
            self.close()
            raise
        except Exception as error:
            # An environment may raise anything.
            self.close()
            raise TaskError(
                f"environment {spec.env_id!r} cannot be reset: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.shown = self._text_of(observation)
        self.total = 0.0
        self.has_ended = self.was_cut = False

    @property
    def start_digest(self) -> str:
        """Digest of the first observation, which another version may change."""
        return hashlib.sha256(self.shown.encode()).hexdigest()[:16]

    def is_masked(self, action: Any) -> bool:
        """Return whether the environment excludes an action now."""
        return self.reader.is_masked(action, self._info.get("action_mask"))

    def take(self, action: Any) -> float:
        """Take an action; return its reward."""
        observation, reward, ended, cut, self._info = self._env.step(action)
        self.shown = self._text_of(observation)
        self.has_ended, self.was_cut = bool(ended), bool(cut)
        self.total += float(reward)
        return float(reward)

    def repeat(self, action: str) -> None:
        """Take the action of a name again."""
        self.take(self.reader.read(action)[0])

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def _text_of(self, observation: Any) -> str:
        if not self._is_drawn:
            return _as_text(observation)
        return _HIGHLIGHT.sub(_bracketed, str(self._env.render())).strip("\n")


def _make(spec: GymSpec) -> Any:
    drawn = spec.show != "values" and _draws_text(spec.env_id, spec.settings_json)
    if spec.show == "drawing" and not drawn:
        raise TaskError(
            f"environment {spec.env_id!r} has no render mode 'ansi', so it cannot be "
            "shown as a drawing: use show='values'"
        )
    return _build_env(spec.env_id, spec.settings_json, drawn=drawn)


@functools.lru_cache(maxsize=256)
def _draws_text(env_id: str, settings_json: str) -> bool:
    # The render mode is an argument of `make`, so it must be known before.
    env = _build_env(env_id, settings_json, drawn=False)
    try:
        return "ansi" in (env.metadata.get("render_modes") or ())
    finally:
        env.close()


def _build_env(env_id: str, settings_json: str, *, drawn: bool) -> Any:
    gymnasium = _import_gymnasium()
    settings: dict[str, Any] = json.loads(settings_json)
    if drawn:
        settings["render_mode"] = "ansi"
    try:
        # Its checker warns of style, not of what is wrong.
        return gymnasium.make(env_id, disable_env_checker=True, **settings)
    except Exception as error:
        # Its own errors, imports that the environment needs, or any other.
        raise TaskError(
            f"environment {env_id!r} of Gymnasium cannot be made with the settings "
            f"{settings_json}: {type(error).__name__}: {error}"
        ) from error


def _import_gymnasium() -> Any:
    try:
        import gymnasium  # noqa: PLC0415 - only this bridge needs it
    except ImportError as error:
        raise MissingExtraError(
            "environment 'gymnasium' needs the package gymnasium, which cannot be "
            f"imported ({error}); pip install 'rl-envs[gymnasium]'"
        ) from error
    return gymnasium


def _bracketed(match: re.Match[str]) -> str:
    """Return a coloured text as `[colour text]`."""
    codes = [int(code) for code in match[1].split(";") if code]
    colours = [code % 10 for code in codes if code // 10 in (3, 4) and code % 10 < 8]
    text = match[2].strip()
    return f"[{' '.join([*(_COLOURS[c] for c in colours[:1]), text]).strip()}]"


def _as_text(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _plain(value: Any) -> Any:
    """Return an observation as JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    # Before int, of which bool is a subclass.
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        # Further digits only cost tokens.
        return float(f"{float(value):.{_DIGITS}g}")
    return str(value)
