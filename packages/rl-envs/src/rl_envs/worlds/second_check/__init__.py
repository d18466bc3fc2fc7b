"""A second, stricter check of answers that score high.

```
conversation --> environment --> reward (unchanged) --high, in the sample--> check
                                                  metadata: accepted | rejected <--+
```
"""

from rl_envs.worlds.second_check.environment import (
    CheckConfig,
    ScorerConfig,
    SecondCheckConfig,
    SecondCheckEnvironment,
)
from rl_envs.worlds.second_check.math_format import MathFormatEnvironment

__all__ = [
    "CheckConfig",
    "MathFormatEnvironment",
    "ScorerConfig",
    "SecondCheckConfig",
    "SecondCheckEnvironment",
]
