"""Worker groups of Ray-decorated classes, with handles that take `.remote`.

A class decorated with `@ray.remote` is unwrapped, because each worker already runs in a
Ray actor of this project, which monitors it. The decorator's process options are passed
on by the class's `configure_worker`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rl_algorithms.compat.nemo_rl.differences import warn_difference
from rl_distributed import workers
from rl_distributed.cluster.passed_variables import withheld_variables
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.redaction import is_secret_variable
from rl_distributed.workers.worker_class import ask_configuration

__all__ = [
    "ACTOR_ENVIRONMENT_REGISTRY",
    "PY_EXECUTABLES",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "WorkerHandle",
    "get_actor_python_env",
    "variables_of_the_program",
]

# Options that the placement bundle of the cluster determines.
_OF_THE_BUNDLE = frozenset(
    ("num_cpus", "num_gpus", "scheduling_strategy", "placement_group", "name")
)
_START_DEADLINE_S = 1_800.0


class PY_EXECUTABLES:
    """Interpreters of workers; only that of the program is supported."""

    SYSTEM = sys.executable
    """The interpreter of the program."""


class _Executables(dict[str, str]):
    """Interpreters by the path of a worker's class."""

    def __setitem__(self, name: str, executable: str) -> None:
        if not Path(executable).is_file():
            raise ConfigError(
                f"ACTOR_ENVIRONMENT_REGISTRY[{name!r}] must be the path of a Python "
                f"interpreter, such as PY_EXECUTABLES.SYSTEM: got {executable!r}; a "
                "class whose packages lie elsewhere declares an ActorEnvironment"
            )
        super().__setitem__(name, executable)


ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = _Executables()
"""Interpreters by the path of a worker class; all others run in that of the program, or
in the environment that they declare."""


def get_actor_python_env(actor_class_fqn: str) -> str:
    """Return the interpreter of a worker class."""
    return ACTOR_ENVIRONMENT_REGISTRY.get(actor_class_fqn, PY_EXECUTABLES.SYSTEM)


class RayWorkerBuilder(workers.RayWorkerBuilder):
    """See `rl_distributed.RayWorkerBuilder`; also accepts Ray-decorated classes.

    Args:
        ray_actor_class_fqn: `"module.Class"`, or a class, decorated or not.
        args: Positional arguments of its constructor.
        kwargs: Keyword arguments of its constructor.
    """

    def __init__(self, ray_actor_class_fqn: Any, *args: Any, **kwargs: Any) -> None:
        plain = ray_actor_class_fqn
        if not isinstance(plain, str):
            plain = _without_ray(plain)
        super().__init__(plain, *args, **kwargs)
        self._given = ray_actor_class_fqn
        executable = get_actor_python_env(self.class_name)
        if executable != PY_EXECUTABLES.SYSTEM:
            chosen = super().with_options(py_executable=executable)
            self.options = chosen.options

    def with_options(self, **changes: Any) -> RayWorkerBuilder:
        """Return a builder with other process options."""
        plain = super().with_options(**changes)
        other = RayWorkerBuilder(self._given, *self.args, **self.kwargs)
        other.options = plain.options
        return other

    def portable_class(self) -> bytes:
        """Return the class in a form that is unwrapped when a worker loads it."""
        target: Any = self.worker_class
        options: Mapping[str, Any] = {}
        if not isinstance(target, str):
            options = _ray_options(self._given)
        pickled: bytes = ray.cloudpickle.dumps(_WorkerClass(target, options))
        return pickled


