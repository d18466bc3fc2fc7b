"""Names of implementations, registered in code or through entry points."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import ModuleType
from typing import Generic, TypeVar

from rl_distributed.errors import RegistryError
from rl_distributed.logs.logging import get_logger
from rl_distributed.registrations import Registration
from rl_distributed.suggestion import did_you_mean

__all__ = ["Registry"]

T = TypeVar("T")
Registered = TypeVar("Registered")

_logger = get_logger(__name__)


class Registry(Generic[T]):
    """Implementations of one kind, by name.

    An implementation arrives in either of two ways: `register` in code, or an entry
    point of `group` in any installed package, which is imported when it is first asked
    for. A name registered in code wins over an entry point of the same name.

    What is registered in code is known in that process. `registrations` describes it
    so that it can be sent, and `adopt` makes it known in another one.

    Args:
        group: The entry-point group, for example `rl.loggers`.
        kind: What an implementation is called in messages, for example "metrics sink".
    """

    def __init__(self, group: str, kind: str) -> None:
        self.group = group
        self.kind = kind
        self._registered: dict[str, T] = {}
        self._adopted: dict[str, Registration] = {}
        self._entry_points: dict[str, list[EntryPoint]] | None = None

    def __repr__(self) -> str:
        return f"Registry({self.group!r}, {self.kind!r}: {', '.join(self.names())})"

    def __contains__(self, name: object) -> bool:
        return (
            name in self._registered or name in self._adopted or name in self._found()
        )

    def register(
        self, name: str, *, replace: bool = False
    ) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a class or function as `name`.

        Raises:
            RegistryError: Another object has the name already, and `replace` is False.
        """
        if not isinstance(name, str) or not name:
            raise RegistryError(
                f"the name of a {self.kind} must be a non-empty string: got {name!r}; "
                f'write @register("name")'
            )

        def decorate(implementation: Registered) -> Registered:
            present = self._registered.get(name)
            if (
                present is not None
                and not replace
                and not _same(present, implementation)
            ):
                raise RegistryError(
                    f"{self.kind} {name!r} is registered already, as {_title(present)};"
                    " choose another name, or pass replace=True"
                )
            self._registered[name] = implementation  # type: ignore[assignment]
            return implementation

        return decorate

    def get(self, name: str) -> T:
        """Return the implementation called `name`.

        Raises:
            RegistryError: The name is unknown (the message gives the nearest and all
                known ones), two packages claim it, or its package cannot be imported
                (the message says what to install).
        """
        if name in self._registered:
            return self._registered[name]
        # Resolved only now: a worker may lack packages of implementations
        # it never uses.
        if name in self._adopted:
            found: T = self._adopted[name].resolve()
            self._registered[name] = found
            return found
        loaded = self._load(self._declared(name))
        return self._registered.setdefault(name, loaded)

    def check(self, name: str) -> None:
        """Find what is wrong with a name without importing anything.

        Raises:
            RegistryError: The name is unknown, or two packages claim it.
        """
        if name not in self._registered and name not in self._adopted:
            self._declared(name)

    def registrations(self, needed: str | None = None) -> tuple[Registration, ...]:
        """Return what was registered in code, for `adopt` in another process.

        Entry points are left out: the other process finds those itself.

        Args:
            needed: A name that the other process asks for. Others that cannot be sent
                are left out; this one is an error.

        Raises:
            RegistryError: The needed one cannot be sent.
        """
        found = []
        for name, implementation in sorted(self._registered.items()):
            if self._is_of_entry_point(name, implementation):
                continue
            try:
                found.append(Registration.of(self.kind, name, implementation))
            except RegistryError as error:
                if name == needed:
                    raise
                _logger.debug("%s", error)
        # Passed on from process to process, as a worker may start workers itself.
        known = {each.name for each in found}
        kept = (each for n, each in self._adopted.items() if n not in known)
        return (*found, *kept)

    def adopt(self, registrations: Iterable[Registration]) -> None:
        """Make known what was registered in the process that this one works for.

        Each is loaded when it is first asked for.
        """
        for registration in registrations:
            self._adopted[registration.name] = registration
            # The driver's version wins over an earlier one of this process.
            self._registered.pop(registration.name, None)

    def _is_of_entry_point(self, name: str, implementation: object) -> bool:
        """Whether a package that declares the name has registered it as well."""
        package = str(getattr(implementation, "__module__", "")).partition(".")[0]
        points = self._found().get(name, ())
        return any(point.module.partition(".")[0] == package for point in points)

    def loaded(self, name: str) -> T | None:
        """Get the implementation called `name` if nothing has to be imported for it."""
        return self._registered.get(name)

    def home(self, name: str) -> ModuleType | None:
        """Get the module that an entry point names; None if nothing is to be imported.

        A package that imports its parts lazily can hold there what is asked of an
        implementation before it is used.

        Raises:
            RegistryError: See `get`.
        """
        if name in self._registered or name in self._adopted:
            return None
        point = self._declared(name)
        with self._telling(point):
            return import_module(point.module)

    def entry_points(self, name: str) -> tuple[EntryPoint, ...]:
        """Return the entry points that claim a name; nothing is imported."""
        return tuple(self._found().get(name, ()))

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._registered, *self._adopted, *self._found()})

    def _declared(self, name: str) -> EntryPoint:
        """Return the one entry point of that name."""
        found = self._found().get(name)
        if found is None:
            known = ", ".join(self.names()) or "none"
            raise RegistryError(
                f"unknown {self.kind} {name!r}{did_you_mean(str(name), self.names())} "
                f"(known: {known})"
            )
        # Two distributions with the same entry, as a package installed
        # twice, are no conflict.
        if len({point.value for point in found}) > 1:
            claims = ", ".join(f"{point.value} of {_owner(point)}" for point in found)
            raise RegistryError(
                f"{self.kind} {name!r} is provided more than once: {claims}; "
                "uninstall all but one"
            )
        return found[0]

    def _found(self) -> dict[str, list[EntryPoint]]:
        if self._entry_points is None:
            found: dict[str, list[EntryPoint]] = {}
            for point in entry_points(group=self.group):
                found.setdefault(point.name, []).append(point)
            self._entry_points = found
        return self._entry_points

    def _load(self, point: EntryPoint) -> T:
        with self._telling(point):
            loaded: T = point.load()
        return loaded

    @contextmanager
    def _telling(self, point: EntryPoint) -> Iterator[None]:
        """Turn what an import raises into errors that name the entry point."""
        what = f"{self.kind} {point.name!r} of {_owner(point)}"
        try:
            yield
        except ImportError as error:
            raise RegistryError(
                f"{what} cannot be imported: {error}{_remedy(point, error)}"
            ) from error
        except AttributeError as error:
            raise RegistryError(
                f"{what} is broken: {point.value} does not exist ({error})"
            ) from error


