"""Virtual clusters, worker groups, named sharding and batched data on Ray.

Every public name is imported when it is first used, so that `import rl_distributed`
costs nothing, and neither Ray nor torch is loaded before it is needed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
