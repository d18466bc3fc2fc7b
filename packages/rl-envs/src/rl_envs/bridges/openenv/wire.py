"""One session with a server of OpenEnv: a WebSocket at `/ws`, JSON in both directions.

| sent | answered by |
|---|---|
| `{"type": "reset", "data": {"seed": 1, ...}}` | an observation |
| `{"type": "step", "data": ACTION}` | an observation |
| `{"type": "close"}` | the end of the connection, once the session is released |

An observation is `{"type": "observation", "data": {"observation": {...}, "reward":
number or null, "done": bool}}`; any message may be answered by `{"type": "error",
"data": {"code": ..., "message": ...}}`. The server's HTTP addresses `/reset` and
`/step` keep no session, so that only this one plays whole conversations.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rl_distributed.errors import MissingExtraError
from rl_envs.errors import EnvironmentServerError, EnvsError

if TYPE_CHECKING:
    from websockets.exceptions import InvalidStatus, WebSocketException
    from websockets.sync.client import ClientConnection

__all__ = [
    "ActionRefusedError",
    "NoReplyError",
    "Reply",
    "ServerFullError",
    "Session",
    "SessionLostError",
    "StepFailedError",
]

_CLOSE_S = 5.0
# For a server that does not answer, or speaks another protocol.
_ABANDON_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_SHOWN_CHARACTERS = 400
_MOST_PROBLEMS = 4
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ActionRefusedError(EnvsError, ValueError):
    """The server refused an action or reset, and has not changed its state."""


class StepFailedError(EnvsError, RuntimeError):
    """The environment raised in a reset or step."""

    is_session_over: bool = False
    """Whether the server ended the session over it."""


class SessionLostError(EnvsError, RuntimeError):
    """The session is over without a word from the environment."""


class NoReplyError(EnvsError, TimeoutError):
    """The server did not answer in time."""


class ServerFullError(EnvsError, RuntimeError):
    """The server has no room for another session."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reset or a step brought."""

    observation: Mapping[str, Any]
    reward: float | None
    is_done: bool


class Session:
    """A connection, and with it a session of its own.

    Args:
        address: Returns the address of the server, which may be another one after it
            was started again.
        connect_s: Seconds until it must be there; connecting is tried until then.
        call_s: Seconds that one message may take.
        max_bytes: Maximum size of a message.

    Raises:
        EnvironmentServerError: There is no server, or it speaks another protocol.
        MissingExtraError: The package is not installed.
    """

    def __init__(
        self,
        address: Callable[[], str],
        connect_s: float,
        call_s: float,
        max_bytes: int,
    ) -> None:
        self._call_s, self._max_bytes = call_s, max_bytes
        self._held = ExitStack()
        self._answers = True
        self._socket, self.address = _connect(self._held, address, connect_s, max_bytes)

    def reset(self, options: Mapping[str, Any]) -> Reply:
        """Begin an episode; raises what `step` does, and `ServerFullError`."""
        return self._ask("reset", options)

    def step(self, action: Mapping[str, Any]) -> Reply:
        """Take an action.

        Raises:
            ActionRefusedError: The action does not fit the server's schema.
            StepFailedError: The environment raised.
            NoReplyError: No answer in time; the session cannot be used any more.
            SessionLostError: The connection is closed.
            EnvironmentServerError: The answer is none of the protocol.
        """
        return self._ask("step", action)

    def close(self) -> None:
        """End the session, and wait until the server has released it."""
        # The connection may be gone, which ends the session as well.
        with suppress(Exception):
            if self._answers:
                self._part()
        with suppress(Exception):
            self._held.close()

    def _part(self) -> None:
        """Let the server end the connection, which it does after the session.

        Another session may have no room before.
        """
        self._socket.send(json.dumps({"type": "close"}))
        until_s = time.monotonic() + _CLOSE_S
        # What it still says is of no interest; the end is an exception.
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.recv(timeout=left_s)

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Reply:
        # Until it has: one that does not is left without a farewell.
        self._answers = False
        reply = self._read(kind, self._exchange(kind, data))
        self._answers = True
        return reply

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> str | bytes:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        try:
            # A full server says so, and closes the connection, before it is asked.
            with suppress(ConnectionClosed):
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            return self._socket.recv(timeout=self._call_s)
        except TimeoutError:
            raise NoReplyError(
                f"the server at {self.address} did not answer a {kind} within "
                f"{self._call_s:g} s (call_s)"
            ) from None
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == 1009:
                raise EnvironmentServerError(
                    f"the server at {self.address} answered a {kind} with more than "
                    f"{self._max_bytes >> 20} MiB; raise max_message_mib"
                ) from None
            raise SessionLostError(
                f"the server at {self.address} closed the connection: {error}"
            ) from None

    def _read(self, kind: str, text: str | bytes) -> Reply:
        try:
            message = json.loads(text)
            data = message["data"]
            if message["type"] == "error":
                error = self._error(kind, dict(data))
                self._answers = not isinstance(error, EnvironmentServerError)
                raise error
            reward, is_done = data["reward"], data["done"]
            observation = data["observation"]
            is_number = reward is None or isinstance(reward, int | float)
            if message["type"] != "observation" or not is_number:
                raise ValueError
            if not isinstance(is_done, bool) or not isinstance(observation, dict):
                raise ValueError
        except EnvsError:
            raise
        except (ValueError, KeyError, TypeError):
            raise EnvironmentServerError(
                f"the server at {self.address} must answer a {kind} by an observation "
                f"of OpenEnv's protocol: got {text!r:.160}"
            ) from None
        if reward is not None and not math.isfinite(reward):
            raise EnvironmentServerError(
                f"a reward of the server at {self.address} must be finite: got {reward}"
            )
        return Reply(observation, None if reward is None else float(reward), is_done)

    def _error(self, kind: str, data: dict[str, Any]) -> EnvsError:
        """Return the exception that stands for an error of the server."""
        code, told = data.get("code"), str(data.get("message"))[:_SHOWN_CHARACTERS]
        if code == "VALIDATION_ERROR":
            return ActionRefusedError(_problems(data) or told)
        if code == "CAPACITY_REACHED":
            return ServerFullError(f"it allows {data.get('max_sessions')} sessions")
        if code in ("EXECUTION_ERROR", "SESSION_ERROR", "FACTORY_ERROR"):
            failed = StepFailedError(told)
            # Over an error that it cannot describe, such as one of a validator of the
            # action, the server ends the session.
            failed.is_session_over = code != "EXECUTION_ERROR"
            return failed
        return EnvironmentServerError(
            f"the server at {self.address} refuses a {kind} ({code}: {told}); it "
            "speaks another version of OpenEnv's protocol"
        )


