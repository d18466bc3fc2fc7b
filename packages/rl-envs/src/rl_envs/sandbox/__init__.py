"""A sandbox for programs that a model wrote.

```
SandboxPool (pool) --> zygote, one process per slot --fork, layers--> one program
```
`runs` has the level, the limits and the result, `hostile` programs that try to escape.
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
