"""Agents: programs that converse with the policy at an address.

```
agent --HTTP--> PolicyServer (thread) --ModelCall--> GeneratorDesk --> the policy
  ^                 | records tokens                 |
  +---- answer -----+<--------- sampled tokens ------+
WorkerCrew (threads) -jobs-> workers of the environment -results-> AgentPlayer
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| server loop | requests | rows, answers | a sampled row | the desk, a session's end |
| crew thread | jobs | results | a poll of its worker | the poll's wait, deadlines |
| player | results | trajectories | all results | the crew, a failure, a deadline |
| desk thread | rows | tokens | a call of the generator | the generator's deadlines |

Shutdown order: sessions (their requests end), the crew, the desk, the server.
"""
