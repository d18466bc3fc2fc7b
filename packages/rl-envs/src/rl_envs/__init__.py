"""Environments, rewards and verifiable tasks for language models.

Names are imported when they are first used, so that this import stays cheap.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
