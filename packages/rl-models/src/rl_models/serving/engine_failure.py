"""Reports of an engine's failure from a replica to the router."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from rl_models.serving.errors import ApiError, error_event

__all__ = ["CAUSE", "REQUEST_ID_HEADER", "EngineFailure", "is_failure"]

logger = logging.getLogger(__name__)

CAUSE = "rl_cause"
"""Key beside `error`: the engine's own words, a list of lines."""
REQUEST_ID_HEADER = "x-request-id"
"""Names a request to replicas, which log it, and to clients."""
_EVENT = b'data: {"error"'


def is_failure(status: int) -> bool:
    """Return whether a status means that the engine failed, and not the request."""
    # 501 refuses a request that the engine does not support; 503 may be tried again.
    return status >= 500 and status not in (501, 503)


class EngineFailure:
    """Logs why requests failed, and tells clients that they did.

    Args:
        request_id: Names the request.
        what: Method and path of the request.
        replica: Number of the replica that it went to.
    """

    def __init__(self, request_id: str, what: str, replica: int) -> None:
        self._request_id, self._what, self._replica = request_id, what, replica

    def report(self, status: int, body: bytes) -> ApiError:
        """Log a failed answer; return the error for the client."""
        # Only the log gets the engine's words, which may show paths or prompts.
        lines = "\n  ".join(_words(body))
        logger.error(
            "%s failed on replica %d with status %d (request %s). The engine says:\n"
            "  %s",
            self._what,
            self._replica,
            status,
            self._request_id,
            lines or "nothing",
        )
        return ApiError(
            status,
            f"The engine failed on this request ({self._request_id}); the terminal "
            "and the log of the server say why.",
            "engine_error",
        )

    def checked(self, events: bytes) -> bytes:
        """Return events of a stream without the causes, which are logged."""
        # Most events pass here, so look before splitting.
        if _EVENT not in events or CAUSE.encode() not in events:
            return events
        parts = events.split(b"\n\n")
        return b"\n\n".join(map(self._checked_event, parts))

    def _checked_event(self, event: bytes) -> bytes:
        if not event.startswith(_EVENT) or CAUSE.encode() not in event:
            return event
        error = self.report(500, event.removeprefix(b"data: "))
        return error_event(error).rstrip(b"\n")


def _words(body: bytes) -> Sequence[str]:
    text = body.decode("utf-8", "replace").strip()
    try:
        answer = json.loads(text)
    except ValueError:
        return [text] if text else []
    cause = answer.get(CAUSE) if isinstance(answer, dict) else None
    if isinstance(cause, list):
        # Engines log the same words in more than one place.
        return list(dict.fromkeys(str(line).replace("\n", "\n  ") for line in cause))
    error = answer.get("error") if isinstance(answer, dict) else None
    return [str(error.get("message") if isinstance(error, dict) else text)]
