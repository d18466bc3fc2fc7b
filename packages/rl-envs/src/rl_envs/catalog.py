"""Descriptions of all registered environments, including those that fail to import."""

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
    """Package that provides it; empty: registered in this process."""
    description: str = ""
    """First line of its docstring."""
    makes_tasks: bool = False
    """True if a task source of the same name exists (`rl.tasks`)."""
    turns: Literal["one", "many", ""] = ""
    """Responses per conversation; empty: not declared by the class."""
    extra: str = ""
    """Extra to install for it, such as `rl-envs[math]`; empty: none."""
    extra_installed: bool = True
    """True if every package of the extra is installed here."""
    builds_its_extra: bool = False
    """True if the extra is installed into an environment of its own when first used."""
    runs_programs: bool = False
    """True if it runs responses as programs, in the sandbox."""
    problem: str = ""
    """Error raised by its import; empty: it can be imported."""


def list_environments() -> list[CatalogEntry]:
    """Describe all registered environments, in order of their names.

    Each is imported. Any exception raised by the import becomes its `problem`.
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
        # A plugin may raise anything, and must not hide the other environments.
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
        bool(getattr(found, "builds_its_extra", False)),
        bool(getattr(found, "runs_programs", False)),
    )


def _first_line(thing: Any) -> str:
    """Return the first line of a docstring, unless it is inherited."""
    own = vars(thing).get("__doc__") if hasattr(thing, "__dict__") else None
    text = (own or "").strip()
    return text.splitlines()[0].strip() if text else ""


def _extra_of(name: str, point: EntryPoint | None) -> tuple[str, bool]:
    """Return the extra of an entry point, and whether it is installed.

    Taken from the entry point itself, or else the extra with the environment's name.
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
        # By regular expression: `packaging` is not a dependency of this package.
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
