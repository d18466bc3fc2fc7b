"""A world whose judge is a language model on a server.

```
response --questions--> messages --chat: kept replies, budget--> verdicts --> reward
```
Requires `rl-envs[judge]`.
"""

from rl_envs.worlds.judge.config import JudgeConfig
from rl_envs.worlds.judge.environment import JudgeEnvironment

__all__ = ["JudgeConfig", "JudgeEnvironment"]
