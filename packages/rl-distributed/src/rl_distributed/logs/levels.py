"""Levels of this process's loggers: of our packages together, and of single loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from rl_distributed.errors import ConfigError

__all__ = ["LEVELS", "level_text", "parse_levels"]

_NAMES = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def parse_levels(level: str | int) -> tuple[int, dict[str, int]]:
    """Read `INFO,ray=WARNING`: the level of all others, and those of some loggers.

    Raises:
        ConfigError: A level is unknown.
    """
    if isinstance(level, int):
        return level, {}
    number, named = logging.INFO, {}
    for part in level.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            number = _level_number(part)
        elif name.strip():
            named[name.strip()] = _level_number(value)
        else:
            raise ConfigError(f"log level {part!r} names no logger; write name=LEVEL")
    return number, named


def _level_number(level: str) -> int:
    text = level.strip().upper()
    number = logging.getLevelNamesMapping().get(text)
    if number is None and text.isascii() and text.isdigit():
        number = int(text)
    if number is None:
        raise ConfigError(
            f"log level must be one of {', '.join(_NAMES)}: got {level!r}; for one "
            "logger write name=LEVEL"
        )
    return number


def level_text(number: int, named: Mapping[str, int]) -> str:
    """Return the text that `parse_levels` reads as these levels."""
    parts = [f"{logger}={value}" for logger, value in named.items()]
    return ",".join([str(number), *parts])


class _LoggerLevels:
    """Sets levels, and restores what it has replaced."""

    def __init__(self) -> None:
        # The level of our packages, and their loggers.
        self.base: int | None = None
        self.packages: set[logging.Logger] = set()
        # Levels of single loggers: those asked for, and those they had before.
        self._named: dict[str, int] = {}
        self._replaced: dict[str, int] = {}

    def add_package(self, package: logging.Logger) -> None:
        """Count a logger among those of our packages."""
        self.packages.add(package)
        if self.base is not None and package.name not in self._named:
            package.setLevel(self.base)

    def set_base(self, number: int) -> None:
        """Set the level of our packages."""
        self.base = number
        for package in self.packages:
            package.setLevel(number)

    def set_all(self, number: int, named: Mapping[str, int]) -> None:
        """Set the level of our packages, and replace the levels of single loggers."""
        self.restore_replaced()
        # Never below INFO: other libraries' debug lines would drown ours.
        logging.getLogger().setLevel(max(number, logging.INFO))
        self.set_base(number)
        self._replaced = {name: logging.getLogger(name).level for name in named}
        self._named = dict(named)
        self.restore_named()

    def restore_named(self) -> None:
        """Set single loggers again to the levels that were asked for."""
        _set_levels(self._named)

    def restore_replaced(self) -> None:
        """Forget single loggers; they get the levels that they had before."""
        _set_levels(self._replaced)
        self._replaced, self._named = {}, {}

    def level_of(self, name: str) -> int:
        """Return the level that was asked for a logger, or for one above it; else 0."""
        while self._named and name:
            if name in self._named:
                return self._named[name]
            name = name.rpartition(".")[0]
        return 0

    def snapshot(self, names: Iterable[str]) -> Callable[[], None]:
        """Return a function that restores all levels, also those of loggers `names`."""
        base, named, replaced = self.base, self._named, self._replaced
        known = (package.name for package in self.packages)
        levels = {
            name: logging.getLogger(name).level
            for name in ("", *replaced, *names, *known)
        }

        def restore() -> None:
            self.base, self._named, self._replaced = base, named, replaced
            _set_levels(levels)

        return restore


def _set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


LEVELS = _LoggerLevels()
