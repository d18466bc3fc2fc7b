"""The Ray actor that a worker lives in.

A worker class is a plain class, named by its path and imported here, in the worker's
own process. The host adds what every worker needs and no class should care about: the
variables of its rank, a traceback that travels as text, async methods run to their end.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rl_distributed.errors import UserError, WorkerMethodError, WorkerStartError
from rl_distributed.suggestion import did_you_mean

__all__ = ["LaunchOverrides", "WorkerDescription", "WorkerHost", "WorkerIdentity"]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who a worker is."""

    group: str
    rank: int
    address: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set in the process before the worker's module is imported."""

    @property
    def label(self) -> str:
        """What messages call the worker."""
        return f"worker {self.rank} of group {self.group!r}"

    def without_variables(self, names: Collection[str]) -> WorkerIdentity:
        """Leave out variables that the process has from elsewhere."""
        kept = {k: v for k, v in self.variables.items() if k not in names}
        return replace(self, variables=kept)


@dataclass(frozen=True, slots=True)
class LaunchOverrides:
    """What a class's `configure_worker` wants of its own process."""

    options: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def need_new_process(self) -> bool:
        """Whether the process must be made anew to have them."""
        return bool(self.options or self.env_vars or self.runtime_env)


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a host tells about itself once the class is imported."""

    pid: int
    log_path: str
    methods: frozenset[str]
    generator_methods: frozenset[str]
    has_dynamic_methods: bool
    overrides: LaunchOverrides


class WorkerHost:
    """Imports the class, makes the worker and calls its methods."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._class: type[Any] | None = None
        self._worker: Any = None
        self._generators: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()

    def load(
        self,
        target: str | type[Any],
        configure: Mapping[str, Any] | None = None,
        search_path: Collection[str] = (),
    ) -> WorkerDescription:
        """Import the class; with `configure`, also ask its `configure_worker`.

        Args:
            target: `module.Class`, or the class.
            configure: arguments for `configure_worker`; None: do not ask.
            search_path: folders to look for modules in, after the process's own.
        """
        os.environ.update(self._identity.variables)
        sys.path += [folder for folder in search_path if folder not in sys.path]
        try:
            cls = _resolve(target) if isinstance(target, str) else target
            overrides = _ask_configuration(cls, configure)
        except Exception as error:
            self._fail_start(error, f"cannot load {target!r}")
        self._class = cls
        methods = frozenset(
            name
            for name in dir(cls)
            if not name.startswith("__") and callable(getattr(cls, name, None))
        )
        self._generators = frozenset(
            name for name in methods if _is_generator(getattr(cls, name))
        )
        return WorkerDescription(
            os.getpid(),
            _log_path(),
            methods,
            self._generators,
            hasattr(cls, "__getattr__"),
            overrides,
        )

    def construct(self, *args: Any, **kwargs: Any) -> None:
        """Make the worker."""
        if self._class is None:
            raise WorkerStartError(f"{self._identity.label}: its class is not loaded")
        try:
            self._worker = self._class(*args, **kwargs)
        except Exception as error:
            self._fail_start(
                error, f"the constructor of {self._class.__qualname__} raised"
            )

    def call_packed(self, packed: tuple[str, Mapping[str, Any]]) -> Any:
        """Like `call`; one argument costs Ray less than several."""
        return self.call(packed[0], **packed[1])

    def call(self, method_name: str, /, **kwargs: Any) -> Any:
        """Call a method of the worker; Ray replaces references by their values."""
        try:
            result = getattr(self._worker, method_name)(**kwargs)
            return self._finish(result) if inspect.iscoroutine(result) else result
        except Exception as error:
            self._fail_method(method_name, error)

    def stream(self, method_name: str, /, **kwargs: Any) -> Iterator[Any]:
        """Call a generator method of the worker and pass its items on."""
        try:
            items = getattr(self._worker, method_name)(**kwargs)
            if hasattr(items, "__anext__"):
                items = self._drain(items)
            elif not hasattr(items, "__next__"):
                # A dummy call may answer with nothing to iterate.
                items = iter(() if items is None else items)
            yield from items
        except Exception as error:
            self._fail_method(method_name, error)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all async methods, in a thread of its own."""
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="worker-async", daemon=True
                ).start()
            return self._loop

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        loop = self._event_loop()
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def _drain(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        end = object()

        async def following() -> Any:
            return await anext(items, end)

        while (item := self._finish(following())) is not end:
            yield item

    def _place(self) -> str:
        return (
            f"{self._identity.label} (node {self._identity.address}, pid {os.getpid()})"
        )

    def _fail_start(self, error: Exception, what: str) -> NoReturn:
        _pass_user_error(error, f"in {self._place()}")
        raise WorkerStartError(
            f"{self._place()} did not start: {what}: {_summary(error)}\n\n"
            f"{_trace(error)}\nLog of the worker: {_log_path()}"
        ) from None

    def _fail_method(self, method_name: str, error: Exception) -> NoReturn:
        _pass_user_error(error, f"in {self._place()}, method {method_name!r}")
        if isinstance(error, WorkerMethodError):
            # A failure of another group's worker, which this one waited for.
            raise error
        name = "the worker" if self._class is None else self._class.__qualname__
        raise WorkerMethodError(
            f"{self._place()}: {name}.{method_name} raised {_summary(error)}\n\n"
            f"{_trace(error)}\nLog of the worker: {_log_path()}"
        ) from None

    def __repr__(self) -> str:
        return f"{self._identity.group}[{self._identity.rank}]"


def _resolve(path: str) -> type[Any]:
    """Import the class named `module.Class`."""
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


def _ask_configuration(
    cls: type[Any], arguments: Mapping[str, Any] | None
) -> LaunchOverrides:
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
    # What the process has already is no reason for a new one.
    options = {k: v for k, v in options.items() if arguments.get(k) != v}
    return LaunchOverrides(options, env_vars, init_kwargs, rest[0] if rest else {})


def _is_generator(method: Any) -> bool:
    return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)


def _pass_user_error(error: Exception, note: str) -> None:
    """Raise an error that the user can mend as itself, with where it came from."""
    if not isinstance(error, UserError):
        return
    error.add_note(note)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # It cannot travel; what it says can.
        raise UserError(f"{error} ({note})") from None
    raise error


def _summary(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _trace(error: BaseException) -> str:
    """The traceback without the host's own frame."""
    trace = traceback.TracebackException.from_exception(error)
    if len(trace.stack) > 1 and trace.stack[0].filename == __file__:
        del trace.stack[0]
    return "".join(trace.format()).rstrip()


def _log_path() -> str:
    """The file that standard error goes to, which is where Ray keeps a worker's log."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return "in the Ray session folder"
    return path if path.startswith("/") else f"standard error ({sys.stderr.name})"
