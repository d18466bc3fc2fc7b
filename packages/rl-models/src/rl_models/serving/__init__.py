"""A model behind OpenAI's HTTP interface: an engine's server, replicated.

```
client --HTTP--> router (this process) --HTTP--> replica 0: server + engine, vLLM in its
                   |  least loaded,                environment, or `huggingface`
                   |  one deadline per request     replica 1: ...
                 fleet: starts, watches and replaces replicas, updates their weights
```
Names are imported on first use; aiohttp is needed only where a server is started.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
