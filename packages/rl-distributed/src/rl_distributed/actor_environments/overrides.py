"""The user's own choice of environments: the YAML file that `RL_ENV_CONFIG` names.

```yaml
environments:
  "rl-models[vllm]": {python: /opt/engine/bin/python}     # an extra
  my_package.workers: {requirements: ["engine==1.2"]}     # a module and those below
  my_package.workers.Judge: {image: "team/judge:3"}   # one class
```
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_distributed.actor_environments.base import ActorEnvironment
from rl_distributed.actor_environments.existing import (
    ContainerEnvironment,
    DriverEnvironment,
    InterpreterEnvironment,
)
from rl_distributed.actor_environments.packages import (
    InstalledEnvironment,
    OverlayEnvironment,
)
from rl_distributed.config import load_config
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean

__all__ = ["overridden", "user_environments"]

CONFIG_VARIABLE = "RL_ENV_CONFIG"
# The key that chooses a way -> its class, and the field that the key's value sets.
_WAYS: dict[str, tuple[type[ActorEnvironment], str | None]] = {
    "python": (InterpreterEnvironment, "python"),
    "image": (ContainerEnvironment, "image"),
    "requirements": (InstalledEnvironment, "requirements"),
    "overlay": (OverlayEnvironment, "requirements"),
    "driver": (DriverEnvironment, None),
}


def overridden(name: str) -> ActorEnvironment | None:
    """Return what the user chose for an extra, a module or a class, or None."""
    return user_environments().get(name)


def user_environments() -> Mapping[str, ActorEnvironment]:
    """All choices of the user's file; empty where `RL_ENV_CONFIG` names none.

    Raises:
        ConfigError: the file is not there, or a section of it is wrong.
    """
    given = os.environ.get(CONFIG_VARIABLE)
    if not given:
        return {}
    path = Path(given).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{CONFIG_VARIABLE} names {given!r}, which is no file")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> dict[str, ActorEnvironment]:
    """Read the file; `changed` makes a file that was edited another one."""
    data = load_config(path)
    sections = data.get("environments")
    if set(data) != {"environments"} or not isinstance(sections, dict):
        raise ConfigError(
            f"{path} must have the one key 'environments', with a section for each "
            f"name: got {sorted(map(str, data))}"
        )
    return {
        str(name): _from_section(f"{path}: environments.{name}", section)
        for name, section in sections.items()
    }


def _from_section(where: str, section: Any) -> ActorEnvironment:
    ways = [way for way in _WAYS if isinstance(section, dict) and way in section]
    if len(ways) != 1:
        raise ConfigError(
            f"{where} must have exactly one of {', '.join(_WAYS)}: got {section!r}"
        )
    cls, target = _WAYS[ways[0]]
    own = {field.name for field in dataclasses.fields(cls)} - {target}
    arguments = {key: value for key, value in section.items() if key != ways[0]}
    for key in arguments:
        if key not in own:
            raise ConfigError(
                f"{where} has the unknown key {key!r}{did_you_mean(str(key), own)} "
                f"(beside {ways[0]!r} it takes {', '.join(sorted(own))})"
            )
    if target is not None:
        arguments[target] = section[ways[0]]
    try:
        return cls(**arguments)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
