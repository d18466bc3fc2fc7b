"""What a replica tells the router of a request on which its engine failed."""

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
    """Whether a status means that the engine failed, and not the request."""
    # 501: the engine refuses what it was not made for. 503: it may be asked again.
    return status >= 500 and status not in (501, 503)


class EngineFailure:
    """Logs why requests failed, and has clients told that they did.

    Args:
        request_id: Names the request.
        what: Method and path of the request.
        replica: Number of the replica that it went to.
    """

    def __init__(self, request_id: str, what: str, replica: int) -> None:
        self._request_id, self._what, self._replica = request_id, what, replica

    def report(self, status: int, body: bytes) -> ApiError:
        """Log a failed answer; gives what the client is told."""
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
        """Events of a stream, with the cause taken out of those that have one."""
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
