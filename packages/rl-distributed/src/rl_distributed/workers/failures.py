"""Translate Ray's errors into ours: which worker failed, where, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray import ObjectRefGenerator, exceptions as ray_errors

from rl_distributed.errors import (
    CallCancelledError,
    DistributedError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_distributed.failures.out_of_memory import read_memory_report
from rl_distributed.failures.worker import FailureKind, WorkerFailure
from rl_distributed.secret_variables import scrubbed

__all__ = [
    "WorkerPlace",
    "actor_of",
    "cause_of_death",
    "dead_actor",
    "failure_error",
    "is_vague",
    "place_of",
    "remember_worker",
    "translate_failure",
    "worker_of",
]

_DEATHS = (
    ray_errors.RayActorError,
    ray_errors.WorkerCrashedError,
    ray_errors.NodeDiedError,
    ray_errors.OutOfMemoryError,
    ray_errors.LocalRayletDiedError,
)
_NEVER_STARTED = (
    ray_errors.RuntimeEnvSetupError,
    ray_errors.ActorUnschedulableError,
    ray_errors.ActorPlacementGroupRemoved,
)
_EXIT = re.compile(
    r"Worker exit type: (?P<kind>\w+)\s+Worker exit detail: (?P<detail>.*?)"
    r"(?= Some common causes| There are some potential|$)",
    re.DOTALL,
)
# `sys.exit` with a number or a text, and what Ray adds.
_EXIT_CODE = re.compile(
    r"Worker exits with an exit code (?P<code>.*?)\.?"
    r"(?P<term> The process receives a SIGTERM\.)?$"
)
_NODE_GONE = re.compile(r"node was terminated|node has died|NODE_DIED")
# Ray's words for a process that disappeared without reporting how it ended.
_NO_WORD = "connection error code 2"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Logs can be gigabytes long, so only the end is read, and few of its lines are shown.
_LOG_LINES = 5
_LOG_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of a worker of one of this process's groups."""

    group: str
    rank: int
    address: str
    pid: int | None
    """None: its process has not reported yet."""
    log_path: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables whose values must not be shown with the end of its log."""

    def __str__(self) -> str:
        return _place(self.failed("died"))

    def failed(
        self, kind: FailureKind, cause: str = "", method: str = ""
    ) -> WorkerFailure:
        """Return the record of this worker's failure."""
        return WorkerFailure(
            self.group,
            self.rank,
            self.address,
            self.pid,
            kind,
            method,
            cause,
            log_path=self.log_path,
        )


# By Ray's actor id: a failure may surface in another group, which waits for its result.
_places: dict[str, WorkerPlace] = {}


def remember_worker(actor_id: str, place: WorkerPlace) -> None:
    """Note where an actor runs, so that messages about its end can name it."""
    _places[actor_id] = place


def actor_of(reference: Any) -> str:
    """Ray's id of the actor that computes a reference or generator."""
    if isinstance(reference, ObjectRefGenerator):
        reference = reference._generator_ref
    actor_id: str = reference.task_id().actor_id().hex()
    return actor_id


def worker_of(reference: Any) -> str:
    """Get what messages call the worker that computes a Ray reference or generator."""
    place = _places.get(actor_of(reference))
    return "a call outside of any group" if place is None else str(place)


def place_of(actor_id: str) -> WorkerPlace | None:
    """Return the place of an actor; None: not a worker of this process's groups."""
    return _places.get(actor_id)


def failure_error(
    failure: WorkerFailure, what: str, method_name: str = ""
) -> WorkerError:
    """Return the error that describes a failure.

    Args:
        failure: what happened.
        what: what the caller was doing.
        method_name: the method whose results it waits for, if it does; stands for the
            one that ran where that is not known.
    """
    if method_name and not failure.method:
        failure = replace(failure, method=method_name)
    who = _place(failure)
    kinds: dict[str, tuple[type[WorkerError], str]] = {
        "hung": (WorkerHungError, "hangs and was ended"),
        "late": (WorkerHungError, "ran past the deadline of its call and was ended"),
        "cancelled": (CallCancelledError, "did not stop when told to and was ended"),
        "raised": (WorkerMethodError, "raised, and the workers that waited were ended"),
        "unplaced": (WorkerDiedError, "has not been started"),
    }
    cls, end = kinds.get(failure.kind, (WorkerDiedError, "is gone"))
    message = f"{who} {end} ({what}): {failure.cause}"
    if failure.traceback:
        message += f"\n\n{failure.traceback}"
    if failure.log_path:
        message += f"\nLog of the worker: {failure.log_path}"
        tail = _log_tail(failure)
        if tail and not failure.traceback:
            message += f"\nIts last lines:\n{tail}"
    error = cls(message)
    error.failure = failure
    error.__cause__ = failure.raised()
    return error


