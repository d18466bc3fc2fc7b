"""A sandbox for programs written by a model.

```
Program --languages--> Command
   |                      |
SandboxPool (pool) --> zygote, one process per slot --fork, layers--> a Python program
                                                    --fork, bwrap---> a command
ContainerSandbox --> docker or podman        RemoteSandbox --> a service (service)
```
`interface` is what they share; `runs` defines levels, limits and results; `hostile` and
`hostile_commands` have programs that try to escape. `service` is imported by itself, as
it needs a web server (`rl-distributed[http]`).
"""

from rl_envs.sandbox.container import ContainerSandbox
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.languages import LANGUAGES
from rl_envs.sandbox.pool import SandboxPool, reachable_level
from rl_envs.sandbox.registry import open_sandbox, sandbox_registry
from rl_envs.sandbox.remote import RemoteSandbox
from rl_envs.sandbox.runs import (
    Command,
    Program,
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
    SandboxStatus,
)

__all__ = [
    "LANGUAGES",
    "Command",
    "ContainerSandbox",
    "Program",
    "RemoteSandbox",
    "Sandbox",
    "SandboxLevel",
    "SandboxLimits",
    "SandboxPool",
    "SandboxResult",
    "SandboxStatus",
    "open_sandbox",
    "reachable_level",
    "sandbox_registry",
]
