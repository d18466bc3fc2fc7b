"""Sandboxes by name, from here and from other packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_distributed.errors import ConfigError
from rl_distributed.registry import Registry
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.runs import SandboxLevel

__all__ = ["open_sandbox", "sandbox_registry"]

sandbox_registry: Registry[Callable[..., Sandbox]] = Registry("rl.sandboxes", "sandbox")
"""Sandboxes by name; other packages use the entry-point group `rl.sandboxes`. Each
takes `num_slots` and `level`, and settings of its own by name."""


def open_sandbox(
    name: str = "local",
    settings: Mapping[str, Any] | None = None,
    *,
    num_slots: int = 1,
    level: SandboxLevel = SandboxLevel.LANDLOCK,
) -> Sandbox:
    """Start a sandbox by name.

    Args:
        name: `local`, `container`, `remote`, or one of another package.
        settings: What that one takes, beside the following.
        num_slots: Programs that run at the same time.
        level: Refuse to run below this level.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: The settings do not fit.
        SandboxError: The level cannot be had here.
    """
    factory = sandbox_registry.get(name)
    given = dict(settings or {})
    common = {"num_slots": num_slots, "level": level}
    try:
        # Bound before the call, so that a TypeError from inside the constructor is not
        # mistaken for wrong settings.
        inspect.signature(factory).bind(**common, **given)
    except TypeError as error:
        known = [n for n in inspect.signature(factory).parameters if n not in common]
        raise ConfigError(
            f"settings of sandbox {name!r}: {error}; they may be {', '.join(known)}"
        ) from None
    made = factory(**common, **given)
    # Checked again: a sandbox of another package may not do it itself.
    if made.level < level:
        made.close()
        raise ConfigError(
            f"sandbox {name!r} must reach level {level.name}: it reaches "
            f"{made.level.name}"
        )
    return made
