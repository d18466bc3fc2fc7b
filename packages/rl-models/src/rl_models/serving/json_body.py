"""Bodies of requests: JSON objects of a bounded size."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from rl_models.serving.errors import ApiError

__all__ = ["read_json", "too_large"]


async def read_json(
    request: web.Request, max_bytes: int, deadline_s: float
) -> tuple[bytes, dict[str, Any]]:
    """Return the body of a request, as it came and read.

    Args:
        request: The request, of an application with this `client_max_size`.
        max_bytes: Largest body.
        deadline_s: How long it may take to come.

    Raises:
        ApiError: It is no JSON object, too large, or late.
    """
    if request.content_type != "application/json":
        raise ApiError(
            400,
            f"Content-Type must be application/json: got {request.content_type!r}.",
            "bad_content_type",
        )
    if (request.content_length or 0) > max_bytes:
        # Known in advance, so nothing is read. A chunked body is read up to the limit.
        raise too_large(max_bytes)
    try:
        async with asyncio.timeout(deadline_s):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, "The body did not come in time.", "timeout") from None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:  # deep nesting recurses
        raise ApiError(400, f"The body is no JSON: {error}.", "bad_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.", "bad_json")
    return body, fields


def too_large(max_bytes: int) -> ApiError:
    """Return the error about a body that is too large."""
    return ApiError(
        413,
        f"The body is larger than {max_bytes} bytes; send less, or start the server "
        "with a larger max_body_bytes.",
        "body_too_large",
    )
