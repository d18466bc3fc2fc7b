"""Conformance checks for trainers, losses and estimators, including your own.

| check | runs on |
|---|---|
| `check_trainer` | a trainer: hooks in pairs, bitwise resume |
| `check_loss` | a loss: its paper's formula, its gradient, independence |
| `check_estimator` | an advantage estimator, likewise |

`check_loss` and `check_estimator` need `hypothesis`; each raises `ConformanceError`,
which names the rule that was broken.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
