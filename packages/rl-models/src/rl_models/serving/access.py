"""Access control: the keys for sending requests and for changing the weights.

| | who may sample | who may change weights |
|---|---|---|
| with an API key | who has it | who has the weights key |
| without one | programs of this machine | who has the weights key |
| without a weights key | | nobody |
"""

from __future__ import annotations

import hashlib
import hmac

from aiohttp import web

from rl_models.serving.config import is_loopback
from rl_models.serving.errors import ApiError

__all__ = ["Access", "key_digest", "token_digest"]


class Access:
    """Admits or refuses requests.

    Without a key the server listens on loopback, where any page in a browser could
    reach it under a name of its own (DNS rebinding); so the requested name must be one
    of this machine. A page cannot send JSON to another origin without a preflight
    request, which the router does not answer.

    Args:
        key: The API key; None: none is needed.
        weights_key: The key for changing weights; None: they cannot be changed.
    """

    def __init__(self, key: str | None, weights_key: str | None = None) -> None:
        self._digest = None if key is None else key_digest(key)
        self._weights_digest = None if weights_key is None else key_digest(weights_key)

    def check(self, request: web.Request) -> None:
        """Admit a request that does not change weights.

        Raises:
            ApiError: It lacks the key, or was sent to another name.
        """
        if self._digest is None:
            self._check_name(request)
        elif not _fits(request, self._digest):
            raise _refusal(
                request,
                "API key",
                "It is what the server was started with (--api-key or RL_API_KEY).",
            )

    def check_weights(self, request: web.Request) -> None:
        """Admit a request that changes weights.

        Raises:
            ApiError: It lacks the weights key, or there is none.
        """
        if self._digest is None:
            self._check_name(request)
        if self._weights_digest is None:
            # Without the API key, not even this may be learned.
            self.check(request)
            raise ApiError(
                403,
                "The server takes no weights over HTTP; whoever runs it can start it "
                "with --weights-key (or RL_WEIGHTS_KEY) and --weights-root.",
                "weights_off",
            )
        if _fits(request, self._weights_digest):
            return
        if self._digest is not None and _fits(request, self._digest):
            raise ApiError(
                403,
                "The API key does not change weights; send the weights key "
                "(--weights-key or RL_WEIGHTS_KEY) as 'Authorization: Bearer KEY'.",
                "weights_key_needed",
            )
        raise _refusal(
            request,
            "weights key",
            "It is what the server was started with (--weights-key or "
            "RL_WEIGHTS_KEY), and not the API key.",
        )

    @staticmethod
    def _check_name(request: web.Request) -> None:
        name = request.url.host or ""
        if not is_loopback(name):
            raise ApiError(
                403,
                f"The server listens on loopback without an API key, and was asked for "
                f"as {name!r}; call it 127.0.0.1 or localhost, or start it with "
                "--api-key.",
                "forbidden_host",
            )


def _fits(request: web.Request, digest: bytes) -> bool:
    # Digests have equal lengths, and comparing them takes constant time: neither the
    # key nor its length can be guessed by timing.
    return hmac.compare_digest(token_digest(request), digest)


def token_digest(request: web.Request) -> bytes:
    """Return the digest of the key that a request brings; that of "" without one."""
    return key_digest(_token(request))


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _refusal(request: web.Request, what: str, which: str) -> ApiError:
    said = "is wrong" if _token(request) else "is missing"
    return ApiError(
        401,
        f"The {what} {said}; send it as 'Authorization: Bearer KEY'. {which}",
        f"invalid_{what.replace(' ', '_').lower()}",
    )


def key_digest(text: str) -> bytes:
    """Return what a key is compared by."""
    # Headers may hold bytes that are no UTF-8; they must be refused and not fail.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
