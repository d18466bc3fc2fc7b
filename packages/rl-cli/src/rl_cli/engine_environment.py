"""Builds the Python environment of an engine ahead of its use, with progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl_cli.console import Terminal
from rl_distributed.actor_environments import (
    BuiltEnvironment,
    EnvironmentStore,
    get_environment,
)
from rl_distributed.errors import ActorEnvironmentError

__all__ = ["prepare_engine"]

_TELL_EVERY_S = 10.0


def prepare_engine(
    name: str, terminal: Terminal, *, tell_every_s: float = _TELL_EVERY_S
) -> None:
    """Make sure that the environment of an engine exists, showing progress.

    Args:
        name: Class, module or package with the declared environment.
        terminal: Terminal for the progress.
        tell_every_s: Seconds between two progress lines.

    Raises:
        ActorEnvironmentError: It cannot be built, or does not suit a worker.
    """
    try:
        found = get_environment(name).resolve()
        store = EnvironmentStore()
        # A given Python is checked only; there is nothing to build.
        if not isinstance(found, BuiltEnvironment):
            terminal.note(f"checking the environment {found.label}")
            found.prepare()
            return
        state = store.find(found.key()).state
        if state == "ready":
            return
        doing = (
            "waiting for another process to build"
            if state == "building"
            else ("building")
        )
        terminal.note(
            f"{found.label} has no environment on this machine yet: {doing} it in "
            f"{store.root}, once; this takes minutes if packages must be downloaded"
        )
        with _clock(terminal, found.label, tell_every_s):
            prepared = found.prepare()
        seconds = prepared.build_s + prepared.preflight_s
        terminal.note(f"{found.label} is ready ({seconds:.0f} s)")
    except ActorEnvironmentError as error:
        raise ActorEnvironmentError(
            f"{name} runs in an environment of its own, which cannot be built here: "
            f'{error}\nFix this and try again with: rl env build "{name}"; or name a '
            "Python that has the engine in the file of RL_ENV_CONFIG."
        ) from error


@contextmanager
def _clock(terminal: Terminal, label: str, every_s: float) -> Iterator[None]:
    """Print the elapsed time regularly until the block ends."""
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            terminal.note(f"{label}: {time.monotonic() - start:.0f} s so far")

    thread = threading.Thread(target=tell, name="environment-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # So that no line about progress follows the result.
        thread.join()
