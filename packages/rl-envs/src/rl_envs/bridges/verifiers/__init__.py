"""verifiers: environments of the classic interface, each in a Python of its own.

```
AgentEnvironment (in a worker) --JSON lines--> host.py: load_environment, run_rollout
                                                  |
                        address of the run <--requests--+
```
"""

from __future__ import annotations

from rl_envs.bridges.verifiers.config import VerifiersConfig, VerifiersHost
from rl_envs.bridges.verifiers.environment import VerifiersEnvironment
from rl_envs.bridges.verifiers.tasks import VerifiersTasks

__all__ = [
    "VerifiersConfig",
    "VerifiersEnvironment",
    "VerifiersHost",
    "VerifiersTasks",
]
