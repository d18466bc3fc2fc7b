"""The Ray actor that a worker lives in.

A worker class is a plain class, named by its path and imported here, in the worker's
own process. The host adds what every worker needs and no class should care about: the
variables of its rank, a traceback that travels as text, async methods run to their end.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rl_distributed.errors import (
    CallCancelledError,
    UserError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_distributed.failures.carried_exception import pack_exception
from rl_distributed.failures.worker import WorkerFailure
from rl_distributed.logs.logging import (
    LoggingSetup,
    configure_worker_logging,
    received_log_context,
)
from rl_distributed.process.gc_pause import gc_paused
from rl_distributed.process.label import ProcessLabel, set_process_label
from rl_distributed.secret_variables import scrubbed, shown_variables
from rl_distributed.workers.beat_sender import BeatSender, WatchTarget, in_process_group
from rl_distributed.workers.call_recorder import CallRecorder
from rl_distributed.workers.cancellation import (
    current_call,
    is_cancelled,
    stop_if_cancelled,
)
from rl_distributed.workers.journal import log_error, log_made, log_start
from rl_distributed.workers.network_interface import bind_gloo
from rl_distributed.workers.output import hide_secrets_in_output
from rl_distributed.workers.thread_count import usable_cores
from rl_distributed.workers.worker_class import (
    LaunchOverrides,
    ask_configuration,
    resolve_class,
)

__all__ = ["WorkerDescription", "WorkerHost", "WorkerIdentity"]

# Nothing wakes the wait for an async call when it is cancelled, so it polls.
_CANCEL_CHECK_S = 0.2
# Messages of gloo, NCCL and torch's store when the process at the other end is gone.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer|remote process exited|"
    r"sock.*(recv|send)|DistStoreError|DistNetworkError|timed out",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Name, place and environment variables of one worker."""

    group: str
    rank: int
    address: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set in the process before the worker's module is imported."""
    watch: WatchTarget | None = None
    """Target of its signs of life; None: it is not watched."""
    logging: LoggingSetup | None = None
    """The program's logging setup, for the worker too; None: that of Ray's workers."""
    group_id: str = ""
    """Unique, as several groups may have the same name."""

    def __repr__(self) -> str:
        return f"WorkerIdentity({self.label}, {shown_variables(self.variables)})"

    @property
    def label(self) -> str:
        """Name of the worker in messages."""
        return f"worker {self.rank} of group {self.group!r}"

    def without_variables(self, names: Collection[str]) -> WorkerIdentity:
        """Leave out variables that the process has from elsewhere."""
        kept = {k: v for k, v in self.variables.items() if k not in names}
        return replace(self, variables=kept)

    def with_variables(self, variables: Mapping[str, str]) -> WorkerIdentity:
        """Add variables."""
        return replace(self, variables={**self.variables, **variables})


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Report of a host about itself once the class is imported."""

    pid: int
    log_path: str
    methods: frozenset[str]
    generator_methods: frozenset[str]
    has_dynamic_methods: bool
    overrides: LaunchOverrides
    is_watched: bool = False
    """Whether it reached the driver with its signs of life."""
    environment: Any = None
    """The attribute `actor_environment` of the class; None: it has none."""
    num_cores: int = 1
    """Cores of the node that it may run on."""


class WorkerHost:
    """Imports the class, makes the worker and calls its methods."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._class: type[Any] | None = None
        self._worker: Any = None
        self._generators: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        # With max_concurrency two calls may be the first async one.
        self._loop_lock = threading.Lock()
        # The call of each thread and when it began; the heartbeats carry it.
        self._running: dict[int, tuple[str, float, str]] = {}
        self._recorder = CallRecorder(identity.address, self._calls)
        self._is_watched = False

    def answer(self) -> None:
        """Do nothing; a call of it makes Ray report the end of the process."""

    def load(
        self,
        target: str | bytes,
        configure: Mapping[str, Any] | None = None,
        search_path: Collection[str] = (),
    ) -> WorkerDescription:
        """Import the class; with `configure`, also ask its `configure_worker`.

        Args:
            target: `module.Class`, or a pickled class: it may name modules that only
                `search_path` has.
            configure: arguments for `configure_worker`; None: do not ask.
            search_path: folders to look for modules in, after the process's own.
        """
        os.environ.update(self._identity.variables)
        bind_gloo(self._identity.address)
        # Before anything of the class can print, or keep a stream.
        hide_secrets_in_output()
        identity = self._identity
        # Before anything can fail, so that every message names the worker.
        set_process_label(
            ProcessLabel(
                identity.label,
                f"worker {identity.rank} of {identity.group_id}",
                self._where(),
            )
        )
        configure_worker_logging(
            identity.logging,
            actor=identity.group,
            rank=identity.rank,
            node=identity.address,
        )
        log_start(identity.label, self._where())
        if self._identity.watch is not None and not self._is_watched:
            sender = BeatSender(
                self._identity.watch, self._calls, self._recorder.take_line
            )
            self._is_watched = sender.start()
        # At the end: a folder of the driver must not shadow what this environment has
        # installed.
        sys.path += [folder for folder in search_path if folder not in sys.path]
        began_s = time.monotonic()
        try:
            with gc_paused():
                cls = (
                    resolve_class(target)
                    if isinstance(target, str)
                    else pickle.loads(target)
                )
            overrides = ask_configuration(cls, configure)
        except BaseException as error:
            # A pickled class has no name before it is loaded.
            named = repr(target) if isinstance(target, str) else "its class"
            self._fail_start(error, f"cannot load {named}{_hint(error)}")
        finally:
            self._recorder.add("import", began_s)
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
            self._is_watched,
            getattr(cls, "actor_environment", None),
            usable_cores(),
        )

    def construct(self, *args: Any, **kwargs: Any) -> None:
        """Make the worker."""
        if self._class is None:
            raise WorkerStartError(f"{self._identity.label}: its class is not loaded")
        began_s = time.monotonic()
        try:
            log_made(self._class.__qualname__, args, kwargs)
            self._worker = self._class(*args, **kwargs)
        except BaseException as error:
            self._fail_start(
                error, f"the constructor of {self._class.__qualname__} raised"
            )
        finally:
            self._recorder.add("__init__", began_s)

    def call_packed(
        self, packed: tuple[str, Mapping[str, Any], Mapping[str, Any] | None]
    ) -> Any:
        """Like `call`; one argument costs Ray less than several."""
        method_name, kwargs, context = packed
        return self.call(method_name, context, **kwargs)

    def call(
        self,
        method_name: str,
        context: Mapping[str, Any] | None = None,
        /,
        **kwargs: Any,
    ) -> Any:
        """Call a method of the worker; Ray replaces references by their values.

        Log lines of the call carry the fields of the caller's log context.
        """
        with received_log_context(context):
            return self._call(method_name, kwargs)

    def _call(self, method_name: str, kwargs: Mapping[str, Any]) -> Any:
        thread, began_s = threading.get_ident(), time.monotonic()
        self._running[thread] = (method_name, began_s, current_call())
        try:
            # The call may have been cancelled while it was queued.
            stop_if_cancelled()
            result = getattr(self._worker, method_name)(**kwargs)
            # Seen by its result, not its definition: a plain method may return a
            # coroutine.
            return self._finish(result) if inspect.iscoroutine(result) else result
        except BaseException as error:
            self._fail_method(method_name, error)
        finally:
            # The heartbeats would go on to report a call that has ended.
            del self._running[thread]
            self._recorder.add(method_name, began_s)

    def stream(
        self,
        method_name: str,
        context: Mapping[str, Any] | None = None,
        /,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Call a generator method of the worker and pass its items on."""
        with received_log_context(context):
            yield from self._stream(method_name, kwargs)

    def _stream(self, method_name: str, kwargs: Mapping[str, Any]) -> Iterator[Any]:
        thread, began_s = threading.get_ident(), time.monotonic()
        self._running[thread] = (method_name, began_s, current_call())
        try:
            stop_if_cancelled()
            items = getattr(self._worker, method_name)(**kwargs)
            if hasattr(items, "__anext__"):
                items = self._drain(items)
            elif not hasattr(items, "__next__"):
                # A dummy call may answer with nothing to iterate.
                items = iter(() if items is None else items)
            for item in items:
                yield item
                if is_cancelled():
                    raise CallCancelledError(f"method {method_name!r} was cancelled")
        except BaseException as error:
            self._fail_method(method_name, error)
        finally:
            # A generator that is given up is closed in whichever thread collects it.
            self._running.pop(thread, None)
            self._recorder.add(method_name, began_s)

    def _calls(self) -> list[tuple[str, float, str]]:
        return list(self._running.values())

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
        future = asyncio.run_coroutine_threadsafe(
            _kept_from_loop(coroutine), self._event_loop()
        )
        while True:
            try:
                result = future.result(_CANCEL_CHECK_S)
                if isinstance(result, _Ending):
                    raise result.error
                return result
            except TimeoutError:
                if future.done():
                    # Ended just now, or the error is the coroutine's own.
                    return future.result()
                if is_cancelled():
                    # The coroutine learns of it at its next await, and can clean up.
                    future.cancel()
                    raise CallCancelledError("an async call was cancelled") from None

    def _drain(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        # None may be an item.
        end = object()

        async def following() -> Any:
            return await anext(items, end)

        while (item := self._finish(following())) is not end:
            yield item

    def _where(self) -> str:
        return f"node {self._identity.address}, pid {os.getpid()}"

    def _place(self) -> str:
        return f"{self._identity.label} ({self._where()})"

    def _fail_start(self, error: BaseException, what: str) -> NoReturn:
        _let_pass(error)
        log_error("the start", error)
        self._pass_user_error(error, f"in {self._place()}")
        failure = self._failure("", error)
        start_error = WorkerStartError(
            f"{self._place()} did not start: {what}: {failure.cause}\n\n"
            f"{failure.traceback}\nLog of the worker: {failure.log_path}"
        )
        start_error.failure = failure
        # The cause has just been written into the message, as text: its class may not
        # exist where this is read.
        raise start_error from None

    def _fail_method(self, method_name: str, error: BaseException) -> NoReturn:
        _let_pass(error)
        if not isinstance(error, CallCancelledError):
            log_error(f"method {method_name!r}", error)
        self._pass_user_error(
            error, f"in {self._place()}, method {method_name!r}", method_name
        )
        if isinstance(error, WorkerMethodError | CallCancelledError):
            # A failure of another group's worker, which this one waited for.
            raise error
        name = "the worker" if self._class is None else self._class.__qualname__
        failure = self._failure(method_name, error)
        method_error = WorkerMethodError(
            f"{self._place()}: {name}.{method_name} raised {failure.cause}\n\n"
            f"{failure.traceback}\nLog of the worker: {failure.log_path}"
        )
        method_error.failure = failure
        raise method_error from None

    def _failure(self, method_name: str, error: BaseException) -> WorkerFailure:
        summary = scrubbed(_summary(error), os.environ)
        in_group = in_process_group()
        return WorkerFailure(
            self._identity.group,
            self._identity.rank,
            self._identity.address,
            os.getpid(),
            "raised",
            method_name,
            summary,
            scrubbed(_trace(error), os.environ),
            _log_path(),
            in_group,
            lost_a_peer=in_group and _PEER_GONE.search(summary) is not None,
            exception=pack_exception(error, os.environ),
        )

    def _pass_user_error(
        self, error: BaseException, note: str, method: str = ""
    ) -> None:
        """Re-raise an error that the user can fix, with a note on where it arose."""
        if not isinstance(error, UserError):
            return
        error.add_note(note)
        # For the driver, which may have to release those that wait for this worker. It
        # travels as itself, and is not its own cause.
        failure = replace(self._failure(method, error), exception=b"")
        vars(error)["failure"] = failure
        try:
            # Tried here, where it can still be mended: Ray would only say that the
            # error could not be read.
            pickle.loads(pickle.dumps(error))
        except Exception:
            # The object cannot be pickled, but its text can.
            plain = UserError(f"{error} ({note})")
            vars(plain)["failure"] = vars(error)["failure"]
            raise plain from None
        raise error

    def __repr__(self) -> str:
        return f"{self._identity.group}[{self._identity.rank}]"


@dataclass(frozen=True, slots=True)
class _Ending:
    """An exception that would end the event loop shared by all async methods."""

    error: BaseException


async def _kept_from_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # Both leave the loop's thread and end it, and every async call would wait for ever.
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        return _Ending(error)


def _let_pass(error: BaseException) -> None:
    """Raise what ends more than a call.

    SystemExit ends the process, as its caller wants; by GeneratorExit the items of a
    generator are given up.
    """
    if isinstance(error, SystemExit | GeneratorExit):
        raise error


def _is_generator(method: Any) -> bool:
    return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)


def _summary(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hint(error: BaseException) -> str:
    """Return a hint on where to declare a missing package."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return (
        f" with {sys.executable} (a class whose packages lie elsewhere declares an "
        "environment: with_options(environment=...), or an entry point of "
        "rl.actor_environments)"
    )


def _trace(error: BaseException) -> str:
    """Return the traceback without the host's own frame."""
    trace = traceback.TracebackException.from_exception(error)
    if len(trace.stack) > 1 and trace.stack[0].filename == __file__:
        del trace.stack[0]
    return "".join(trace.format()).rstrip()


def _log_path() -> str:
    """Return the file that standard error goes to: Ray's log of a worker."""
    try:
        # Ray says nowhere which file it has given a worker.
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return "in the Ray session folder"
    return path if path.startswith("/") else f"standard error ({sys.stderr.name})"
