"""From Ray's errors to ours: who failed, where, and of what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import ObjectRefGenerator
from ray import exceptions as ray_errors

from rl_distributed.errors import (
    DistributedError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
    WorkerStartError,
)

__all__ = ["WorkerPlace", "remember_worker", "translate_failure", "worker_of"]

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
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINES = 5
_LOG_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker of this process's groups runs."""

    label: str
    address: str
    pid: int | None
    """None: its process has not reported yet."""
    log_path: str

    def __str__(self) -> str:
        pid = "unknown" if self.pid is None else self.pid
        return f"{self.label} (node {self.address}, pid {pid})"


# By Ray's actor id: a failure may surface in another group, which waits for its result.
_places: dict[str, WorkerPlace] = {}


def remember_worker(actor_id: str, place: WorkerPlace) -> None:
    """Note where an actor runs, so that its end can be told by name."""
    _places[actor_id] = place


def worker_of(reference: Any) -> str:
    """What messages call the worker that computes a Ray reference or generator."""
    if isinstance(reference, ObjectRefGenerator):
        reference = reference._generator_ref
    place = _places.get(reference.task_id().actor_id().hex())
    return "a call outside of any group" if place is None else str(place)


def translate_failure(error: BaseException, what: str) -> DistributedError:
    """Make one of our errors of what Ray raised while `what` was going on."""
    if isinstance(error, DistributedError) and not isinstance(
        error, ray_errors.RayError
    ):
        return error
    if isinstance(error, ray_errors.RayTaskError):
        return _of_task(error, what)
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
    text = _COLOURS.sub("", str(error)).strip()
    return WorkerMethodError(
        f"{what}: a worker could not return its result or read its arguments: "
        f"{type(cause).__name__}: {cause}\n\n{text}"
    )


def _of_death(error: BaseException, what: str) -> WorkerDiedError:
    place = _places.get(str(getattr(error, "actor_id", "")))
    who = "a worker" if place is None else str(place)
    message = f"{who} is gone ({what}): {_cause_of_death(str(error))}"
    if place is not None and place.log_path:
        message += f"\nLog of the worker: {place.log_path}"
        tail = _log_tail(place.log_path)
        if tail:
            message += f"\nIts last lines:\n{tail}"
    return WorkerDiedError(message)


def _cause_of_death(text: str) -> str:
    found = _EXIT.search(text)
    if found is not None:
        kind, detail = found["kind"], " ".join(found["detail"].split())
        hint = ""
        if kind == "SYSTEM_ERROR":
            hint = (
                " The process was killed by a signal (SIGKILL, as the kernel does when "
                "memory runs out) or crashed (SIGSEGV)."
            )
        return f"{kind}: {detail}{hint}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    dead = [line for line in lines if line.startswith("The actor is dead because")]
    return (dead or lines or ["no cause is known"])[-1]


def _log_tail(path: str) -> str:
    """The end of a worker's log, where it lies on this machine."""
    try:
        with Path(path).open("rb") as log:
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
    return "\n".join(lines[-_LOG_LINES:])
