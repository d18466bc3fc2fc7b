"""Routes by which an admin lists, makes and revokes keys of a listener."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from rl_distributed.access.access_key import parse_lifetime
from rl_distributed.access.http_app import (
    Route,
    current_caller,
    error_response,
    json_object,
)
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.rate_limit import RateLimit
from rl_distributed.access.roles import role_named
from rl_distributed.errors import ConfigError, DistributedError

__all__ = ["KEYS_PATH", "key_routes"]

KEYS_PATH = "/rl/keys"
_FIELDS = {"name", "role", "expires", "rate"}


def key_routes(file: KeyFile | None) -> list[Route]:
    """Return the routes.

    Args:
        file: The keys; None: the listener has no file, and the routes say so.
    """

    async def listed(request: web.Request) -> web.StreamResponse:
        keys = await asyncio.to_thread(_present(file).read)
        return web.json_response({"keys": [key.public() for key in keys]})

    async def create(request: web.Request) -> web.StreamResponse:
        fields = await json_object(request)
        stored, key = await asyncio.to_thread(_create, _present(file), fields)
        return web.json_response({**stored, "key": key})

    async def revoke(request: web.Request) -> web.StreamResponse:
        fields = await json_object(request)
        which = fields.get("key")
        if not isinstance(which, str) or set(fields) != {"key"}:
            raise web.HTTPBadRequest(reason="The body must be {key: id or name}")
        revoked = await asyncio.to_thread(
            _present(file).revoke, which, by=str(current_caller.get())
        )
        return web.json_response(revoked.public())

    return [
        Route("GET", KEYS_PATH, "keys", _answering(listed)),
        Route("POST", KEYS_PATH, "keys", _answering(create)),
        Route("POST", f"{KEYS_PATH}/revoke", "keys", _answering(revoke)),
    ]


def _present(file: KeyFile | None) -> KeyFile:
    if file is None:
        raise ConfigError("this listener was started without a file of keys")
    return file


def _create(file: KeyFile, fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    unknown = set(fields) - _FIELDS
    texts = {name: value for name, value in fields.items() if value is not None}
    if unknown or not all(isinstance(value, str) for value in texts.values()):
        raise ConfigError(f"a key has the texts {', '.join(sorted(_FIELDS))}")
    expires, rate = texts.get("expires"), texts.get("rate")
    stored, key = file.create(
        texts.get("name", ""),
        role_named(texts.get("role")),
        lifetime=None if expires is None else parse_lifetime(expires),
        rate=None if rate is None else RateLimit.parse(rate),
        by=str(current_caller.get()),
    )
    return stored.public(), key


def _answering(handler: Any) -> Any:
    """Answer errors of the file of keys without its path."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            found: web.StreamResponse = await handler(request)
        except ConfigError as error:
            return error_response(400, "bad_request", str(error))
        except DistributedError:
            return error_response(
                500, "keys_unusable", "The file of keys cannot be used; see the log."
            )
        return found

    return answer
