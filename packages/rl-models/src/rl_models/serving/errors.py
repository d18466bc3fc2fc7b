"""Errors as OpenAI's interface writes them, in a body or as an event of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["ApiError", "error_body", "error_event"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """The error that a client gets instead of an answer.

    Args:
        status: HTTP status.
        message: What is wrong, and what to do.
        code: Short name for programs.
        headers: Of the answer.
        details: Further fields of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        headers: Mapping[str, str] | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.details = details


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _TYPES.get(error.status, "server_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": None,
            "code": error.code,
            **error.details,
        }
    }


def error_event(error: ApiError) -> bytes:
    """Get an error as the last event of a stream; clients raise when they read it."""
    return f"data: {json.dumps(error_body(error))}\n\n".encode()
