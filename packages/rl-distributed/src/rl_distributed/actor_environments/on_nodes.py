"""Preparing an environment on every node that will run workers in it.

Each node builds and checks for itself, all at the same time: the driver its own in its
own process, every other in a Ray task that is bound to that node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_distributed.actor_environments.base import ActorEnvironment, PreparedEnvironment
from rl_distributed.actor_environments.built import BuiltEnvironment
from rl_distributed.actor_environments.existing import DriverEnvironment
from rl_distributed.errors import ActorEnvironmentError, UserError

__all__ = ["prepare_on_nodes"]

# A task starts a process of its own on the node, before it begins its work.
_TASK_START_S = 60.0

_lock = threading.Lock()
# (node, environment, its content) -> the answer of that node.
_answers: dict[tuple[str, ActorEnvironment, str], PreparedEnvironment] = {}


def prepare_on_nodes(
    environment: ActorEnvironment, node_ids: Collection[str]
) -> Mapping[str, PreparedEnvironment]:
    """Make an environment ready on the given nodes.

    A node is asked once; after that the answer is known, as long as the content of the
    environment stays the same.

    Args:
        environment: which.
        node_ids: Ray's names of the nodes.

    Returns:
        The prepared environment of each node.

    Raises:
        ActorEnvironmentError: a node cannot have it; the message names the node.
        DeadlineExceededError: another process builds it for too long.
    """
    resolved = environment.resolve()
    if isinstance(resolved, DriverEnvironment) and not resolved.imports:
        return {node_id: PreparedEnvironment(resolved.label) for node_id in node_ids}
    content = resolved.key() if isinstance(resolved, BuiltEnvironment) else ""
    own = ray.get_runtime_context().get_node_id()
    others = [node_id for node_id in node_ids if node_id != own]
    with _lock:
        prepared = {
            node_id: _answers[node_id, resolved, content]
            for node_id in others
            if (node_id, resolved, content) in _answers
        }
    references = {
        node_id: _task(node_id).remote(resolved, os.environ.get("RL_ENV_ROOT"))
        for node_id in others
        if node_id not in prepared
    }
    # Asked each time, because it costs next to nothing and may have been pruned.
    if own in node_ids:
        prepared[own] = resolved.prepare()
    # After an error the other nodes go on, each until its own deadline: what they build
    # is of use, and Ray's forced cancel of a task that ends at that moment aborts the
    # driver.
    for node_id, reference in references.items():
        prepared[node_id] = _fetch(reference, node_id, resolved)
    with _lock:
        for node_id in references:
            _answers[node_id, resolved, content] = prepared[node_id]
    return prepared


def _prepare_here(
    environment: ActorEnvironment, root: str | None
) -> PreparedEnvironment:
    return environment.prepare(None if root is None else Path(root))


def _task(node_id: str) -> Any:
    return ray.remote(_prepare_here).options(
        # Workers may have claimed all CPUs, and preparing another node
        # would be of no use.
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )


def _fetch(
    reference: Any, node_id: str, environment: ActorEnvironment
) -> PreparedEnvironment:
    deadline_s = environment.preflight_deadline_s + _TASK_START_S
    if isinstance(environment, BuiltEnvironment):
        deadline_s += environment.build_deadline_s
    try:
        found: PreparedEnvironment = ray.get(reference, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError:
        raise ActorEnvironmentError(
            f"node {node_id} did not prepare environment {environment.label!r} within "
            f"{deadline_s:g} s; see its Ray logs"
        ) from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        # The error was raised on the node and does not name it.
        if isinstance(cause, UserError):
            raise ActorEnvironmentError(f"on node {node_id}: {cause}") from None
        raise cause from None
    except ray.exceptions.RayError as error:
        raise ActorEnvironmentError(
            f"node {node_id} cannot prepare environment {environment.label!r}: {error}"
        ) from None
    return found
