"""Episodes of a server, as functions of the options of their reset and the actions."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl_envs.bridges.kept_episodes import KeptEpisodes
from rl_envs.bridges.openenv.config import OpenEnvServer
from rl_envs.bridges.openenv.observations import ObservationText
from rl_envs.bridges.openenv.server_process import ServerProcess
from rl_envs.bridges.openenv.wire import (
    Reply,
    ServerFullError,
    Session,
    SessionLostError,
    StepFailedError,
)
from rl_envs.errors import EnvironmentServerError

__all__ = ["Episode", "Episodes", "ResetSpec", "Server"]

_LOOK_S = 0.05
_FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResetSpec:
    """What an episode begins with."""

    options_json: str
    """Options of the reset, as a JSON object with sorted keys."""
    conversation: str = ""
    """Name of the only conversation that may have it; empty: those that are equal."""

    @classmethod
    def of(cls, options: Mapping[str, Any], conversation: str = "") -> ResetSpec:
        """Return the spec of options."""
        return cls(json.dumps(options, sort_keys=True), conversation)


class Server:
    """A server, and what its observations are as text.

    Args:
        settings: Which.

    Raises:
        ConfigError: A function of the settings cannot be loaded.
    """

    def __init__(self, settings: OpenEnvServer) -> None:
        self.settings = settings
        self._process = ServerProcess(settings)
        self.text = ObservationText(settings)

    def begin(self, spec: ResetSpec) -> tuple[Session, Reply]:
        """Open a session and reset it; wait for room in a server that is full.

        Raises:
            EnvironmentServerError: It is out of reach, full, or no server of OpenEnv.
            ActionRefusedError, StepFailedError, NoReplyError, SessionLostError: The
                reset failed.
        """
        settings = self.settings
        until_s = time.monotonic() + settings.connect_s
        while True:
            session = Session(
                self._process.address,
                settings.connect_s,
                settings.call_s,
                settings.max_message_mib << 20,
            )
            try:
                return session, session.reset(json.loads(spec.options_json))
            except ServerFullError as error:
                session.close()
                if time.monotonic() > until_s:
                    raise EnvironmentServerError(
                        f"the server at {session.address} has no room for another "
                        f"session: {error}; lower max_sessions, which each process may "
                        "use, or raise max_concurrent_envs of the server"
                    ) from None
            except BaseException:
                session.close()
                raise
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the server, if it was started here; it starts again when needed."""
        self._process.close()


class Episode:
    """A running episode in a session of its own.

    Args:
        server: Where it runs.
        spec: What it begins with.
        on_close: Called once when it has been released.

    Raises:
        EnvironmentServerError: See `Server.begin`, also for other errors.
    """

    def __init__(
        self,
        server: Server,
        spec: ResetSpec,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._text, self._on_close = server.text, on_close
        self._session, reply = server.begin(spec)
        self._is_open = True
        try:
            self.shown = self._text.of(reply.observation)
        except BaseException:
            self._session.close()
            raise
        self.digest = _digest("", self.shown, reply.reward, reply.is_done)
        self.is_done = reply.is_done

    def take(self, action: Mapping[str, Any]) -> float:
        """Take an action; return its reward, 0 for none.

        Raises:
            ActionRefusedError: It does not fit the schema; nothing has changed.
            StepFailedError: The environment raised.
            NoReplyError, SessionLostError: The session is over.
        """
        try:
            reply = self._session.step(action)
        except StepFailedError as error:
            # It may have changed the state before it raised.
            self.digest = _digest(self.digest, _FAILED, str(error))
            raise
        self.shown = self._text.of(reply.observation)
        self.digest = _digest(self.digest, self.shown, reply.reward, reply.is_done)
        self.is_done = reply.is_done
        return reply.reward or 0.0

    def repeat(self, action: str) -> None:
        """Take an action, as a JSON object, that was taken before."""
        try:
            # One that raised then raises again, which is as it was.
            with suppress(StepFailedError):
                self.take(json.loads(action))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the session."""
        if self._is_open:
            self._is_open = False
            self._session.close()
            self._on_close()


class Episodes:
    """The episodes of one process: no more sessions than the server allows.

    Args:
        server: Where they run.
        most: Maximum number of sessions.
        are_repeatable: Whether one may be closed for another, and played again.
    """

    def __init__(self, server: Server, most: int, are_repeatable: bool) -> None:
        self._server, self._most, self._repeatable = server, most, are_repeatable
        self._room = threading.Semaphore(most)
        self._kept: KeptEpisodes[ResetSpec, Episode] = KeptEpisodes(self._begin, most)

    def take(self, spec: ResetSpec, actions: Sequence[str]) -> Episode:
        """Return the episode after these actions, which is the caller's from now on.

        Raises:
            SessionLostError: It is not kept, and cannot be repeated.
            EnvironmentServerError: See `Server.begin`, also for other errors.
        """
        if self._repeatable or not actions:
            return self._kept.take(spec, actions)
        kept = self._kept.take_kept(spec, actions)
        if kept is None:
            raise SessionLostError(
                "the session of the conversation is over, and is_repeatable is false"
            )
        return kept

    def keep(self, spec: ResetSpec, actions: Sequence[str], episode: Episode) -> None:
        """Keep an episode for its next turn."""
        self._kept.keep(spec, actions, episode)

    def drop(self, spec: ResetSpec, actions: Sequence[str]) -> None:
        """Release the episode after these actions, if it is kept."""
        self._kept.drop(spec, actions)

    def close(self) -> None:
        """Release all that are kept."""
        self._kept.close()

    def _begin(self, spec: ResetSpec) -> Episode:
        self._wait_for_room()
        try:
            return Episode(self._server, spec, self._room.release)
        except BaseException:
            self._room.release()
            raise

    def _wait_for_room(self) -> None:
        call_s = self._server.settings.call_s
        until_s = time.monotonic() + call_s
        while not self._room.acquire(blocking=False):
            # Before waiting: the next turn of the oldest is likely the farthest.
            if self._repeatable and self._kept.release_oldest():
                continue
            # All are in use by a step, or must not be released.
            if self._room.acquire(timeout=_LOOK_S):
                return
            if time.monotonic() > until_s:
                raise EnvironmentServerError(
                    f"all {self._most} sessions are taken by conversations that have "
                    f"not ended, for {call_s:g} s; raise max_sessions to the number of "
                    "conversations at a time"
                )


def _digest(before: str, *parts: Any) -> str:
    text = json.dumps([before, *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
