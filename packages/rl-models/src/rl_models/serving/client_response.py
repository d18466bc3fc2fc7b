"""The answer to a client: whole, or a stream that never ends without a reason."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from rl_models.serving.errors import ApiError, error_body, error_event

__all__ = ["ClientGoneError", "Outgoing"]


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Outgoing:
    """The answer to one request.

    Args:
        request: The request.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._stream: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has seen a part of the answer."""
        return self._stream is not None

    async def write(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Send whole events, with the headers before the first.

        Raises:
            ClientGoneError: The client has closed the connection.
        """
        # Prepared late: until the first byte, an error can still set the status.
        try:
            if self._stream is None:
                stream = web.StreamResponse(headers=dict(headers))
                await stream.prepare(self._request)
                self._stream = stream
            await self._stream.write(data)
        except ConnectionError as error:
            raise ClientGoneError from error

    async def finish(self) -> web.StreamResponse:
        """End a stream that has begun."""
        assert self._stream is not None
        try:
            await self._stream.write_eof()
        except ConnectionError as error:
            raise ClientGoneError from error
        return self._stream

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Send an error to the client, as an event if the answer has begun."""
        if self._stream is None:
            return web.json_response(error_body(error), status=error.status)
        await self.write(error_event(error), {})
        return await self.finish()
