"""The worker side of `RemoteEnvironment`; runs without Ray."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_distributed.errors import UserError, WorkerMethodError, WorkerStartError
from rl_distributed.extras import installed_torch
from rl_distributed.registrations import Registration
from rl_distributed.secret_variables import scrubbed
from rl_distributed.workers.output import hide_secrets_in_output
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.registry import EnvironmentSpec, env_registry, task_registry
from rl_envs.rewards.functional import FunctionalRewardWrapper

__all__ = ["Abilities", "DriverNames", "EnvironmentHost", "Outcome"]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an environment does besides judging rows."""

    post_processes: bool
    """It looks at finished batches."""
    scores_groups: bool
    """It judges the conversations of a prompt together."""
    checks_rows: bool
    """It finds rows that it cannot judge."""
    tools: list[dict[str, Any]]
    """The tools that it offers."""
    is_function: bool = False
    """It is a reward function: its answers hold numpy arrays, because its process has
    no need of torch, and its metrics are those of the rewards."""


@dataclass(frozen=True, slots=True)
class DriverNames:
    """What the driver knows beyond installed packages."""

    environments: Sequence[Registration] = ()
    """Environments that its program has registered."""
    task_sources: Sequence[Registration] = ()
    """Task sources that its program has registered."""
    search_path: Sequence[str] = field(default=(), repr=False)
    """Folders in which it finds modules."""

    def adopt(self) -> None:
        """Make them known in this process."""
        sys.path += [folder for folder in self.search_path if folder not in sys.path]
        env_registry.adopt(self.environments)
        task_registry.adopt(self.task_sources)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to; errors travel as values and are raised by the caller."""

    value: Any = None
    error: Exception | None = None


def _survives_pickling(error: Exception) -> bool:
    with contextlib.suppress(Exception):
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    return False


class EnvironmentHost:
    """Holds one environment and calls it.

    Args:
        label: What messages call this worker.
        secrets: Variables that are set before the environment is made. Ray knows
            nothing of them, and what the process prints shows `***` for their values.
        names: What the driver has registered.
    """

    def __init__(
        self,
        label: str,
        secrets: Mapping[str, str] | None = None,
        names: DriverNames | None = None,
    ) -> None:
        if names is not None:
            names.adopt()
        os.environ.update(secrets or {})
        if secrets:
            hide_secrets_in_output()
        self._label = label
        self._environment: EnvironmentInterface[Any] | None = None

    def load(self, spec_pickle: bytes) -> Outcome:
        """Make the environment; the value is what a caller must know of it."""
        try:
            spec: EnvironmentSpec = pickle.loads(spec_pickle)
            self._environment = spec.make()
            tools = self._environment.tool_schemas()
            if not self._is_function:
                # Answers hold tensors where there is torch. Its import takes seconds:
                # they pass while other workers start, and not within the first step.
                installed_torch()
        except Exception as error:
            return Outcome(error=self._portable(error, "start"))
        made, base = type(self._environment), EnvironmentInterface
        post_process = base.global_post_process_and_metrics
        return Outcome(
            Abilities(
                made.global_post_process_and_metrics is not post_process,
                made.score_groups is not base.score_groups,
                made.unusable_rows is not base.unusable_rows,
                tools,
                self._is_function,
            )
        )

    def call(self, method: str, *args: Any) -> Outcome:
        """Call a method of the environment."""
        if self._environment is None:
            return Outcome(
                error=WorkerStartError(f"{self._label} holds no environment")
            )
        name = "plain_step" if method == "step" and self._is_function else method
        try:
            return Outcome(getattr(self._environment, name)(*args))
        except Exception as error:
            return Outcome(error=self._portable(error, method))

    @property
    def _is_function(self) -> bool:
        # A subclass may do with tensors what it likes.
        return type(self._environment) is FunctionalRewardWrapper

    def _portable(self, error: Exception, method: str) -> Exception:
        """A user's error as itself; any other with its traceback as text."""
        if isinstance(error, UserError) and _survives_pickling(error):
            error.add_note(f"raised in {self._label} ({method})")
            return error
        trace = "".join(traceback.format_exception(error))
        trace = scrubbed(trace, os.environ)
        summary = scrubbed(f"{type(error).__name__}: {error}", os.environ)
        if method == "start":
            remedy = ""
            if isinstance(error, ImportError):
                remedy = (
                    "; what an environment or reward function needs must be importable "
                    "in its process: install it, or define it in the script itself"
                )
            return WorkerStartError(
                f"{self._label} did not start: {summary}{remedy}\n{trace}"
            )
        return WorkerMethodError(f"{self._label}: {method} raised {summary}\n{trace}")
