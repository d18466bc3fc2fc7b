"""Requests to the servers, and the errors for their failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rl_models.errors import GenerationError

__all__ = ["Connection", "NoSuchRouteError", "ServerLostError", "gather_all"]

_SHOWN = 300


class ServerLostError(GenerationError):
    """A server could not be reached, or failed; another one may answer."""


class NoSuchRouteError(GenerationError):
    """A server does not know the path of a request."""


class Connection:
    """One server.

    Args:
        address: Its address, without a path.
        session: The session for requests.
        keys: Keys by their use: `api` and `weights`.
    """

    def __init__(
        self, address: str, session: aiohttp.ClientSession, keys: Mapping[str, str]
    ) -> None:
        self.address = address
        self.num_requests = 0
        """Number of requests in progress."""
        self._session = session
        self._keys = keys

    async def get(self, path: str, deadline_s: float) -> dict[str, Any]:
        """Get the JSON of a path; see `post`."""
        return await self._ask("GET", path, None, "api", deadline_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        deadline_s: float,
        key: str = "api",
    ) -> dict[str, Any]:
        """Send a request.

        Args:
            path: Its path and query.
            body: Its JSON; None: it has none.
            deadline_s: How long the answer may take.
            key: The key that it needs.

        Returns:
            The JSON of the answer; empty if there is none.

        Raises:
            ServerLostError: No connection, no answer in time, or a failure there.
            NoSuchRouteError: The server does not know the path.
            GenerationError: The server refuses the request.
        """
        return await self._ask("POST", path, body, key, deadline_s)

    async def _ask(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any] | None,
        key: str,
        deadline_s: float,
    ) -> dict[str, Any]:
        what = f"{verb} {self.address}{path}"
        secret = self._keys.get(key)
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        try:
            async with self._session.request(
                verb,
                self.address + path,
                json=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=deadline_s),
            ) as answer:
                status, body_bytes = answer.status, await answer.read()
        except TimeoutError:
            raise ServerLostError(
                f"{what}: no answer within {deadline_s:g} s; raise "
                "policy.generation.openai.request_deadline_s, or look at the server"
            ) from None
        except aiohttp.ClientError as error:
            raise ServerLostError(
                f"{what}: the server cannot be reached ({error}); start it, or correct "
                "policy.generation.openai.addresses"
            ) from error
        # Not strictly: the answer of another program at this address is shown as is.
        text = body_bytes.decode(errors="replace")
        try:
            found = json.loads(text) if text.strip() else {}
        except ValueError:
            found = {}
            if status < 400:
                raise GenerationError(
                    f"{what}: the answer must be JSON: got {text[:_SHOWN]!r}; is this "
                    "the address of such a server?"
                ) from None
        # 429 is a server that is full: another one may have room.
        if status >= 500 or status == 429:
            raise ServerLostError(f"{what}: {_reason(status, text, found)}")
        if status >= 400:
            kind = NoSuchRouteError if status in (404, 405) else GenerationError
            raise kind(
                f"{what}: refused, {_reason(status, text, found)}{_remedy(status, key)}"
            )
        return found if isinstance(found, dict) else {"results": found}


def _reason(status: int, text: str, found: Any) -> str:
    """Return the status and the server's message."""
    said = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(said, dict):
        said = said.get("message") or said.get("detail") or said
    return f"status {status}: {str(said or text).strip()[:_SHOWN]}"


def _remedy(status: int, key: str) -> str:
    if status not in (401, 403):
        return ""
    name = "api_key_variable" if key == "api" else "weights_key_variable"
    return f"; name the variable that holds its key in policy.generation.openai.{name}"


async def gather_all(calls: list[Any]) -> list[Any]:
    """Wait for all calls; raise the first failure when all have ended."""
    # Not the first failure at once: the other calls would go on without a session.
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
