"""Client of a listener: requests to its address, with a key.

Each request carries a number that is used once and the time, so that a copy of one
that changes something has no effect. Keys are sent to other machines over TLS only.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_distributed.access.door import is_loopback
from rl_distributed.access.listener_tls import own_authority
from rl_distributed.access.replay import NONCE_HEADER, TIME_HEADER
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    SecurityError,
)

__all__ = ["AUTHORITY_VARIABLE", "KEY_VARIABLE", "ListenerClient", "is_address"]

KEY_VARIABLE, AUTHORITY_VARIABLE = "RL_KEY", "RL_CA_FILE"
"""Name the key, and the file of the certificate that is trusted."""
# Bounds the memory that an answer from a wrong address can take.
_LARGEST = 16 << 20
# Apart from the deadline of an answer: a listener that is there accepts at once.
_CONNECT_S = 10.0


def is_address(text: str) -> bool:
    """Return whether a text is an address, and not the name of a folder."""
    return text.startswith(("http://", "https://"))


class ListenerClient:
    """Sends requests to one listener.

    Args:
        url: Its address, such as `https://10.0.0.1:9500`.
        key: The key; None: that of `RL_KEY`.
        authority: File of the certificate that is trusted; None: `RL_CA_FILE`, else
            that of this user's own listeners, where there is one, and those of the
            system.

    Raises:
        ConfigError: The address is invalid.
        SecurityError: There is no key, or it would be sent to another machine in the
            clear.
    """

    def __init__(
        self, url: str, *, key: str | None = None, authority: Path | None = None
    ) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not an address: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"an address must be like https://HOST:PORT: got {url!r}")
        if parts.scheme == "http" and not is_loopback(host):
            raise SecurityError(
                f"{url} would send the key in the clear: start the listener with tls, "
                "and give an address that begins with https"
            )
        self._key = key or os.environ.get(KEY_VARIABLE, "")
        # http.client refuses other characters in a header, and its error shows the key.
        if not self._key or not self._key.isascii() or not self._key.isprintable():
            raise SecurityError(
                f"a key is needed for {url}: set {KEY_VARIABLE} to the one that rl "
                "keys create has shown"
            )
        self._host, self._port = host, port
        self._base, self._url = parts.path.rstrip("/"), url
        self._tls = _context(authority) if parts.scheme == "https" else None

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline_s: float = 60.0,
    ) -> dict[str, Any]:
        """Send a request; return the JSON object of the answer.

        Args:
            method: `GET` or `POST`.
            path: Path of a route.
            body: JSON values.
            deadline_s: How long the listener may take.

        Raises:
            SecurityError: It does not admit the key.
            ConfigError: It refuses for another reason, or nothing listens there.
            DeadlineExceededError: It did not answer in time.
            DistributedError: The answer is not that of a run or a server.
        """
        headers = {
            "Authorization": f"Bearer {self._key}",
            NONCE_HEADER: secrets.token_hex(16),
            TIME_HEADER: f"{time.time():.3f}",
        }
        data = None
        if body is not None:
            data = json.dumps(dict(body)).encode()
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(deadline_s)
            connection.request(method, self._base + path, body=data, headers=headers)
            reply = connection.getresponse()
            content = reply.read(_LARGEST)
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._url} did not answer within {deadline_s:g} s"
            ) from None
        # Before OSError, of which it is a subclass.
        except ssl.SSLCertVerificationError as error:
            raise SecurityError(
                f"the certificate of {self._url} is not trusted "
                f"({error.verify_message}): name the ca.crt of the listener's "
                f"certificate in {AUTHORITY_VARIABLE}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no run or server of rl answers at {self._url}: "
                f"{error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        return self._answer(reply.status, content)

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(
                self._host, self._port, timeout=_CONNECT_S
            )
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=_CONNECT_S, context=self._tls
        )

    def _answer(self, status: int, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content)
            if status == 200 and isinstance(found, dict):
                return found
            message = str(found["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise DistributedError(
                f"{self._url} answered with status {status} and no JSON that is "
                "understood: is it the address of a run or a server of rl?"
            ) from None
        if status in (401, 403, 429):
            raise SecurityError(f"{self._url} refuses: {message}")
        # The run's own deadline, and not that of this connection.
        if status == 504:
            raise DeadlineExceededError(message)
        raise ConfigError(f"{self._url}: {message}")


def _context(authority: Path | None) -> ssl.SSLContext:
    named = os.environ.get(AUTHORITY_VARIABLE, "")
    path = authority or (Path(named) if named else None)
    try:
        if path is not None:
            return ssl.create_default_context(cafile=path)
        context = ssl.create_default_context()
        if own_authority().is_file():
            context.load_verify_locations(cafile=own_authority())
    except (OSError, ssl.SSLError) as error:
        shown = path or own_authority()
        raise SecurityError(
            f"the certificate {shown} cannot be read: {error}"
        ) from error
    return context
