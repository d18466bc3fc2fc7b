"""Causal LMs of Megatron-core, with tensor and data parallelism.

It runs in an environment of its own (`rl-models[megatron]`), which its workers are
started in. The driver has none of Megatron-core, and looks at settings without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
