"""Programming tasks: a program is right if it passes the tests of its row.

```
response --extract--> program --checks: what to run--> SandboxPool --> what it gave
                                   rules, kept outside of the sandbox --> right or wrong
```
The program runs in a sandbox. What it should have given never enters it, so that there
is nothing in there to read or to overwrite that would make a wrong program right.
"""

from __future__ import annotations

from rl_envs.worlds.code.environment import CodeConfig, CodeEnvironment

__all__ = ["CodeConfig", "CodeEnvironment"]
