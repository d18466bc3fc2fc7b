"""The door of a listener: it admits a request, or refuses it with a reason.

Rules are checked in this order; the first one that a request breaks refuses it:

| rule | status | reason |
|---|---|---|
| no page of another origin, except a link that opens a page | 403 | `other_origin` |
| without a key: asked for by the name of this machine | 403 | `other_host` |
| a valid key of the listener | 401 | `key_missing`, `key_malformed`, `key_unknown`, `key_expired`, `key_revoked` |
| the key's role has what the route needs | 403 | `role` |
| the key's rate | 429 | `rate` |
| what changes something comes once | 403, 429 | `nonce_missing`, `too_old`, `replayed`, `too_many` |

It depends on no HTTP library, so that every server can use it.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rl_distributed.access.access_key import AccessKey, split_key
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.rate_limit import RateLimit, TokenBucket
from rl_distributed.access.refusals import RequestCounts
from rl_distributed.access.replay import ReplayGuard
from rl_distributed.access.roles import ROLES, Permission

__all__ = [
    "AccessRequest",
    "Caller",
    "Door",
    "FixedKey",
    "Refusal",
    "host_is_loopback",
    "is_loopback",
]

_CHANGING: frozenset[Permission] = frozenset(("operate", "keys"))
_REVOKED_OR_EXPIRED = {
    "expired": "The key has expired; ask for a new one.",
    "revoked": "The key was revoked; ask for a new one.",
}


@dataclass(frozen=True)
class AccessRequest:
    """Parts of a request that the door checks."""

    what: str
    """Method and path, without its query."""
    client: str = ""
    """Address of the sender."""
    authorization: str = ""
    """The header `Authorization`."""
    query_key: str = ""
    """A key in the address, at listeners that accept one there."""
    host: str = ""
    """The header `Host`."""
    origin: str | None = None
    """The header `Origin`; only browsers send it."""
    fetch_site: str | None = None
    """The header `Sec-Fetch-Site`; likewise."""
    opens_page: bool = False
    """Whether a browser opens a page of the listener in a tab, as by a link."""
    nonce: str = ""
    """The header `X-RL-Nonce`."""
    time: str = ""
    """The header `X-RL-Time`."""

    @property
    def key(self) -> str:
        """The key, from the header or else from the address; "" without one."""
        scheme, _, text = self.authorization.partition(" ")
        return text.strip() if scheme.lower() == "bearer" else self.query_key


@dataclass(frozen=True)
class Caller:
    """A caller that was admitted."""

    name: str = "anonymous"
    """Name of the key, for records."""
    key_id: str = ""
    """Its id; "" for a key that is not from a file of keys."""
    permissions: frozenset[Permission] = frozenset()
    """What it permits."""

    def __str__(self) -> str:
        return f"{self.name} (key {self.key_id})" if self.key_id else self.name


@dataclass(frozen=True)
class FixedKey:
    """A key that a listener was started with, besides those of a file."""

    name: str
    """Its name in logs and metrics."""
    secret: str = field(repr=False)
    """The key."""
    permissions: frozenset[Permission]
    """What it permits."""


class Refusal(Exception):
    """A request that is not admitted.

    Args:
        status: HTTP status.
        reason: A short name, which metrics count by.
        message: What is wrong, and what to do; nothing that the sender does not know.
        retry_after_s: When to come back.
    """

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason
        self.retry_after_s = retry_after_s


class Door:
    """Admits requests by their keys.

    Args:
        listener: Name of the listener in logs and metrics.
        key_file: Keys with roles; None: there are only the fixed ones.
        fixed: Keys that the listener was started with.
        anonymous: Permissions of requests without a key.
        is_loopback: Whether only programs of this machine reach it. A request without a
            key must then name this machine as its host, because any page in a browser
            can give a name of its own to a loopback address (DNS rebinding).
        own_host_only: Require the same of requests with a key.
        replay: Refuses repeated requests that change something; None: nothing does.
        issued: Returns the holder of a key that the listener itself has issued, or None
            for another text.
        counts: Counts of another door of the same listener; None: counts of its own.
    """

    def __init__(
        self,
        listener: str,
        *,
        key_file: KeyFile | None = None,
        fixed: Sequence[FixedKey] = (),
        anonymous: Collection[Permission] = (),
        own_host_only: bool = False,
        is_loopback: bool = True,
        replay: ReplayGuard | None = None,
        issued: Callable[[str], Caller | None] | None = None,
        counts: RequestCounts | None = None,
    ) -> None:
        self.counts = counts or RequestCounts(listener)
        self.key_file = key_file
        self._fixed = [(key, _digest(key.secret)) for key in fixed]
        self._anonymous = frozenset(anonymous)
        self._own_host_only, self._is_loopback = own_host_only, is_loopback
        self._replay, self._issued = replay, issued
        self._buckets: dict[str, TokenBucket] = {}

    def admit(self, request: AccessRequest, needs: Permission | None) -> Caller:
        """Return the sender of a request.

        Args:
            request: The request.
            needs: Permission that its route needs; None: anybody, from any origin.

        Raises:
            Refusal: It is not admitted; that is counted and logged.
        """
        key: AccessKey | None = None
        try:
            if needs is None:
                caller = Caller()
            else:
                self._check_origin(request)
                caller, key = self._identify(request, needs)
                self._check_caller(request, caller, key, needs)
        except Refusal as refusal:
            # Logged with the key's name only where the secret fits; otherwise anybody
            # could put refusals down to another's key, whose id is no secret.
            known = key or self._known_key(request)
            shown = f"{known.id} {known.name}" if known else ""
            self.counts.refused(refusal.reason, request.what, request.client, shown)
            raise
        self.counts.admitted()
        return caller

    def _identify(
        self, request: AccessRequest, needs: Permission
    ) -> tuple[Caller, AccessKey | None]:
        is_open = needs in self._anonymous
        if self._is_loopback and (is_open or self._own_host_only):
            self._check_host(request)
        if is_open:
            return Caller(permissions=self._anonymous), None
        if not request.key:
            raise Refusal(
                401,
                "key_missing",
                "A key is needed; send it as 'Authorization: Bearer KEY'.",
            )
        if (fixed := self._fixed_key(request.key)) is not None:
            return Caller(fixed.name, "", fixed.permissions), None
        if self._issued and (holder := self._issued(request.key)) is not None:
            return holder, None
        key = self._stored_key(request.key)
        return Caller(key.name, key.id, ROLES[key.role]), key

    def _fixed_key(self, text: str) -> FixedKey | None:
        # Digests have one length, and all are compared: neither a key nor its length
        # can be guessed by timing.
        given = _digest(text)
        found = [key for key, own in self._fixed if hmac.compare_digest(given, own)]
        return found[0] if found else None

    def _stored_key(self, text: str) -> AccessKey:
        """Return the key of the file that a text is.

        Raises:
            Refusal: It is unknown, expired or revoked.
        """
        parts = split_key(text)
        if parts is None:
            # Fixed keys have any form, so without a file none is malformed.
            reason = "key_malformed" if self.key_file is not None else "key_unknown"
            raise Refusal(401, reason, "The key is not one of this listener's.")
        key = None if self.key_file is None else self.key_file.find(parts[0])
        if key is None or not key.fits(parts[1]):
            raise Refusal(401, "key_unknown", "The key is not one of this listener's.")
        # Told only to somebody who has the key.
        state = key.state()
        if state != "valid":
            raise Refusal(401, f"key_{state}", _REVOKED_OR_EXPIRED[state])
        return key

    def _known_key(self, request: AccessRequest) -> AccessKey | None:
        """Return the key of a refused request, if its sender really has it."""
        parts = split_key(request.key)
        if parts is None or self.key_file is None:
            return None
        key = self.key_file.find(parts[0])
        return key if key is not None and key.fits(parts[1]) else None

    def _check_caller(
        self,
        request: AccessRequest,
        caller: Caller,
        key: AccessKey | None,
        needs: Permission,
    ) -> None:
        if needs not in caller.permissions:
            role = f"the role {key.role}" if key else f"the {caller.name}"
            raise Refusal(
                403, "role", f"This needs the permission '{needs}', which {role} lacks."
            )
        if key is not None and key.rate is not None:
            self._check_rate(key, RateLimit.parse(key.rate))
        if self._replay is not None and needs in _CHANGING:
            # Per key, so that the numbers of one client cannot use up those of another.
            whose = caller.key_id or caller.name
            problem = self._replay.problem(whose, request.nonce, request.time)
            if problem is not None:
                reason, message = problem
                raise Refusal(429 if reason == "too_many" else 403, reason, message)

    def _check_rate(self, key: AccessKey, limit: RateLimit) -> None:
        bucket = self._buckets.get(key.id)
        # The rate of a key may change in its file while the listener runs.
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[key.id] = TokenBucket(limit)
        wait_s = bucket.take()
        if wait_s:
            raise Refusal(
                429,
                "rate",
                f"The key may send {limit} requests; come back in {wait_s:.0f} s.",
                retry_after_s=wait_s,
            )

    @staticmethod
    def _check_origin(request: AccessRequest) -> None:
        """Refuse pages of other origins; programs send neither header.

        A link that opens a page is no such request: the page of another origin cannot
        read what is shown, and nothing changes. The key is still needed.
        """
        if request.opens_page and request.origin is None:
            return
        site = request.fetch_site
        is_other = site is not None and site not in ("none", "same-origin")
        if request.origin is not None:
            try:
                found = urlsplit(request.origin)
                is_other |= found.scheme not in ("http", "https")
                is_other |= found.netloc != request.host
            except ValueError:
                is_other = True
        if is_other:
            raise Refusal(403, "other_origin", "A page of another origin may not ask.")

    @staticmethod
    def _check_host(request: AccessRequest) -> None:
        if not host_is_loopback(request.host):
            raise Refusal(
                403,
                "other_host",
                "Ask for 127.0.0.1 or localhost: this listens for programs of its own "
                "machine only.",
            )


def host_is_loopback(header: str) -> bool:
    """Return whether the host that a request names is this machine.

    Args:
        header: The header `Host`.
    """
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(text: str) -> bytes:
    # Headers may hold bytes that are not UTF-8; they must be refused, not raise.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