def _problems(data: Mapping[str, Any]) -> str:
    """Return what a validation found, in one line."""
    found = data.get("errors")
    listed = found if isinstance(found, list) else []
    texts = []
    for each in listed[:_MOST_PROBLEMS]:
        if isinstance(each, Mapping):
            place = ".".join(str(part) for part in each.get("loc") or ())
            texts.append(f"{place}: {each.get('msg')}" if place else f"{each['msg']}")
    return "; ".join(texts)[:_SHOWN_CHARACTERS]


def _connect(
    held: ExitStack, address: Callable[[], str], connect_s: float, max_bytes: int
) -> tuple[ClientConnection, str]:
    """Open a connection that `held` closes; return it and the address that it is to."""
    any_error, status_error = _errors()
    tried, until_s, pause_s = "", 0.0, _FIRST_PAUSE_S
    while True:
        now = address()
        if now != tried:
            tried, until_s = now, time.monotonic() + connect_s
        left_s = until_s - time.monotonic()
        try:
            return _opened(held, now, left_s, max_bytes), now
        except status_error as error:
            status = error.response.status_code
            problem: Exception = error
            if status < 500:
                raise EnvironmentServerError(
                    f"there is no server of OpenEnv at {now}: {_socket_address(now)} "
                    f"answers with HTTP {status} in place of a WebSocket; correct "
                    "address"
                ) from error
        # Also a connection that is closed in the middle of its handshake, by a server
        # that ends.
        except (OSError, any_error) as error:
            problem = error
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise EnvironmentServerError(
                f"the server of OpenEnv at {now} cannot be reached within "
                f"{connect_s:g} s (connect_s): {type(problem).__name__}: {problem}; "
                "start it, or correct address"
            ) from problem
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _opened(
    held: ExitStack, address: str, left_s: float, max_bytes: int
) -> ClientConnection:
    from websockets.sync.client import connect  # noqa: PLC0415 - only this bridge

    url = _socket_address(address)
    # Entered, as the package deprecates connections that are not.
    return held.enter_context(
        connect(
            url,
            # An attempt in the last moment needs some time, too.
            open_timeout=max(left_s, _FIRST_PAUSE_S),
            close_timeout=_ABANDON_S,
            max_size=max_bytes,
            proxy=None if urlsplit(url).hostname in _LOOPBACK else True,
            # The server pings; a thread less for each session.
            ping_interval=None,
        )
    )


def _errors() -> tuple[type[WebSocketException], type[InvalidStatus]]:
    """Return the errors of the package that a connection may end in.

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        from websockets.exceptions import (  # noqa: PLC0415 - only this bridge
            InvalidStatus,
            WebSocketException,
        )
    except ImportError as error:
        raise MissingExtraError(
            "environment 'openenv' needs the package websockets, which cannot be "
            f"imported ({error}); pip install 'rl-envs[openenv]'"
        ) from error
    return WebSocketException, InvalidStatus


def _socket_address(address: str) -> str:
    scheme, colon, rest = address.partition("://")
    return f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }{colon}{rest}/ws"
