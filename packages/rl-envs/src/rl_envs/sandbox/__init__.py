"""A sandbox for programs written by a model.

```
SandboxPool (pool) --> zygote, one process per slot --fork, layers--> one program
```
`runs` defines levels, limits and results; `hostile` has programs that try to escape.
"""

from rl_envs.sandbox.pool import SandboxPool, reachable_level
from rl_envs.sandbox.runs import (
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
    SandboxStatus,
)

__all__ = [
    "SandboxLevel",
    "SandboxLimits",
    "SandboxPool",
    "SandboxResult",
    "SandboxStatus",
    "reachable_level",
]
