"""MCP: the tools of a server of the Model Context Protocol, run in the sandbox.

```
earlier calls, the new one --a command in the sandbox--> dialogue.py <-stdio-> server
```
"""

from __future__ import annotations

from rl_envs.bridges.mcp.environment import McpConfig, McpEnvironment

__all__ = ["McpConfig", "McpEnvironment"]
