"""The environment that plays episodes of a server of OpenEnv."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_envs.bridges.openenv.actions import ActionForm
from rl_envs.bridges.openenv.config import OpenEnvConfig
from rl_envs.bridges.openenv.episodes import Episode, Episodes, ResetSpec, Server
from rl_envs.bridges.openenv.wire import (
    ActionRefusedError,
    NoReplyError,
    SessionLostError,
    StepFailedError,
)
from rl_envs.errors import MessageLogError
from rl_envs.outcomes import OUTCOME_KEY, ConversationOutcome
from rl_envs.registry import register_env
from rl_envs.worlds.game import (
    GAME_KEY,
    Columns,
    GameEnvironment,
    GameTurn,
)

__all__ = ["OpenEnvEnvironment"]

_logger = get_logger(__name__)

RESET, START = "openenv_reset", "openenv_start"
_UNSCORED = float("nan")
# Enough to see that a server starts otherwise; a reset may take seconds.
_CHECKED_STARTS = 256
_TRIES = 2
_MOST_LOGGED = 8
_ended = itertools.count()


class _NotRepeatedError(SessionLostError):
    """An episode that was played again came out otherwise."""


@register_env("openenv")
class OpenEnvEnvironment(GameEnvironment):
    """Sends the action of each response to a server of OpenEnv.

    Rows come from `OpenEnvTasks`, or have `openenv_reset` with the options of the
    reset, such as `{"seed": 3, "task": "easy"}`.

    Args:
        config: The settings.

    Raises:
        ConfigError: A function of the settings cannot be loaded.
    """

    config_class = OpenEnvConfig
    # A step waits for the server, and others can go on meanwhile.
    calls_at_once = 4

    def __init__(self, config: OpenEnvConfig) -> None:
        self.config = config
        super().__init__(config)
        self._form = ActionForm(config)
        self._server = Server(config)
        self._episodes = Episodes(
            self._server, config.max_sessions, config.is_repeatable
        )
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Connections, processes and locks cannot be pickled; a copy has its own.
        return OpenEnvEnvironment, (self.config,)

    def reset(
        self, metadata: Sequence[Columns], seeds: Sequence[int]
    ) -> Sequence[Columns]:
        """Give each row without a seed of its own the seed of its conversation."""
        return [
            _with_seed(columns, row, seed)
            for row, (columns, seed) in enumerate(zip(metadata, seeds, strict=True))
        ]

    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return an episode without actions; its session begins with the first one.

        Raises:
            MessageLogError: A column has a wrong value.
        """
        # Checked here, where the message can name the row.
        _spec_of(columns, row)
        return {"actions": [], "digest": columns.get(START), "return": 0.0}

    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Take the action of a response."""
        try:
            action, said = self._form.read(response)
        except ConfigError:
            # It is a ValueError, too, and none that the model can do anything about.
            raise
        except ValueError as error:
            return GameTurn(state, str(error), is_legal=False)
        if not self.config.is_repeatable:
            # Equal conversations, such as those of a group, each have their own.
            state = {"conversation": uuid.uuid4().hex, **state}
        spec = _spec_of(columns, 0, state)
        for tries_left in reversed(range(_TRIES)):
            try:
                episode = self._episode(spec, state)
                return self._taken(episode, spec, state, action, said)
            except (NoReplyError, StepFailedError, ActionRefusedError) as error:
                # Of a reset, or of an action that is repeated.
                return _failed(state, error)
            except SessionLostError as error:
                is_new = self.config.is_repeatable or not state["actions"]
                if not tries_left or not is_new or isinstance(error, _NotRepeatedError):
                    return _failed(state, error)
        raise AssertionError("unreachable")

    def play_all(
        self, turns: Sequence[tuple[Columns, Mapping[str, Any], str]]
    ) -> list[GameTurn]:
        """Take the actions of responses, all at the same time."""
        if len(turns) == 1:
            return [self.play(*turns[0])]
        return list(self._pool().map(lambda turn: self.play(*turn), turns))

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows with wrong columns, or whose episode starts otherwise.

        At most 256 rows, evenly spread, are started.
        """
        found = super().unusable_rows(metadata)
        rows = [row for row in range(len(metadata)) if row not in found]
        drawn = rows[:: max(1, -(-len(rows) // _CHECKED_STARTS))]
        reasons = self._pool().map(lambda row: self._reason(metadata[row]), drawn)
        for row, reason in zip(drawn, reasons, strict=True):
            if reason is not None:
                found[row] = f"metadata[{row}]: {reason}"
        return found

    def close(self, metadata: Sequence[Columns]) -> None:
        """Release the sessions of conversations that a limit ended."""
        for columns in metadata:
            state = columns.get(GAME_KEY) if isinstance(columns, Mapping) else None
            # One that the environment ended has been released.
            ended = isinstance(columns, Mapping) and columns.get(OUTCOME_KEY)
            limit = (ConversationOutcome.OUT_OF_TURNS, ConversationOutcome.ILLEGAL)
            if isinstance(state, Mapping) and (not ended or ended in limit):
                self._episodes.drop(_spec_of(columns, 0, state), state["actions"])

    def shutdown(self) -> None:
        """Release the sessions, and end the server that was started here."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        self._episodes.close()
        self._server.close()

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                # No more threads than sessions: none of them waits for room while
                # those that have it wait for a thread.
                self._threads = ThreadPoolExecutor(self.config.max_sessions, "openenv")
            return self._threads

    def _episode(self, spec: ResetSpec, state: Mapping[str, Any]) -> Episode:
        """Return the episode of a conversation, played again where it is not kept.

        Raises:
            SessionLostError: It cannot be had, or came out otherwise.
        """
        episode = self._episodes.take(spec, state["actions"])
        expected = state["digest"] if self.config.is_repeatable else None
        if expected not in (None, episode.digest):
            episode.close()
            what = "played again" if state["actions"] else "started"
            raise _NotRepeatedError(
                f"an episode that was {what} with the options {spec.options_json} "
                "showed something else than before; let its reset draw everything from "
                "the seed, make the rows again, or set is_repeatable=false"
            )
        return episode

    def _taken(
        self,
        episode: Episode,
        spec: ResetSpec,
        state: Mapping[str, Any],
        action: Mapping[str, Any],
        said: str,
    ) -> GameTurn:
        """Take an action in an episode, and keep or release it."""
        actions = [*state["actions"], json.dumps(action, sort_keys=True)]
        try:
            reward = episode.take(action)
        except ActionRefusedError as error:
            # Nothing was stepped, so the episode is still the one after these actions.
            state = {**state, "digest": episode.digest}
            self._episodes.keep(spec, state["actions"], episode)
            return GameTurn(state, f"That is no action: {error}", is_legal=False)
        except StepFailedError as error:
            if self.config.failed_step == "error":
                episode.close()
                raise
            if error.is_session_over:
                # Undone with its session; the next turn plays the earlier ones again.
                episode.close()
                return GameTurn(state, str(error), is_legal=False, answer=said)
            state = {**state, "actions": actions, "digest": episode.digest}
            self._episodes.keep(spec, actions, episode)
            return GameTurn(state, str(error), is_legal=False, answer=said)
        except BaseException:
            episode.close()
            raise
        total = state["return"] + reward
        new = {"actions": actions, "digest": episode.digest, "return": total}
        state = {**state, **new}
        outcome = None
        if episode.is_done:
            episode.close()
            outcome = self._outcome(total if self.config.credit == "sum" else reward)
        else:
            self._episodes.keep(spec, actions, episode)
        if self.config.credit == "last" and outcome is None:
            reward = 0.0
        return GameTurn(state, episode.shown, reward, outcome, True, said)

    def _outcome(self, reward: float) -> ConversationOutcome:
        least = self.config.solved_reward
        if least is None:
            return ConversationOutcome.FINISHED
        if reward >= least:
            return ConversationOutcome.SOLVED
        return ConversationOutcome.LOST

    def _reason(self, columns: Columns) -> str | None:
        """Return why the episode of a row cannot be started as it should be."""
        state = self.start(columns, 0)
        try:
            self._episode(_spec_of(columns, 0), state).close()
        except (NoReplyError, StepFailedError, ActionRefusedError) as error:
            return f"the reset failed: {error}"
        except SessionLostError as error:
            return str(error)
        return None


def _failed(state: Mapping[str, Any], error: Exception) -> GameTurn:
    """Return the end of a conversation without a score."""
    # The share of these is a metric, outcome/error; the first ones say why.
    if next(_ended) < _MOST_LOGGED:
        _logger.warning("a conversation of openenv ends unscored: %s", error)
    state = {**state, "error": str(error)}
    return GameTurn(state, str(error), _UNSCORED, ConversationOutcome.ERROR)


def _options_of(columns: Columns, row: int) -> dict[str, Any]:
    """Return the options of a row's reset: a mapping, or a JSON object as text."""
    given: Any = columns.get(RESET, {})
    try:
        options = json.loads(given) if isinstance(given, str) else given
        if isinstance(options, Mapping):
            json.dumps(dict(options))
            return dict(options)
    except (TypeError, ValueError):
        pass
    raise MessageLogError(
        f"metadata[{row}][{RESET!r}] must be a JSON object with the options of the "
        f"reset, such as {{'seed': 3}}: got {given!r:.160}"
    )


def _spec_of(
    columns: Columns, row: int, state: Mapping[str, Any] | None = None
) -> ResetSpec:
    start = columns.get(START)
    if start is not None and not isinstance(start, str):
        raise MessageLogError(
            f"metadata[{row}][{START!r}] must be as OpenEnvTasks writes it, or missing:"
            f" got {start!r:.80}"
        )
    # A seed always, so that a session can be begun again; servers whose reset takes
    # none ignore it.
    options = {"seed": 0, **_options_of(columns, row)}
    return ResetSpec.of(options, (state or {}).get("conversation", ""))


def _with_seed(columns: Columns, row: int, seed: int) -> Columns:
    if not isinstance(columns, Mapping):
        return columns
    options = _options_of(columns, row)
    if "seed" in options:
        return columns
    return {**columns, RESET: json.dumps({**options, "seed": seed}, sort_keys=True)}
