"""OpenEnv: environments behind a server, one session for each conversation.

```
response --actions--> action --wire: one WebSocket per session--> server
                                                                    |
message of the environment <--observations-- observation, reward, done
```
"""

from __future__ import annotations

from rl_envs.bridges.openenv.config import OpenEnvConfig, OpenEnvServer
from rl_envs.bridges.openenv.environment import OpenEnvEnvironment
from rl_envs.bridges.openenv.tasks import OpenEnvTasks

__all__ = ["OpenEnvConfig", "OpenEnvEnvironment", "OpenEnvServer", "OpenEnvTasks"]
