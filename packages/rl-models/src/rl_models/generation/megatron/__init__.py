"""Sampling in the workers of the training backend `megatron`, with its weights.

No weights are sent or duplicated: the ranks that train a layer decode with it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
