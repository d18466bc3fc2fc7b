"""A world with a stateful Python interpreter.

```
response --fenced block or call--> cell --sandbox: earlier cells, then it--> result
       +--neither--> the judge of the final response
```
"""

from rl_envs.worlds.code_interpreter.environment import (
    CodeInterpreterConfig,
    CodeInterpreterEnvironment,
    FencedCallParser,
)

__all__ = ["CodeInterpreterConfig", "CodeInterpreterEnvironment", "FencedCallParser"]
