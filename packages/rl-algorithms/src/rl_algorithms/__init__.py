"""GRPO and SFT trainers, losses, rollouts, and `train()` in five lines.

Names are imported on first use: `import rl_algorithms` loads neither torch nor Ray.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
