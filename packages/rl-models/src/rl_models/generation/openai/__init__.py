"""Sampling by servers behind an address, which speak OpenAI's completions.

```
rows -> requests, one each, to the least busy address -> tokens and log-probs -> rows
weights -> a model folder -> each server loads it, and confirms the version
```
The backend is imported on first use: a driver that only starts workers asks `Traits`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
