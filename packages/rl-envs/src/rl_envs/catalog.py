"""All registered environments, described; one that is broken does not hide others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError
from typing import Any, Literal

from rl_envs.registry import env_registry, task_registry

__all__ = ["CatalogEntry", "list_environments"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One registered environment."""

    name: str
    package: str
    """The package that offers it; empty: it was registered in this process."""
    description: str = ""
    """First line of its docstring."""
    makes_tasks: bool = False
    """Whether there is a task source of its name (`rl.tasks`)."""
    turns: Literal["one", "many", ""] = ""
    """Responses per conversation; empty: the class does not say."""
    extra: str = ""
    """What to install for it, such as `rl-envs[math]`; empty: nothing more."""
    extra_installed: bool = True
    """Whether every package of the extra is installed."""
    runs_programs: bool = False
    """Whether it runs responses as programs, in the sandbox."""
    problem: str = ""
    """Why it cannot be used; empty: it can be imported."""


def list_environments() -> list[CatalogEntry]:
    """Describe all registered environments, by name.

    Each is imported. What its import raises, whatever it is, becomes its `problem`.
    """
    return [_entry(name) for name in env_registry.names()]


def _entry(name: str) -> CatalogEntry:
    points = env_registry.entry_points(name)
    point = points[0] if points else None
    package = point.dist.name if point is not None and point.dist is not None else ""
    extra, installed = _extra_of(name, point)
    makes_tasks = name in task_registry
    try:
        found: Any = env_registry.get(name)
        if makes_tasks:
            task_registry.get(name)
    except Exception as error:
        # A plugin of another package may raise anything.
        return CatalogEntry(
            name,
            package,
            makes_tasks=makes_tasks,
            extra=extra,
            extra_installed=installed,
            problem=f"{type(error).__name__}: {error}",
        )
    many = getattr(found, "many_turns", None)
    return CatalogEntry(
        name,
        package,
        _first_line(found),
        makes_tasks,
        "" if many is None else "many" if many else "one",
        extra,
        installed,
        bool(getattr(found, "runs_programs", False)),
    )


def _first_line(thing: Any) -> str:
    """Return the first sentence's line; an inherited docstring describes another."""
    own = vars(thing).get("__doc__") if hasattr(thing, "__dict__") else None
    text = (own or "").strip()
    return text.splitlines()[0].strip() if text else ""


def _extra_of(name: str, point: EntryPoint | None) -> tuple[str, bool]:
    """Return the extra of an entry point, and whether it is installed.

    It is the one that the entry point names, or one that is called like it.
    """
    if point is None or point.dist is None:
        return "", True
    provided = point.dist.metadata.get_all("Provides-Extra") or []
    names = point.extras or [e for e in provided if _normal(e) == _normal(name)]
    if not names:
        return "", True
    installed = all(_is_installed(point.dist, extra) for extra in names)
    return f"{point.dist.name}[{','.join(names)}]", installed


def _is_installed(dist: Distribution, extra: str) -> bool:
    for requirement in dist.requires or []:
        package = re.match(r"[\w.-]+", requirement)
        of = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if package is None or of is None or _normal(of.group(1)) != _normal(extra):
            continue
        try:
            Distribution.from_name(package.group())
        except PackageNotFoundError:
            return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
