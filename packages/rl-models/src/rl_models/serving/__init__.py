"""A model behind OpenAI's HTTP interface: an engine's server, replicated.

```
client --HTTP--> router (this process) --HTTP--> replica 0: server + engine, vLLM in its
                   |  least loaded,                environment, or `huggingface`
                   |  one deadline per request     replica 1: ...
                 fleet: starts, watches and replaces replicas, updates their weights
```
Names are imported on first use; aiohttp is needed only where a server is started.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_models.serving.config import ServeConfig
    from rl_models.serving.server import Server, serve

__all__ = ["ServeConfig", "Server", "serve"]

_MODULES = {"ServeConfig": "config", "Server": "server", "serve": "server"}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
