"""Checks of environments and tasks, for use in tests.

```python
def test_my_environment():
    check_environment(MyEnvironment(), metadata=[{"answer": "4"}])
    assert_passed(examine_environment(MyEnvironment, rows))
    assert_passed(examine_tasks(lambda seed: MyTasks(seed=seed)))
```
`contract` checks the interface, `rewards` the rewards of right and wrong responses,
`tasks` the rows of a task source, `processes` a copy in another process; `findings`
defines their results.
"""

from __future__ import annotations

from rl_envs.testing.contract import (
    check_environment,
    check_return,
    example_message_logs,
)
from rl_envs.testing.findings import Examination, Finding, assert_passed
from rl_envs.testing.rewards import examine_environment
from rl_envs.testing.tasks import examine_tasks

__all__ = [
    "Examination",
    "Finding",
    "assert_passed",
    "check_environment",
    "check_return",
    "examine_environment",
    "examine_tasks",
    "example_message_logs",
]
