"""Access control of a server: its door, with refusals as OpenAI's interface has them.

| | who may sample | who may change weights |
|---|---|---|
| with an API key | who has it | who has the weights key |
| without one | programs of this machine | who has the weights key |
| without a weights key | | nobody |
| with a file of keys | besides, its users | besides, its operators |
"""

from __future__ import annotations

import hashlib

from aiohttp import web

from rl_distributed.access.door import AccessRequest, Caller, Door, FixedKey, Refusal
from rl_distributed.access.http_app import access_request, refusal_headers
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.roles import ROLES, Permission
from rl_models.serving.errors import ApiError

__all__ = ["Access", "key_digest", "token_digest"]

_API_KEY, _WEIGHTS_KEY = "API key", "weights key"
_WHICH = {
    _API_KEY: "It is what the server was started with (--api-key or RL_API_KEY).",
    _WEIGHTS_KEY: "It is what the server was started with (--weights-key or "
    "RL_WEIGHTS_KEY), and not the API key.",
}
_OF_A_FILE = (
    "It is one of rl keys create, from the file that the server reads (--keys)."
)


class Access:
    """Admits or refuses requests.

    Without a key the server listens on loopback, and the requested name must be one of
    this machine. A page cannot send JSON to another origin without a preflight
    request, which the router does not answer.

    Args:
        key: The API key; None: none is needed, unless there is a file of keys.
        weights_key: The key for changing weights; None: only keys of the file may.
        key_file: Keys with roles; None: there are none.
        is_loopback: Whether only programs of this machine reach the server.
    """

    def __init__(
        self,
        key: str | None,
        weights_key: str | None = None,
        *,
        key_file: KeyFile | None = None,
        is_loopback: bool = True,
    ) -> None:
        fixed = []
        if key is not None:
            fixed.append(FixedKey(_API_KEY, key, ROLES["user"]))
        if weights_key is not None:
            # Not the operator's role: it changes weights, and nothing else.
            fixed.append(FixedKey(_WEIGHTS_KEY, weights_key, frozenset(("operate",))))
        self._is_open = key is None and key_file is None
        self._takes_weights = weights_key is not None or key_file is not None
        self._has_file = key_file is not None
        self.door = Door(
            "serve",
            key_file=key_file,
            fixed=fixed,
            anonymous=("view", "infer") if self._is_open else (),
            own_host_only=self._is_open,
            is_loopback=is_loopback,
        )
        """Also counts what was refused."""

    def check(self, request: web.Request, needs: Permission | None) -> Caller:
        """Return who sent a request.

        Args:
            request: The request.
            needs: What its route needs.

        Raises:
            ApiError: It is not admitted.
        """
        seen = access_request(request)
        if needs == "operate" and not self._takes_weights:
            # Without the API key, not even this may be learned.
            self._admit(seen, "view")
            self.door.counts.refused("off", seen.what, seen.client)
            raise ApiError(
                403,
                "The server takes no weights over HTTP; whoever runs it can start it "
                "with --weights-root, and --weights-key (or RL_WEIGHTS_KEY) or --keys.",
                "weights_off",
            )
        return self._admit(seen, needs)

    def _admit(self, seen: AccessRequest, needs: Permission | None) -> Caller:
        try:
            return self.door.admit(seen, needs)
        except Refusal as refusal:
            raise self._told(refusal, seen, needs) from None

    def _told(
        self, refusal: Refusal, seen: AccessRequest, needs: Permission | None
    ) -> ApiError:
        headers = refusal_headers(refusal)
        if refusal.status == 401:
            if refusal.reason in ("key_expired", "key_revoked"):
                code = f"invalid_{'_'.join(_API_KEY.lower().split())}"
                return ApiError(401, str(refusal), code, headers=headers)
            what = _WEIGHTS_KEY if needs == "operate" else _API_KEY
            return self._unknown_key(what, seen, headers)
        if refusal.reason == "other_host":
            return ApiError(
                403,
                f"The server listens on loopback without an API key, and was asked for "
                f"as {seen.host!r}; call it 127.0.0.1 or localhost, or start it with "
                "--api-key.",
                "forbidden_host",
            )
        is_fixed = refusal.reason == "role" and not self._has_file
        if is_fixed and needs == "operate":
            return ApiError(
                403,
                "The API key does not change weights; send the weights key "
                "(--weights-key or RL_WEIGHTS_KEY) as 'Authorization: Bearer KEY'.",
                "weights_key_needed",
            )
        if is_fixed and needs != "keys":
            # The weights key, which is no API key.
            return self._unknown_key(_API_KEY, seen, headers)
        return ApiError(refusal.status, str(refusal), refusal.reason, headers=headers)

    def _unknown_key(
        self, what: str, seen: AccessRequest, headers: dict[str, str]
    ) -> ApiError:
        said = "is wrong" if seen.key else "is missing"
        which = _OF_A_FILE if self._has_file else _WHICH[what]
        return ApiError(
            401,
            f"The {what} {said}; send it as 'Authorization: Bearer KEY'. {which}",
            f"invalid_{what.replace(' ', '_').lower()}",
            headers=headers,
        )


def token_digest(request: web.Request) -> bytes:
    """Return the digest of the key that a request brings; that of "" without one."""
    return key_digest(access_request(request).key)


def key_digest(text: str) -> bytes:
    """Return the digest by which a key is compared."""
    # Headers may hold bytes that are no UTF-8; they must be refused and not fail.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
