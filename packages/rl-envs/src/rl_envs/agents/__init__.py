"""Agents: programs that talk to the policy by OpenAI's interface, as an environment.

```
AgentEnvironment (in a worker) --requests--> address of the run --> the policy
      ^  polled for results                        |  records tokens
      +---- jobs: a task, an address, a key -------+
```
"""
