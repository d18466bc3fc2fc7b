"""Training and generation backends for language models, and weight sync between them.

Names are imported on first use: `import rl_models` loads neither torch nor Ray.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
