"""Keys: random secrets that are shown once, and what is stored of them.

```
rlk_4f2a91c03b7e_V2h5...       what the client sends
    |            256 random bits, base64url
    names the key; no secret
```
Stored is a salted digest (BLAKE2b). A slow hash such as scrypt is for secrets that
people choose: nobody can try 2^256 keys, and each request would pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rl_distributed.access.rate_limit import RateLimit
from rl_distributed.access.roles import Role, role_named
from rl_distributed.errors import ConfigError

__all__ = ["AccessKey", "KeyState", "check_key_name", "parse_lifetime", "split_key"]

_FORM = re.compile(r"rlk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[\w.@+-][\w.@+ -]{0,63}", re.ASCII)
_LIFETIME = re.compile(r"([1-9][0-9]{0,5})(min|h|d)")
_LIFETIME_UNITS = {"min": "minutes", "h": "hours", "d": "days"}
_SALT_BYTES = 16

KeyState = str
"""`valid`, `expired` or `revoked`."""


@dataclass(frozen=True)
class AccessKey:
    """Stored record of a key, without the key itself."""

    id: str
    """Identifies it in lists and logs; part of the key, and not secret."""
    name: str
    """Its owner, a person or a program."""
    role: Role
    """Role, which decides what it permits."""
    created: str
    """When it was made, in UTC, as ISO 8601."""
    salt: str
    """Random bytes that go into the digest, as hexadecimal digits."""
    digest: str
    """BLAKE2b of the secret with the salt, as hexadecimal digits."""
    expires: str | None = None
    """When it ends, in UTC, as ISO 8601; None: never."""
    rate: str | None = None
    """Requests per time at each listener, such as `60/min`; None: unlimited."""
    revoked: str | None = None
    """When it was revoked; None: it was not."""

    @classmethod
    def generate(
        cls,
        name: str,
        role: Role,
        *,
        lifetime: timedelta | None = None,
        rate: RateLimit | None = None,
    ) -> tuple[AccessKey, str]:
        """Generate a key.

        Args:
            name: Name of the person or program that receives it.
            role: Role, which decides what it permits.
            lifetime: Time until it expires; None: until it is revoked.
            rate: Requests per time; None: unlimited.

        Returns:
            The record to store, and the key, which cannot be computed from it.
        """
        identity, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        salt = secrets.token_bytes(_SALT_BYTES)
        now = datetime.now(UTC)
        stored = cls(
            id=identity,
            name=check_key_name(name),
            role=role_named(role),
            created=_shown(now),
            salt=salt.hex(),
            digest=_digest(secret, salt).hex(),
            expires=None if lifetime is None else _shown(now + lifetime),
            rate=None if rate is None else str(rate),
        )
        return stored, f"rlk_{identity}_{secret}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AccessKey:
        """Read what `to_dict` returned.

        Raises:
            ConfigError: A field is wrong.
            TypeError: One is missing or unknown.
        """
        key = cls(**data)
        check_key_name(key.name)
        role_named(key.role)
        if key.rate is not None:
            RateLimit.parse(key.rate)
        try:
            bytes.fromhex(key.salt), bytes.fromhex(key.digest)
            for moment in (key.expires, key.revoked):
                # `state` compares it with an aware time; a naive one would raise there.
                if moment is not None and datetime.fromisoformat(moment).tzinfo is None:
                    raise ValueError("a time without its zone")
        except ValueError as error:
            raise ConfigError(f"key {key.id!r} is damaged: {error}") from None
        return key

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def public(self, now: datetime | None = None) -> dict[str, Any]:
        """Return what a list may show, as JSON values: no salt and no digest."""
        shown = self.to_dict()
        del shown["salt"], shown["digest"]
        return {**shown, "state": self.state(now)}

    def fits(self, secret: str) -> bool:
        """Return whether a secret is the one of this key, in constant time."""
        found = _digest(secret, bytes.fromhex(self.salt))
        return hmac.compare_digest(found, bytes.fromhex(self.digest))

    def state(self, now: datetime | None = None) -> KeyState:
        """Return `valid`, `expired` or `revoked`.

        Args:
            now: The time to compare with; None: the present.
        """
        # First: a key that was revoked stays so after it would have expired.
        if self.revoked is not None:
            return "revoked"
        now = now or datetime.now(UTC)
        if self.expires is not None and now >= datetime.fromisoformat(self.expires):
            return "expired"
        return "valid"

    def revoke(self) -> AccessKey:
        """Return it, revoked now."""
        return replace(self, revoked=_shown(datetime.now(UTC)))


def split_key(text: str) -> tuple[str, str] | None:
    """Return id and secret of a key; None if a text does not have its form."""
    match = _FORM.fullmatch(text)
    return None if match is None else (match[1], match[2])


def check_key_name(name: object) -> str:
    """Return the name of a key.

    Raises:
        ConfigError: It is empty, too long or holds other characters.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            "the name of a key must have 1 to 64 letters, digits and . _ @ + -, or "
            f"spaces between them: got {name!r}"
        )
    return name


def parse_lifetime(text: str) -> timedelta:
    """Read a time such as `30d`, `12h` or `90min`.

    Raises:
        ConfigError: It has another form.
    """
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"a lifetime must be like 30d, 12h or 90min: got {text!r}; leave it out "
            "for a key that does not expire"
        )
    return timedelta(**{_LIFETIME_UNITS[match[2]]: int(match[1])})


def _digest(secret: str, salt: bytes) -> bytes:
    # A header may hold bytes that are not UTF-8; they match no key, and must not
    # raise.
    data = secret.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(
        data, digest_size=32, salt=salt, person=b"rl access key"
    ).digest()


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")
