"""`RayWorkerBuilder`: the class of a group's workers and how they are created."""

from __future__ import annotations

import dataclasses
import inspect
import site
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_distributed.actor_environments import (
    ActorEnvironment,
    Declaration,
    DriverEnvironment,
    InterpreterEnvironment,
    PreparedEnvironment,
    declared_environment,
)
from rl_distributed.errors import ConfigError
from rl_distributed.redaction import is_secret_variable
from rl_distributed.suggestion import did_you_mean
from rl_distributed.workers.host import WorkerHost, WorkerIdentity
from rl_distributed.workers.options import WorkerOptions, recursive_merge_options
from rl_distributed.workers.worker_class import LaunchOverrides

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

    from rl_distributed.cluster.placement import Bundle

__all__ = ["RayWorkerBuilder"]

# One actor class for all workers: Ray exports a class to the cluster once.
_HOST: Any = ray.remote(WorkerHost)
_OPTION_NAMES = tuple(field.name for field in dataclasses.fields(WorkerOptions))


class RayWorkerBuilder:
    """A plain class and the arguments that each worker of a group is created with.

    The class is imported in the worker's process only, so the caller needs none of its
    dependencies. A class object works as well, for classes of a script or notebook,
    which no other process can import.

    A class may have a static method `configure_worker(num_gpus, bundle_indices,
    num_gpus_per_node)`, with any of these parameters, which returns `(resources,
    env_vars, init_kwargs)` or those and a runtime environment: Ray options,
    environment variables and constructor arguments that its process needs.

    A class whose packages are not the driver's declares an `ActorEnvironment`; see
    `rl_distributed.actor_environments.declarations` for the ways to do so. The option
    `environment` chooses another.

    Args:
        worker_class: `"module.Class"`, or a class.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.
    """

    def __init__(
        self, worker_class: str | type[Any], *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(worker_class, str):
            module, _, name = worker_class.rpartition(".")
            parts = [*module.split("."), name]
            if not all(part.isidentifier() for part in parts):
                raise ConfigError(
                    "worker_class must be a path such as 'package.module.Class': got "
                    f"{worker_class!r}"
                )
        elif not isinstance(worker_class, type):
            raise ConfigError(
                "worker_class must be a path such as 'package.module.Class' or a "
                f"class: got {worker_class!r}{_remedy(worker_class)}"
            )
        self.worker_class = worker_class
        self.args = args
        self.kwargs = kwargs
        self.options = WorkerOptions()

    @classmethod
    def of(cls, worker: RayWorkerBuilder | str | type[Any]) -> RayWorkerBuilder:
        """Return a builder for a class; a builder is returned unchanged.

        Args:
            worker: a builder, a class, or its path.

        Raises:
            ConfigError: it is none of them, or a class that needs arguments.
        """
        if isinstance(worker, RayWorkerBuilder):
            return worker
        builder = cls(worker)
        if isinstance(worker, type) and not hasattr(worker, "configure_worker"):
            _check_needs_nothing(worker)
        return builder

    def with_options(self, **changes: Any) -> RayWorkerBuilder:
        """Return a builder with other process options; see `WorkerOptions` for them."""
        for name in changes:
            if name not in _OPTION_NAMES:
                raise ConfigError(
                    f"{name!r} is no worker option; there are "
                    f"{', '.join(_OPTION_NAMES)}{did_you_mean(name, _OPTION_NAMES)}"
                )
        other = RayWorkerBuilder(self.worker_class, *self.args, **self.kwargs)
        other.options = dataclasses.replace(self.options, **changes)
        return other

    @property
    def class_name(self) -> str:
        """The name of the class, for messages."""
        if isinstance(self.worker_class, str):
            return self.worker_class
        return f"{self.worker_class.__module__}.{self.worker_class.__qualname__}"

    def portable_class(self) -> str | bytes:
        """Return the class as workers receive it: its path, or the pickled class."""
        if isinstance(self.worker_class, str):
            return self.worker_class
        pickled: bytes = ray.cloudpickle.dumps(self.worker_class)
        return pickled

    def declaration(self) -> Declaration:
        """Return the environment of the workers, and where it is declared.

        Raises:
            ConfigError: the declaration is not an environment.
        """
        options = self.options
        if options.py_executable is not None:
            return Declaration(InterpreterEnvironment(options.py_executable), "option")
        if options.environment is not None:
            return Declaration(options.environment, "option")
        return declared_environment(self.worker_class)

    def search_path(self, environment: ActorEnvironment | None = None) -> list[str]:
        """Folders in which the workers find modules as the caller does.

        Another environment has packages of its own: it is given only the folders of the
        caller's own code, which it searches last.
        """
        folders = [str(Path(folder or ".").resolve()) for folder in sys.path]
        if environment is None or isinstance(environment, DriverEnvironment):
            return folders
        # The user's site directory lies outside of the interpreter's prefixes.
        installed = {sys.prefix, sys.base_prefix, sys.exec_prefix, site.getuserbase()}
        return [f for f in folders if not _lies_in(f, installed)]

    def __call__(
        self,
        placement_group: PlacementGroup,
        bundle_index: int,
        share: Bundle,
        identity: WorkerIdentity,
        *,
        env_vars: Mapping[str, str] | None = None,
        overrides: LaunchOverrides | None = None,
        prepared: PreparedEnvironment | None = None,
    ) -> ActorHandle:
        """Start the process of one worker on a bundle; the class is loaded later."""
        isolation = None if prepared is None else prepared.runtime_env
        options = recursive_merge_options(
            {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus},
            self.options.to_ray(env_vars or {}, isolation),
        )
        if overrides is not None:
            options = recursive_merge_options(options, overrides.options)
            # Ray logs runtime environments, so secrets travel with the worker's
            # identity instead.
            plain = {
                k: v for k, v in overrides.env_vars.items() if not is_secret_variable(k)
            }
            runtime_env = recursive_merge_options(
                overrides.runtime_env, {"env_vars": plain}
            )
            options = recursive_merge_options(options, {"runtime_env": runtime_env})
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement_group,
            placement_group_bundle_index=bundle_index,
            placement_group_capture_child_tasks=True,
        )
        return _HOST.options(**options).remote(identity)

    def __repr__(self) -> str:
        return f"RayWorkerBuilder({self.class_name!r})"


def _check_needs_nothing(worker_class: type[Any]) -> None:
    """Refuse a class whose constructor cannot be called without arguments."""
    try:
        inspect.signature(worker_class).bind()
    except TypeError as error:
        name = worker_class.__name__
        raise ConfigError(
            f"a class given alone must take no arguments: got {name} ({error}); give "
            f"RayWorkerBuilder({name}, ...) with the arguments of its constructor"
        ) from None
    except ValueError:
        return  # a class written in C that has no signature to inspect


def _remedy(thing: object) -> str:
    """Return a hint for objects that are often mistaken for a class."""
    name = type(thing).__name__
    if hasattr(thing, "remote"):
        return "; give the plain class, without @ray.remote"
    if callable(thing):
        return "; give a class: each worker makes an object of it and keeps that"
    return f", an object of {name}; give its class: each worker makes an object of it"


def _lies_in(folder: str, parents: Collection[str]) -> bool:
    return any(Path(folder).is_relative_to(Path(p).resolve()) for p in parents)
