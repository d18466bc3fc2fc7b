"""The class of a worker: import it by its path and ask for its process options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_distributed.secret_variables import shown_variables
from rl_distributed.suggestion import did_you_mean

__all__ = ["LaunchOverrides", "ask_configuration", "resolve_class"]


@dataclass(frozen=True, slots=True)
class LaunchOverrides:
    """Options that a class requests for its own process by `configure_worker`."""

    options: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"LaunchOverrides(options={dict(self.options)}, "
            f"env_vars={shown_variables(self.env_vars)}, "
            f"init_kwargs={sorted(self.init_kwargs)})"
        )

    @property
    def need_new_process(self) -> bool:
        """Whether the process must be started again to have them."""
        return bool(self.options or self.env_vars or self.runtime_env)


def resolve_class(path: str) -> type[Any]:
    """Import the class named `module.Class`.

    Raises:
        AttributeError: The module has no such name; the message has the nearest one.
        TypeError: It is no class.
    """
    module_name, _, class_name = path.rpartition(".")
    module = importlib.import_module(module_name)
    try:
        found = getattr(module, class_name)
    except AttributeError:
        classes = [
            name for name, value in vars(module).items() if inspect.isclass(value)
        ]
        raise AttributeError(
            f"module {module_name!r} has no class {class_name!r}"
            f"{did_you_mean(class_name, classes)}"
        ) from None
    if not inspect.isclass(found):
        raise TypeError(f"{path!r} is a {type(found).__name__}, not a class")
    return found


def ask_configuration(
    cls: type[Any], arguments: Mapping[str, Any] | None
) -> LaunchOverrides:
    """Call `configure_worker` of a class, if it has one and is to be asked.

    Args:
        cls: The worker class.
        arguments: What `configure_worker` may take; None: do not ask.

    Raises:
        TypeError: It answers in another form.
    """
    configure = getattr(cls, "configure_worker", None)
    if configure is None or arguments is None:
        return LaunchOverrides()
    accepted = inspect.signature(configure).parameters
    answer = configure(**{k: v for k, v in arguments.items() if k in accepted})
    if not isinstance(answer, tuple) or len(answer) not in (3, 4):
        raise TypeError(
            f"{cls.__qualname__}.configure_worker must return (resources, env_vars, "
            "init_kwargs) or (resources, env_vars, init_kwargs, runtime_env): got "
            f"{answer!r}"
        )
    options, env_vars, init_kwargs, *rest = (part or {} for part in answer)
    # Options that the process already has are no reason for a new one.
    options = {k: v for k, v in options.items() if arguments.get(k) != v}
    return LaunchOverrides(options, env_vars, init_kwargs, rest[0] if rest else {})
