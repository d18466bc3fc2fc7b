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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from rl_distributed.errors import ConfigError
from rl_distributed.logs.context import (
    current_log_context,
    identify_process,
    log_context,
    plain_log_context,
)
from rl_distributed.logs.handlers import (
    ContextFilter,
    QuietFilter,
    StandardErrorHandler,
    open_json_file,
)
from rl_distributed.logs.levels import LEVELS, level_text, parse_levels
from rl_distributed.logs.lines import ConsoleFormatter, JsonFormatter

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

# Ray gives its logger a handler of its own and cuts it off from the root.
_DETACHED = ("ray",)
# No field of a block can have that name by accident.
_LEVEL_FIELD = "level of the log"

ConsoleFormat = Literal["text", "json", "auto"]


@dataclass(frozen=True, slots=True)
class LoggingSetup:
    """Arguments of `configure_logging`, passed on to worker processes."""

    level: str
    """Levels as one text of numbers: `20,ray=30`."""
    json_path: str | None
    """The program's own file of JSON lines, absolute."""
    console_format: ConsoleFormat


@dataclass(slots=True)
class _State:
    """The log of this process."""

    setup: LoggingSetup | None = None
    # What the last `configure_logging` added to loggers.
    installed: tuple[tuple[logging.Logger, logging.Handler], ...] = ()
    # After `set_log_level`, running workers may log at another level.
    has_level_changed: bool = False


_state = _State()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`.

    Only packages whose loggers come from here log below INFO: other libraries would
    drown them.
    """
    LEVELS.add_package(logging.getLogger(name.partition(".")[0]))
    return logging.getLogger(name)


def portable_log_context() -> dict[str, Any] | None:
    """Return the fields of the surrounding blocks for a call to another process.

    Only plain values go, others as text. The level of the log goes with them once
    `set_log_level` has changed it. None if there is nothing to send.
    """
    found = plain_log_context()
    if _state.has_level_changed and _state.setup is not None:
        found[_LEVEL_FIELD] = _state.setup.level
    return found or None


@contextmanager
def received_log_context(context: Mapping[str, Any] | None) -> Iterator[None]:
    """Log with the caller's fields in the block, and from then on at its level.

    Args:
        context: The caller's `portable_log_context`.
    """
    fields = dict(context or {})
    level = fields.pop(_LEVEL_FIELD, None)
    setup = _state.setup
    if level is not None and setup is not None and level != setup.level:
        set_log_level(level)
    with log_context(**fields):
        yield


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
    Worker groups created afterwards log in the same way, each worker to the file
    `worker_log_path` on its node.

    Args:
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL, or levels of single loggers and
            what is below them: `INFO,rl_distributed=DEBUG,ray=WARNING`.
        json_path: A file that JSON lines are appended to. It and its folder are created
            for their owner alone.
        stream: Where readable lines go; None: what `sys.stderr` is at each line.
        console_format: `text` for people; `json` for programs that collect the output;
            `auto`: text on a terminal, JSON elsewhere.
        console_level: Lowest level that the terminal shows; None: all of `level`.

    Raises:
        ConfigError: A level is unknown, or the file cannot be opened.
    """
    number, named = parse_levels(level)
    readable = console_format == "text" or (
        console_format == "auto" and (stream or sys.stderr).isatty()
    )
    console = _build_console(
        stream, ConsoleFormatter() if readable else JsonFormatter()
    )
    if console_level is not None:
        console.setLevel(parse_levels(console_level)[0])
    handlers = [(logging.getLogger(), console)]
    if json_path is not None:
        file = open_json_file(Path(json_path))
        handlers += [(logging.getLogger(name), file) for name in (None, *_DETACHED)]
    # Only now that the new file is open, so that an error leaves the old
    # setup in place.
    _remove_installed()
    for logger, handler in handlers:
        logger.addHandler(handler)
    _state.installed = tuple(handlers)
    LEVELS.set_all(number, named)
    absolute = None if json_path is None else os.path.abspath(json_path)
    _state.setup = LoggingSetup(level_text(number, named), absolute, console_format)


def _build_console(stream: TextIO | None, form: logging.Formatter) -> logging.Handler:
    console = (
        StandardErrorHandler() if stream is None else logging.StreamHandler(stream)
    )
    console.setFormatter(form)
    console.addFilter(ContextFilter())
    return console


def _remove_installed() -> None:
    for logger, handler in _state.installed:
        logger.removeHandler(handler)
        handler.close()
    _state.installed = ()


@contextmanager
def keeping_log(json_path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep the log lines of the block in a file, with those of workers beside it.

    Where a program has called `configure_logging`, that decides where its log goes, and
    this does nothing. Otherwise our packages log from INFO on into the file; the
    terminal shows what it would show without it.

    Args:
        json_path: A file that JSON lines are appended to.

    Raises:
        ConfigError: The file cannot be opened.
    """
    if _state.setup is not None:
        yield
        return
    root = logging.getLogger()
    file = open_json_file(Path(json_path))
    shown, console = list(root.handlers), _build_console(None, ConsoleFormatter())
    own = [file] if shown else [file, console]
    before = {package: package.level for package in LEVELS.packages}
    quiet = QuietFilter(before, root.getEffectiveLevel())
    for handler in (*shown, console):
        handler.addFilter(quiet)
    for handler in own:
        root.addHandler(handler)
    LEVELS.set_base(logging.INFO)
    _state.setup = LoggingSetup(str(logging.INFO), os.path.abspath(json_path), "text")
    try:
        yield
    finally:
        for handler in (*shown, console):
            handler.removeFilter(quiet)
        for handler in own:
            root.removeHandler(handler)
        file.close()
        # If the block has configured the log, that stays.
        if not _state.installed:
            _state.setup = LEVELS.base = None
            for package in LEVELS.packages:
                package.setLevel(before.get(package, logging.NOTSET))


def check_log_level(level: str) -> None:
    """Check that `configure_logging` would take a level.

    Raises:
        ConfigError: It is unknown.
    """
    parse_levels(level)


def set_log_level(level: str) -> Callable[[], None]:
    """Change the level of the program's log; handlers and files stay.

    Workers started afterwards use it as well, running ones from their next call on.

    Args:
        level: As `configure_logging` takes it.

    Returns:
        A function that undoes the change.

    Raises:
        ConfigError: The level is unknown.
    """
    number, named = parse_levels(level)
    _state.has_level_changed = True
    restore_levels, earlier = LEVELS.snapshot(named), _state.setup

    def restore() -> None:
        restore_levels()
        if _state.setup is not None and earlier is not None:
            _state.setup = replace(_state.setup, level=earlier.level)

    LEVELS.set_all(number, named)
    if _state.setup is not None:
        _state.setup = replace(_state.setup, level=level_text(number, named))
    return restore


def restore_named_levels() -> None:
    """Restore the levels that `configure_logging` was given for single loggers.

    A library that is started later, as Ray is, may have set its own.
    """
    LEVELS.restore_named()


def current_logging_setup() -> LoggingSetup | None:
    """Return what this process was configured with, to configure another one."""
    return _state.setup


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
    """Identify this process in its log lines, and log as the program does.

    Args:
        setup: The program's; None: only identify the process.
        actor: Name of the worker's group.
        rank: The worker's rank.
        node: Address of its node.
    """
    identify_process(actor=actor, rank=rank, node=node)
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
