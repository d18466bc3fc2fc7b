"""Loss functions: pure functions of log-probabilities, masks and advantages.

Every reduction divides by the *global* count of valid tokens or sequences, so the
losses of micro-batches and of ranks add up to the loss of the whole batch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
