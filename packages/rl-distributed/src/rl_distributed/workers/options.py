"""Options of a worker's process, their merging, and its environment variables."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_distributed.errors import ConfigError
from rl_distributed.redaction import REDACTED, is_secret_variable
from rl_distributed.secret_variables import shown_variables

if TYPE_CHECKING:
    from rl_distributed.actor_environments import ActorEnvironment

__all__ = ["WorkerOptions", "identity_variables", "recursive_merge_options"]

# Read by OpenMP and the math libraries when torch is first imported.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of each process of a group; see `RayWorkerBuilder.with_options`."""

    num_threads: int | None = None
    """Threads of the math libraries (`OMP_NUM_THREADS`), set before the worker's module
    is imported; None: what Ray gives, one for a worker with at most one CPU."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process, there from its first instruction; those of
    secret names (`redaction.is_secret_variable`) from before the class is imported."""
    py_executable: str | None = None
    """Python interpreter of the process; it needs the driver's Python and Ray versions
    and rl-distributed. None: the one of `environment`."""
    environment: ActorEnvironment | None = None
    """Which Python environment the process runs in; None: what is declared for the
    class, see `rl_distributed.actor_environments.declarations`."""
    max_concurrency: int = 1
    """Calls that run in one worker at the same time, in threads. At 1 the worker's
    methods run one after the other in the main thread."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further Ray resources of each worker."""
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to Ray as they are, merged last (`runtime_env` included)."""

    def __post_init__(self) -> None:
        for name in ("num_threads", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a positive integer: got {value!r}")
        if self.py_executable is not None and self.environment is not None:
            raise ConfigError(
                "py_executable and environment exclude each other: got "
                f"{self.py_executable!r} and {self.environment.label!r}; give one"
            )
        for key, value in self.env_vars.items():
            if not isinstance(key, str) or not isinstance(value, str):
                shown = REDACTED if is_secret_variable(str(key)) else repr(value)
                raise ConfigError(
                    "env_vars must map names to strings: got "
                    f"{key!r}: {shown} ({type(value).__name__})"
                )

    def __repr__(self) -> str:
        shown = dataclasses.asdict(self) | {"env_vars": shown_variables(self.env_vars)}
        shown["ray_options"] = sorted(self.ray_options)
        return f"WorkerOptions({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def thread_variables(self) -> dict[str, str]:
        """Return the variables that set the number of threads, if it is set."""
        if self.num_threads is None:
            return {}
        return dict.fromkeys(_THREAD_VARIABLES, str(self.num_threads))

    def to_ray(
        self,
        env_vars: Mapping[str, str],
        runtime_env: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Options for Ray's `.options(...)`, with these further variables.

        Args:
            env_vars: environment variables, which win over all others.
            runtime_env: what a prepared environment asks for.

        A process without a runtime environment can be one that Ray has started ahead,
        which saves a second; so there is one only where something asks for it.
        """
        options: dict[str, Any] = {}
        if self.max_concurrency > 1:
            options["max_concurrency"] = self.max_concurrency
        if self.resources:
            options["resources"] = dict(self.resources)
        # Ray writes a runtime environment to its logs, so secrets do not go this way.
        variables = {
            name: value
            for name, value in {**self.env_vars, **env_vars}.items()
            if not is_secret_variable(name)
        }
        asked = dict(runtime_env or {})
        if variables:
            asked["env_vars"] = {**asked.get("env_vars", {}), **variables}
        if asked:
            options["runtime_env"] = asked
        return recursive_merge_options(options, self.ray_options)


def recursive_merge_options(
    default_options: Mapping[str, Any], extra_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge two trees of options into a new one; `extra_options` win.

    Mappings are merged key by key, everything else is replaced. Neither argument is
    changed, nor shares a container with the result.
    """
    merged = _copied(default_options)
    for key, value in extra_options.items():
        present = merged.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[key] = recursive_merge_options(present, value)
        else:
            merged[key] = _copied_value(value)
    # Ray takes the profiler's section under this name only.
    runtime_env = merged.get("runtime_env")
    if isinstance(runtime_env, dict) and "_nsight" in runtime_env:
        section = runtime_env.pop("_nsight")
        runtime_env.setdefault("nsight", section)
    return merged


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied_value(value) for key, value in options.items()}


def _copied_value(value: Any) -> Any:
    # Only plain containers: options also hold Ray handles, which are shared.
    if isinstance(value, Mapping):
        return _copied(value)
    return copy.copy(value) if isinstance(value, list | set) else value


def identity_variables(
    *,
    rank: int,
    local_rank: int,
    node_rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
) -> dict[str, str]:
    """Return the variables by which a worker knows its place, as torch names them."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node_rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
    }
    if master_address.startswith("127."):
        # By default gloo binds to the address of the host's name, not to loopback.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables
