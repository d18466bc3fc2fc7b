"""Python environments of actor classes: declared, built and checked.

```
class -> declaration -> way -> folder on each node -> preflight -> worker
         (declarations) (extra) (store, uv_tool)     (preflight)  (workers.launch)
```
"""

from rl_distributed.actor_environments.base import ActorEnvironment, PreparedEnvironment
from rl_distributed.actor_environments.built import BuiltEnvironment
from rl_distributed.actor_environments.declarations import (
    Declaration,
    declared_environment,
    declared_names,
    environment_registry,
    get_environment,
)
from rl_distributed.actor_environments.existing import (
    ContainerEnvironment,
    DriverEnvironment,
    InterpreterEnvironment,
)
from rl_distributed.actor_environments.extra import ExtraEnvironment
from rl_distributed.actor_environments.overrides import user_environments
from rl_distributed.actor_environments.packages import (
    InstalledEnvironment,
    OverlayEnvironment,
)
from rl_distributed.actor_environments.store import (
    EnvironmentStore,
    StoredEnvironment,
    default_root,
)
from rl_distributed.actor_environments.workspace import UvWorkspaceEnvironment

__all__ = [
    "ActorEnvironment",
    "BuiltEnvironment",
    "ContainerEnvironment",
    "Declaration",
    "DriverEnvironment",
    "EnvironmentStore",
    "ExtraEnvironment",
    "InstalledEnvironment",
    "InterpreterEnvironment",
    "OverlayEnvironment",
    "PreparedEnvironment",
    "StoredEnvironment",
    "UvWorkspaceEnvironment",
    "declared_environment",
    "declared_names",
    "default_root",
    "environment_registry",
    "get_environment",
    "user_environments",
]
