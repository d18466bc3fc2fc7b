"""Structured logs: readable lines on the terminal, JSON lines in a file.

Nothing here runs on import. A program calls `configure_logging` once; libraries only
call `get_logger`. Workers of its groups log in the same way, each to a file of its own
beside the program's. Every JSON line, also one of another library, says which actor,
rank, node and process wrote it and in which step.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, TextIO

from rl_distributed.errors import ConfigError
from rl_distributed.logs.lines import (
    SEEN_ATTRIBUTE,
    ConsoleFormatter,
    JsonFormatter,
)
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = [
    "ConsoleFormatter",
    "JsonFormatter",
    "LoggingSetup",
    "check_log_level",
    "configure_logging",
    "configure_worker_logging",
    "current_log_context",
    "current_logging_setup",
    "get_logger",
    "keeping_log",
    "log_context",
    "portable_log_context",
    "received_log_context",
    "restore_named_levels",
    "set_log_level",
    "worker_log_path",
]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_RANK_VARIABLES = {"rank": "RANK", "node_rank": "NODE_RANK"}
# Ray gives its logger a handler of its own and cuts it off from the root.
_DETACHED = ("ray",)

ConsoleFormat = Literal["text", "json", "auto"]

# What the last `configure_logging` put on loggers of this process.
_installed: list[tuple[logging.Logger, logging.Handler]] = []
_level: list[int] = []
_packages: set[logging.Logger] = set()
_named_levels: dict[str, int] = {}
_levels_before: dict[str, int] = {}
_setup: list[LoggingSetup] = []
_has_changed: list[bool] = []
"""Holds something once `set_log_level` was called: workers may log at another level."""
# No field of a block can have that name by accident.
_LEVEL_FIELD = "level of the log"
# Who this process is, where it is a worker; unlike a context it holds for all threads.
_process: dict[str, Any] = {}
_context: ContextVar[Mapping[str, Any] | None] = ContextVar(
    "rl_distributed_log_context", default=None
)


@dataclass(frozen=True, slots=True)
class LoggingSetup:
    """Arguments of `configure_logging`, passed on to worker processes."""

    level: str
    """Levels as one text of numbers: `20,ray=30`."""
    json_path: str | None
    """The program's own file of JSON lines, absolute."""
    console_format: ConsoleFormat


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`.

    Only loggers of packages that were asked for here log below INFO: other libraries
    would drown them.
    """
    package = logging.getLogger(name.partition(".")[0])
    _packages.add(package)
    if _level and package.name not in _named_levels:
        package.setLevel(_level[0])
    return logging.getLogger(name)


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Add fields, such as `step` or `rank`, to every log line of the block.

    Blocks nest; an inner field hides an outer one of the same name. The fields follow
    `async` tasks and calls of worker groups. A thread begins without them: enter a
    block in the thread itself.
    """
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def current_log_context() -> dict[str, Any]:
    """Return the fields that a log line written now would carry.

    What the process is, and the rank variables of a worker, come first; `log_context`
    hides them.
    """
    fields: dict[str, Any] = dict(_process)
    for name, variable in _RANK_VARIABLES.items():
        value = os.environ.get(variable, "")
        if value.isdigit():
            fields[name] = int(value)
    fields.update(_context.get() or {})
    return fields


def portable_log_context() -> dict[str, Any] | None:
    """Return the fields of the surrounding blocks for a call to another process.

    Only plain values go, others as text. The level of the log goes with them once
    `set_log_level` has changed it. None where there is nothing to tell.
    """
    plain = (str, int, float, bool, type(None))
    fields = _context.get() or {}
    found = {k: v if isinstance(v, plain) else str(v) for k, v in fields.items()}
    if _has_changed and _setup:
        found[_LEVEL_FIELD] = _setup[0].level
    return found or None


@contextmanager
def received_log_context(context: Mapping[str, Any] | None) -> Iterator[None]:
    """Log in the block, and from then on at the level, as who called does.

    Args:
        context: What `portable_log_context` returned there.
    """
    fields = dict(context or {})
    level = fields.pop(_LEVEL_FIELD, None)
    if level is not None and _setup and level != _setup[0].level:
        set_log_level(level)
    with log_context(**fields):
        yield


class _ContextFilter(logging.Filter):
    """Freezes the context into the record, in the thread that logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        seen: set[int] = vars(record).setdefault(SEEN_ATTRIBUTE, set())
        if id(self) in seen or record.levelno < _named_level(record.name):
            # A detached logger may be attached to the root after all, and come twice;
            # and Ray sets the level of its logger itself when it starts.
            return False
        seen.add(id(self))
        if not hasattr(record, "context"):
            record.context = current_log_context()
        return True


def _named_level(name: str) -> int:
    """Return the level that was asked for a logger, or for one above it; else 0."""
    while _named_levels:
        if name in _named_levels:
            return _named_levels[name]
        name, dot, _ = name.rpartition(".")
        if not dot:
            break
    return 0


class _JsonFileHandler(logging.FileHandler):
    """Says once that its file cannot be written, and not for every line."""

    _said = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._json = JsonFormatter()

    def _open(self) -> TextIOWrapper:
        # The mode in words, so that its kind of stream is known.
        return open(
            self.baseFilename,
            "a",
            encoding=self.encoding,
            errors=self.errors,
            opener=private_opener,
        )

    def format(self, record: logging.LogRecord) -> str:
        # Ray gives the handlers of its own logger a formatter when it starts.
        return self._json.format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        # An error in formatting a line is a bug and is reported as usual.
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            text = f"log file {self.baseFilename} cannot be written: {error.strerror}"
            sys.stderr.write(f"{text}; lines are lost there\n")


def _level_number(level: str) -> int:
    text = level.strip().upper()
    number = logging.getLevelNamesMapping().get(text)
    if number is None and text.isascii() and text.isdigit():
        number = int(text)
    if number is None:
        raise ConfigError(
            f"log level must be one of {', '.join(_LEVELS)}: got {level!r}; for one "
            "logger write name=LEVEL"
        )
    return number


def _parse_levels(level: str | int) -> tuple[int, dict[str, int]]:
    """Read `INFO,ray=WARNING`: the level of all others, and those of some loggers."""
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


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Write to what `sys.stderr` is now: a stream that replaced it may be closed."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore what the base class would keep."""


def _open_file(path: Path) -> logging.Handler:
    try:
        create_private_folder(path.parent)
        handler = _JsonFileHandler(path)
    except OSError as error:
        raise ConfigError(
            f"json_path: cannot write the log file {path}: {error.strerror}; "
            "name a file in a folder that you may write to"
        ) from error
    return handler


def configure_logging(
    level: str | int = "INFO",
    json_path: str | os.PathLike[str] | None = None,
    *,
    stream: TextIO | None = None,
    console_format: ConsoleFormat = "text",
    console_level: str | int | None = None,
) -> None:
    """Send the logs of this process to the terminal and, if asked, to a file.

    Calling it again replaces what the last call set up; handlers of others stay.
    Worker groups that are made afterwards log in the same way, each worker to the file
    `worker_log_path` on its node.

    Args:
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL, or levels of single loggers and
            what is below them: `INFO,rl_distributed=DEBUG,ray=WARNING`.
        json_path: A file that JSON lines are appended to. It and its folder are created
            for their owner alone.
        stream: Where readable lines go; None: what `sys.stderr` is at each line.
        console_format: `text` for people; `json` for programs that collect the output;
            `auto`: text on a terminal, JSON elsewhere.
        console_level: Least level that the terminal shows; None: all of `level`.

    Raises:
        ConfigError: A level is unknown, or the file cannot be opened.
    """
    number, named = _parse_levels(level)
    target = stream or sys.stderr
    console = (
        _StandardErrorHandler() if stream is None else logging.StreamHandler(stream)
    )
    readable = console_format == "text" or (
        console_format == "auto" and target.isatty()
    )
    console.setFormatter(ConsoleFormatter() if readable else JsonFormatter())
    if console_level is not None:
        console.setLevel(_parse_levels(console_level)[0])
    root = logging.getLogger()
    handlers: list[tuple[logging.Logger, logging.Handler]] = [(root, console)]
    if json_path is not None:
        file = _open_file(Path(json_path))
        handlers += [(root, file), *((logging.getLogger(n), file) for n in _DETACHED)]
    # Only now that the new file is open, so that an error leaves the old
    # setup in place.
    _remove_installed()
    for logger, handler in handlers:
        # The file handler is attached to several loggers but needs one filter.
        if not any(isinstance(f, _ContextFilter) for f in handler.filters):
            handler.addFilter(_ContextFilter())
        logger.addHandler(handler)
    _installed.extend(handlers)
    _set_levels(number, named)
    absolute = None if json_path is None else os.path.abspath(json_path)
    _setup[:] = [LoggingSetup(_level_text(number, named), absolute, console_format)]


@contextmanager
def keeping_log(json_path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep the log lines of the block in a file, with those of workers beside it.

    A program that has called `configure_logging` has decided where its log goes, and it
    stays so. Otherwise our packages log from INFO on into the file; the terminal shows
    what it would show without it.

    Args:
        json_path: A file that JSON lines are appended to.

    Raises:
        ConfigError: The file cannot be opened.
    """
    if _setup:
        yield
        return
    root = logging.getLogger()
    file = _open_file(Path(json_path))
    file.addFilter(_ContextFilter())
    shown: list[logging.Handler] = list(root.handlers)
    console = _StandardErrorHandler()
    console.setFormatter(ConsoleFormatter())
    console.addFilter(_ContextFilter())
    own = [file] if shown else [file, console]
    before = {package: package.level for package in _packages}
    quiet = _Quiet(before, root.getEffectiveLevel())
    for handler in (*shown, console):
        handler.addFilter(quiet)
    for handler in own:
        root.addHandler(handler)
    _set_levels_of_packages(logging.INFO)
    setup = LoggingSetup(str(logging.INFO), os.path.abspath(json_path), "text")
    _setup[:] = [setup]
    try:
        yield
    finally:
        for handler in (*shown, console):
            handler.removeFilter(quiet)
        for handler in own:
            root.removeHandler(handler)
        file.close()
        if not _installed:  # nobody has configured the log meanwhile
            _setup.clear()
            _level.clear()
            for package in _packages:
                package.setLevel(before.get(package, logging.NOTSET))


class _Quiet(logging.Filter):
    """Keeps from a handler what our packages log only for the file."""

    def __init__(self, before: Mapping[logging.Logger, int], root_level: int) -> None:
        super().__init__()
        self._before = dict(before)
        self._root_level = root_level

    def filter(self, record: logging.LogRecord) -> bool:
        package = logging.getLogger(record.name.partition(".")[0])
        if package not in _packages:
            return True
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger is not package:
            if logger.level:  # the program has asked for it
                return True
            logger = logger.parent
        return record.levelno >= (self._before.get(package, 0) or self._root_level)


def _set_levels_of_packages(number: int) -> None:
    _level[:] = [number]
    for package in _packages:
        package.setLevel(number)


def _remove_installed() -> None:
    while _installed:
        logger, handler = _installed.pop()
        logger.removeHandler(handler)
        handler.close()
    for name, level in _levels_before.items():
        logging.getLogger(name).setLevel(level)
    _levels_before.clear()
    _named_levels.clear()


def _set_levels(number: int, named: Mapping[str, int]) -> None:
    # Never below INFO: other libraries' debug lines would drown ours.
    logging.getLogger().setLevel(max(number, logging.INFO))
    _set_levels_of_packages(number)
    for name in named:
        _levels_before[name] = logging.getLogger(name).level
    _named_levels.update(named)
    restore_named_levels()


def check_log_level(level: str) -> None:
    """Check that `configure_logging` would take a level.

    Raises:
        ConfigError: It is unknown.
    """
    _parse_levels(level)


def set_log_level(level: str) -> Callable[[], None]:
    """Change the level of the program's log; handlers and files stay.

    Workers that are started afterwards get it too, those that run with the next call.

    Args:
        level: As `configure_logging` takes it.

    Returns:
        What takes the change back.

    Raises:
        ConfigError: The level is unknown.
    """
    number, named = _parse_levels(level)
    _has_changed[:] = [True]
    names = {"", *_levels_before, *named, *(package.name for package in _packages)}
    levels = {name: logging.getLogger(name).level for name in names}
    kept = (*_level,), dict(_named_levels), dict(_levels_before), (*_setup,)

    def restore() -> None:
        _level[:], setup = kept[0], kept[3]
        for target, earlier in ((_named_levels, kept[1]), (_levels_before, kept[2])):
            target.clear()
            target.update(earlier)
        if _setup and setup:
            _setup[:] = [replace(_setup[0], level=setup[0].level)]
        for name, value in levels.items():
            logging.getLogger(name).setLevel(value)

    for name, value in _levels_before.items():
        logging.getLogger(name).setLevel(value)
    _levels_before.clear()
    _named_levels.clear()
    _set_levels(number, named)
    if _setup:
        _setup[:] = [replace(_setup[0], level=_level_text(number, named))]
    return restore


def restore_named_levels() -> None:
    """Set the levels again that `configure_logging` was given for single loggers.

    A library that is started later, as Ray is, may have set its own.
    """
    for name, level in _named_levels.items():
        logging.getLogger(name).setLevel(level)


def _level_text(number: int, named: Mapping[str, int]) -> str:
    parts = [f"{logger}={value}" for logger, value in named.items()]
    return ",".join([str(number), *parts])


def current_logging_setup() -> LoggingSetup | None:
    """Return what this process was configured with, to configure another one."""
    return _setup[0] if _setup else None


def worker_log_path(json_path: str | os.PathLike[str], actor: str, rank: int) -> Path:
    """Return the file of a worker beside the program's: `run.jsonl`, `run-a-0.jsonl`.

    Args:
        json_path: The program's file.
        actor: Name of the worker's group.
        rank: The worker's rank.
    """
    path = Path(json_path)
    plain = re.sub(r"[^\w.-]+", "-", actor)
    return path.with_name(f"{path.stem}-{plain}-{rank}{path.suffix}")


def configure_worker_logging(
    setup: LoggingSetup | None, *, actor: str, rank: int, node: str
) -> None:
    """Say who this process is, and log as the program that made it does.

    Args:
        setup: The program's; None: only note who this is.
        actor: Name of the worker's group.
        rank: The worker's rank.
        node: Address of its node.
    """
    _process.update(actor=actor, rank=rank, node=node)
    if setup is None:
        return
    path = setup.json_path
    file = None if path is None else worker_log_path(path, actor, rank)
    try:
        configure_logging(setup.level, file, console_format=setup.console_format)
    except ConfigError as error:
        # The program's folder may not be on this node; work goes on without the file.
        configure_logging(setup.level, console_format=setup.console_format)
        get_logger(__name__).warning("%s", error)
