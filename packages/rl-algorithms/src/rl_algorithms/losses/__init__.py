"""Loss functions: pure functions of log-probabilities, masks and advantages.

Every reduction divides by the *global* number of valid tokens or sequences, so that the
losses of micro-batches and ranks add up to the loss of the whole batch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
