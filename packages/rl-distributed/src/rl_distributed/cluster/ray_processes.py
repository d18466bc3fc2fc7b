"""Start the processes of a single-machine cluster.

They get selected variables of the program's environment (`passed_variables`).

A signal to the program's process group (`timeout`, a shell that exits, `kill -- -PID`)
must not end its cluster at the same time, or the program could save nothing. So they
have process groups of their own; the kernel ends them with the program.

Ray starts an autoscaler, the server of its dashboard and a reader of the workers'
output with every cluster, and waits for some of them even if they have nothing to do:
one machine cannot grow, and the arguments that switch the other two off only silence
them. Together they take a third of the start-up time and most of the shutdown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services
from ray._private.node import Node

from rl_distributed.cluster.passed_variables import passed_variables

__all__ = ["only_needed_processes", "private_processes"]


@contextmanager
def only_needed_processes(*, log_monitor: bool) -> Iterator[None]:
    """Have a cluster that is started inside the block do without these processes.

    A version of Ray that starts them in another way starts them all.

    Args:
        log_monitor: whether the output of workers is to reach this process.
    """
    instead: dict[str, Callable[..., None]] = {
        "start_monitor": _start_nothing,
        "start_api_server": _start_no_server,
    }
    if not log_monitor:
        instead["start_log_monitor"] = _start_nothing
    before = {name: vars(Node)[name] for name in instead if name in vars(Node)}
    for name in before:
        setattr(Node, name, instead[name])
    try:
        yield
    finally:
        # `Node` is shared by the whole process, so the patch must not
        # outlive the start.
        for name, method in before.items():
            setattr(Node, name, method)


@contextmanager
def private_processes(pass_env: Iterable[str]) -> Iterator[None]:
    """Give what Ray starts inside the block a process group and an environment.

    Args:
        pass_env: variables that it gets beside `PASSED_VARIABLES`; and all that Ray
            itself sets for a process.

    Raises:
        AttributeError: this version of Ray starts its processes in another way. It is
            refused, or a worker would see every secret of the program.
    """
    popen: Any = services.ConsolePopen
    names = tuple(pass_env)

    class Popen(popen):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            asked = os.environ if kwargs.get("env") is None else kwargs["env"]
            # Values that Ray itself sets for the process, as they differ from the
            # program's own.
            by_ray = {k: v for k, v in asked.items() if os.environ.get(k) != v}
            # Ray's values last: it may set a variable that the program
            # has set differently.
            kwargs["env"] = {**passed_variables(asked, names), **by_ray}
            super().__init__(*args, **{"process_group": 0, **kwargs})

    services.ConsolePopen = Popen
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _start_nothing(node: Node, *args: Any, **kwargs: Any) -> None:
    del node, args, kwargs


def _start_no_server(node: Node, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    node._webui_url = ""