def _place(failure: WorkerFailure) -> str:
    pid = "unknown" if failure.pid is None else failure.pid
    return f"{failure.label} (node {failure.address}, pid {pid})"


def translate_failure(error: BaseException, what: str) -> DistributedError:
    """Translate an error that Ray raised while `what` was going on into ours."""
    # Ray raises task errors as a class that inherits from RayTaskError
    # and from the cause.
    if isinstance(error, DistributedError) and not isinstance(
        error, ray_errors.RayError
    ):
        return error
    if isinstance(error, ray_errors.RayTaskError):
        return _of_task(error, what)
    if isinstance(error, ray_errors.TaskCancelledError):
        return CallCancelledError(f"{what} was cancelled")
    if isinstance(error, _NEVER_STARTED):
        return WorkerStartError(f"{what}: the worker's process was not made: {error}")
    if isinstance(error, _DEATHS):
        return _of_death(error, what)
    return WorkerError(f"{what}: {type(error).__name__}: {error}")


def _of_task(error: ray_errors.RayTaskError, what: str) -> DistributedError:
    cause = error.cause
    if isinstance(cause, DistributedError | ray_errors.RayError):
        return translate_failure(cause, what)
    # Not raised by the method: a result that cannot be pickled, for instance.
    # Ray colours tracebacks for terminals, but this text goes into logs and files.
    text = _COLOURS.sub("", str(error)).strip()
    return WorkerMethodError(
        f"{what}: a worker could not return its result or read its arguments: "
        f"{type(cause).__name__}: {cause}\n\n{text}"
    )


def _of_death(error: BaseException, what: str) -> WorkerError:
    place = _places.get(dead_actor(error))
    cause = cause_of_death(error)
    if place is None:
        return WorkerDiedError(f"a worker is gone ({what}): {cause}")
    return failure_error(place.failed("died", cause), what)


def dead_actor(error: BaseException) -> str:
    """Return Ray's id of the actor that an error is about; empty: unknown."""
    actor_id = str(getattr(error, "actor_id", "") or "")
    report = None if actor_id else read_memory_report(str(error))
    if report is None:
        return actor_id
    killed = [use.actor_id for use in report.killed if use.actor_id]
    # It may have ended several at once, also of other programs.
    return next((i for i in killed if i in _places), killed[0] if killed else "")


def is_vague(error: BaseException) -> bool:
    """Whether Ray has lost contact with a process without knowing how it ended."""
    vague = isinstance(error, ray_errors.ActorUnavailableError)
    return vague or _NODE_GONE.search(str(error)) is not None


def cause_of_death(error: BaseException) -> str:
    """Describe in one line what Ray knows about the end of a process."""
    return _cause_of_death(str(error))


def _cause_of_death(text: str) -> str:
    if (report := read_memory_report(text)) is not None:
        # Process ids are unique on one node only.
        labels = {
            place.pid: place.failed("died").label
            for place in _places.values()
            if place.address == report.node
        }
        return report.describe(lambda pid: labels.get(pid, ""))
    found = _EXIT.search(text)
    if found is not None:
        return _cause_of_exit(found["kind"], " ".join(found["detail"].split()))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    dead = [line for line in lines if line.startswith("The actor is dead because")]
    cause = (dead or lines or ["no cause is known"])[-1]
    return f"node lost: {cause}" if _NODE_GONE.search(text) else cause


def _cause_of_exit(kind: str, detail: str) -> str:
    if exited := _EXIT_CODE.search(detail):
        if exited["term"]:
            return "it was told to end by SIGTERM, as batch systems and people do"
        code = exited["code"]
        shown = code if code.lstrip("-").isdigit() else repr(code)
        return f"it exited by itself: sys.exit({shown})"
    if _NO_WORD in detail:
        # Only its parent process, which is Ray's, could tell these cases apart.
        detail += (
            " The process was killed by a signal (SIGKILL, as the kernel does when "
            "memory runs out), crashed (SIGSEGV) or called os._exit."
        )
    return f"{kind}: {detail}"


def _log_tail(failure: WorkerFailure) -> str:
    """Return the last lines of a worker's log if it is on this machine."""
    try:
        with Path(failure.log_path).open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    # Lines that begin with a colon are Ray's own marks.
    lines = [
        f"  {line}"
        for line in text.splitlines()
        if line.strip() and not line.startswith(":")
    ]
    # faulthandler prints the Python stack below this line; the rest is of no use.
    crash = [i for i, line in enumerate(lines) if "Fatal Python error:" in line]
    first = crash[-1] if crash else max(0, len(lines) - _LOG_LINES)
    tail = "\n".join(lines[first : first + _LOG_LINES])
    # Native code and child processes bypass the filter on the worker's output.
    for place in _places.values():
        if place.log_path == failure.log_path:
            tail = scrubbed(tail, place.secrets)
    return tail
