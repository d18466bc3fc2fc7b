"""Settings of worlds that run programs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.registry import open_sandbox
from rl_envs.sandbox.runs import SandboxLevel, SandboxLimits
from rl_envs.task_limits import TaskLimits

__all__ = ["SandboxConfig"]


class SandboxConfig(Config):
    """Where programs run, and what each may use."""

    num_workers: int = Field(default=1, ge=1)
    """Programs that run at the same time."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """Seconds of a run."""
    memory_mib: int = Field(default=512, ge=64)
    """Memory of a run, the interpreter's included."""
    level: Literal["seccomp", "landlock", "namespaces", "container"] = "landlock"
    """Refuse to run programs where the sandbox reaches less; see `SandboxLevel`."""
    network_namespace: bool = True
    """Of `sandbox: local`: whether each run of Python enters a network namespace too.
    Sockets cannot be made without it either; it costs time for each run."""
    sandbox: str = "local"
    """`local`: this machine's kernel; `container`, `remote`, or one of another package
    (entry-point group `rl.sandboxes`)."""
    sandbox_settings: dict[str, Any] = Field(default_factory=dict)
    """What that sandbox takes: `image` of `container`, `url` of `remote`."""

    def open_sandbox(self) -> Sandbox:
        """Start the sandbox.

        Raises:
            SandboxError: The level cannot be had here.
            UserError: The name or the settings are wrong.
        """
        settings = dict(self.sandbox_settings)
        if self.sandbox == "local":
            if "network_namespace" in settings:
                raise ConfigError(
                    "sandbox_settings must not hold network_namespace: it is a key "
                    "beside it"
                )
            settings["network_namespace"] = self.network_namespace
        return open_sandbox(
            self.sandbox,
            settings,
            num_slots=self.num_workers,
            level=SandboxLevel[self.level.upper()],
        )

    def run_limits(self, task: TaskLimits | None = None) -> SandboxLimits:
        """Return what a run may use.

        Args:
            task: Limits of the task that it is for; its memory replaces that above.
        """
        given = task.memory_mib if task is not None else None
        memory_mib = self.memory_mib if given is None else given
        return SandboxLimits(time_s=self.timeout_s, memory_bytes=memory_mib << 20)