def _same(present: object, other: object) -> bool:
    """Whether two objects are one definition (a module can be executed twice)."""
    return present is other or (
        getattr(present, "__module__", None) == getattr(other, "__module__", "")
        and getattr(present, "__qualname__", None) == getattr(other, "__qualname__", "")
        and "<locals>" not in getattr(present, "__qualname__", "")
    )


def _title(thing: object) -> str:
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '?')}.{name}" if name else repr(thing)


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


def _remedy(point: EntryPoint, error: ImportError) -> str:
    """Return the pip command that brings what is missing."""
    missing = (error.name or "").partition(".")[0]
    own = point.value.partition(":")[0].partition(".")[0]
    if point.dist is not None:
        extra = _extra_with(point.dist, point, missing)
        if extra:
            return f'; pip install "{point.dist.name}[{extra}]"'
    if missing and missing != own:
        return f"; install the package that provides {missing!r}"
    return ""


def _extra_with(dist: Distribution, point: EntryPoint, missing: str) -> str | None:
    """Find the extra of `dist` that requires `missing`, or is named like the plugin."""
    # The entry point itself says which extra it needs.
    if point.extras:
        return point.extras[0]
    wanted = _normal(missing)
    for requirement in dist.requires or []:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if name and extra and wanted and _normal(name.group()) == wanted:
            return extra.group(1)
    provided = dist.metadata.get_all("Provides-Extra") or []
    return next(
        (name for name in provided if _normal(name) == _normal(point.name)), None
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
