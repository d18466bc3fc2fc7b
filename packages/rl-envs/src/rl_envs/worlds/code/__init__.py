"""Programming tasks, in which a program is right if it passes the tests of its row.

```
response --extract--> program --checks: what to run--> SandboxPool --> results
                                        rules, outside of the sandbox --> right or wrong
```
The program runs in a sandbox that the expected results never enter, so that a wrong
program finds nothing to read or overwrite that would make it pass.
"""

from __future__ import annotations

from rl_envs.worlds.code.environment import CodeConfig, CodeEnvironment

__all__ = ["CodeConfig", "CodeEnvironment"]
