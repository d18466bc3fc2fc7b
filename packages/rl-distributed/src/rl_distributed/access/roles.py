"""Roles of keys, and the permissions of each.

| role | may |
|---|---|
| `viewer` | look at metrics, pages and states (`view`) |
| `user` | the same, and use a model (`infer`) |
| `operator` | the same, and change what runs: weights, pause, stop, checkpoints (`operate`) |
| `admin` | the same, and make and revoke keys (`keys`) |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from rl_distributed.errors import ConfigError

__all__ = ["PERMISSIONS", "ROLES", "Permission", "Role", "role_named"]

Permission = Literal["view", "infer", "operate", "keys"]
"""What a route asks for."""

Role = Literal["viewer", "user", "operator", "admin"]
"""What a key is given."""

PERMISSIONS: tuple[Permission, ...] = get_args(Permission)

ROLES: Mapping[Role, frozenset[Permission]] = {
    role: frozenset(PERMISSIONS[: index + 1])
    for index, role in enumerate(get_args(Role))
}
"""Permissions of each role; each has those of the one before it."""


def role_named(name: object) -> Role:
    """Return a role by its name.

    Raises:
        ConfigError: There is none of that name.
    """
    for role in ROLES:
        if role == name:
            return role
    raise ConfigError(f"role must be one of {', '.join(ROLES)}: got {name!r}")