class _WorkerClass:
    """A class that becomes itself, unwrapped, when it is unpickled in a worker."""

    def __init__(self, target: Any, options: Mapping[str, Any]) -> None:
        self._target, self._options = target, dict(options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_worker_class, (self._target, self._options)


def _load_worker_class(target: Any, options: Mapping[str, Any]) -> type[Any]:
    """Import and unwrap a class; importing this module has installed the finder."""
    if isinstance(target, str):
        module, _, name = target.rpartition(".")
        found = getattr(__import__(module, fromlist=[name]), name)
        target, options = _without_ray(found), _ray_options(found)
    asked = {k: v for k, v in options.items() if k not in _OF_THE_BUNDLE}
    return _configured(target, asked) if asked else target


def _configured(cls: type[Any], asked: Mapping[str, Any]) -> type[Any]:
    """Return the class with the process options of its decorator."""

    def configure_worker(
        num_gpus: Any = None, bundle_indices: Any = None, num_gpus_per_node: Any = None
    ) -> tuple[Any, ...]:
        arguments = {
            "num_gpus": num_gpus,
            "bundle_indices": bundle_indices,
            "num_gpus_per_node": num_gpus_per_node,
        }
        # Settings of the class itself win over those of its decorator.
        own = ask_configuration(cls, arguments)
        runtime_env = workers.recursive_merge_options(
            asked.get("runtime_env") or {}, own.runtime_env
        )
        options = {k: v for k, v in asked.items() if k != "runtime_env"}
        return {**options, **own.options}, own.env_vars, own.init_kwargs, runtime_env

    members = {"configure_worker": staticmethod(configure_worker)}
    made = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    # The names of the original appear in logs and errors.
    made.__qualname__ = cls.__qualname__
    return made


def _without_ray(decorated: Any) -> Any:
    """Return the class under `@ray.remote`, or any other object unchanged."""
    metadata = getattr(decorated, "__ray_metadata__", None)
    if metadata is None:
        return decorated
    modified = metadata.modified_class
    # Ray subclasses the user's class, and names the original here.
    return getattr(modified, "__ray_actor_class__", modified)


def _ray_options(decorated: Any) -> dict[str, Any]:
    """Return the options of the decorator that are set."""
    options = getattr(decorated, "_default_options", None) or {}
    return {key: value for key, value in options.items() if value is not None}


class RayWorkerGroup(workers.RayWorkerGroup[Any]):
    """See `rl_distributed.RayWorkerGroup`; `workers[i].method.remote(...)` works.

    Workers also get the environment of the program, without its secrets.

    Args:
        cluster: Where the workers run.
        remote_worker_builder: Their class and its arguments.
        workers_per_node: Bundles to use on each node; None: all.
        name_prefix: Name of the group in messages.
        bundle_indices_list: Tied groups, each (placement group, bundles).
        sharding_annotations: Named axes over the workers.
        env_vars: Environment variables of every worker.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: Any,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            cluster,
            remote_worker_builder,
            workers_per_node,
            name_prefix,
            bundle_indices_list,
            sharding_annotations,
            {**variables_of_the_program(), **(env_vars or {})},
            # NeMo RL sets no limit, and constructors of workers load models.
            start_deadline_s=_START_DEADLINE_S,
        )

    @property
    def workers(self) -> list[WorkerHandle]:
        """Handles of the workers, by rank."""
        return [WorkerHandle(self, rank) for rank in range(self.world_size)]

    @property
    def master_address(self) -> str:
        """MASTER_ADDR of the workers."""
        return self._rendezvous_variables()["MASTER_ADDR"]

    @property
    def master_port(self) -> int:
        """MASTER_PORT of the workers."""
        return int(self._rendezvous_variables()["MASTER_PORT"])

    def call_by_place(
        self, rank: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of one worker with positional arguments.

        Args:
            rank: Rank of the worker.
            name: Name of the method.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            Ray's reference to the result.
        """
        self.recover()
        handle = self._workers[rank].handle
        return handle.__ray_call__.remote(_call_by_place, name, *args, **kwargs)

    def _rendezvous_variables(self) -> dict[str, str]:
        names = ("MASTER_ADDR", "MASTER_PORT")
        reference = self._workers[0].handle.__ray_call__.remote(_variables, names)
        variables: dict[str, str] = ray.get(reference, timeout=self.call_deadline_s)
        return variables


def variables_of_the_program() -> dict[str, str]:
    """Return variables that workers would not get otherwise; warn of the secrets."""
    withheld = withheld_variables(os.environ)
    secrets = [name for name in withheld if is_secret_variable(name)]
    if secrets:
        warn_difference(
            f"workers do not get {', '.join(secrets)}, as in nemo_rl, because they "
            "look like secrets; name those that they need in env_vars"
        )
    return {name: os.environ[name] for name in withheld if name not in secrets}


def _call_by_place(host: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method with its arguments bound to names; runs in the worker."""
    method = getattr(host._worker, name)
    bound = inspect.signature(method).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        # `bind` collects these under one name, but calls take each by its own.
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{name}.remote takes no arguments by place, as {parameter.name!r} of "
                "the method has no name that a call could use"
            )
    return host.call(name, None, **arguments)


def _variables(_: object, names: tuple[str, ...]) -> dict[str, str]:
    """Return environment variables; runs in the worker."""
    return {name: os.environ[name] for name in names}


class WorkerHandle:
    """Handle of one worker, whose methods are called like those of a Ray actor."""

    def __init__(self, group: RayWorkerGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def __getattr__(self, name: str) -> _RemoteMethod:
        # Copy and pickle look for special methods, which no worker has.
        if name.startswith("__"):
            raise AttributeError(name)
        return _RemoteMethod(self._group, self._rank, name)

    def __repr__(self) -> str:
        return f"WorkerHandle({self._group.name!r}, rank {self._rank})"


class _RemoteMethod:
    """`.remote(...)` of one method of one worker."""

    def __init__(self, group: RayWorkerGroup, rank: int, name: str) -> None:
        self._group, self._rank, self._name = group, rank, name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return Ray's reference to its result."""
        if not args:
            return self._group.run_single_worker_single_data(
                self._name, self._rank, common_kwargs=kwargs
            )
        # Calls to workers take keyword arguments, whose names only the worker knows.
        return self._group.call_by_place(self._rank, self._name, args, kwargs)

    def options(self, **_: Any) -> _RemoteMethod:
        """Return the method unchanged: Ray's options of single calls are ignored."""
        return self
