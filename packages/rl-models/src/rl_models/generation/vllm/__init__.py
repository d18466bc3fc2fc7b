"""Generation by the vLLM engine, in an environment of its own.

Names are imported on first use. Nothing here imports vllm before an engine is built, so
a driver without it reads the settings and starts the workers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
