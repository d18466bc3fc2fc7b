"""Start of Ray while the libraries of a training are imported.

```
this thread  | Ray ............ | adopts Ray, or ends it
imports      | torch, trainer ..... |
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| this thread | the section `cluster` | Ray | Ray's processes, then the imports | both |
| imports | nothing | what `load` returns | nothing | - |

The main thread starts Ray, because a Ray started by another thread takes seconds to
shut down. A start mostly waits for other processes while an import computes, so in
parallel they take as long as the longer one. The trainer that needs Ray adopts it and
closes it with its other parts; otherwise it ends with the block, however that ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from rl_algorithms.trainers.run.signals import SignalGuard
from rl_distributed.cluster.config import ClusterConfig
from rl_distributed.process.gc_pause import gc_paused

__all__ = ["adopt_early_ray", "loaded_beside_ray"]

LoadedT = TypeVar("LoadedT")


@dataclass
class _EarlyRay:
    """A cluster that was started before its user."""

    is_adopted: bool = False


_early: ContextVar[_EarlyRay | None] = ContextVar("rl_early_ray", default=None)


@contextmanager
def loaded_beside_ray(
    load: Callable[[], LoadedT], cluster: ClusterConfig, signals: SignalGuard
) -> Iterator[LoadedT]:
    """Import libraries, and start Ray meanwhile if that saves time.

    It does if torch is not imported yet and a local Ray has to be started.

    Args:
        load: Imports the libraries; then called in another thread.
        cluster: Settings for the start of Ray.
        signals: Signal guard, installed again after Ray has set its own handlers.

    Raises:
        UserError: The settings of Ray are impossible.
        DistributedError: Ray does not start.
    """
    if not _saves_time():
        yield load()
        return
    # Imported before the thread starts: when two threads import the same modules, one
    # may see a half-initialized one.
    from rl_distributed.cluster.start import init_ray, shutdown_ray  # noqa: PLC0415

    threads = ThreadPoolExecutor(1, thread_name_prefix="imports")
    # Imports create many objects that stay, which the collector would scan in vain.
    with gc_paused(), threads as executor:
        loading = executor.submit(load)
        started = init_ray(tls=cluster.tls, pass_env=cluster.pass_env)
        signals.install()
    early = _EarlyRay(is_adopted=not started)
    token = _early.set(early)
    try:
        signals.raise_pending()
        yield loading.result()
    finally:
        _early.reset(token)
        if not early.is_adopted:
            shutdown_ray()


def adopt_early_ray() -> bool:
    """Take over the cluster that was started early; return False if there is none.

    The caller then has to close it.
    """
    early = _early.get()
    if early is None or early.is_adopted:
        return False
    early.is_adopted = True
    return True


def _saves_time() -> bool:
    ray = sys.modules.get("ray")
    return (
        "torch" not in sys.modules
        and (ray is None or not ray.is_initialized())
        and os.environ.get("RAY_ADDRESS", "local") == "local"
        and threading.current_thread() is threading.main_thread()
    )
