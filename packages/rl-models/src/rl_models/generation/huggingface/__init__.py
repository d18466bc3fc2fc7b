"""Batched sampling with a static key-value cache on Hugging Face models.

The backend is imported on first use: a driver that only starts workers asks `Traits`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
