"""Checks of environments that run agents: replies at an address, and what they earn.

```
rows -> right and wrong replies -> one task for each -> rewards --> full where right
                                                           |
                                                           +--> the same again
```
An agent gets the same reply to all of its requests.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_envs.agents.tasks import AgentHost
from rl_envs.errors import AgentSetupError
from rl_envs.interfaces import MessageLog
from rl_envs.testing.findings import Examination, Finding
from rl_envs.testing.responses import trials
from rl_envs.testing.verdicts import Excuse, Verdicts, failed

if TYPE_CHECKING:
    from rl_envs.agents.stand_in import AgentQuestion, AgentReply, PlayedTask

__all__ = ["AgentExamination"]

_ENDS = "tasks end with a reward"
_ASKS = "the policy is asked"
_EQUAL = "the same a second time"
_COPY = "a copy runs the same agents"


class AgentExamination:
    """Examines an environment of agents; see `examine_environment`.

    Args:
        env: The environment; it remains the caller's to shut down.
        rows: Tasks.
        prompts: Initial conversation of each.
        config: Strictness of the checks.
        excuse: Whether a response is right, too.

    Raises:
        AgentSetupError: `aiohttp` is missing.
    """

    def __init__(
        self,
        env: AgentHost,
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[MessageLog],
        config: Examination,
        excuse: Excuse | None,
    ) -> None:
        self.env, self.rows, self.config, self.excuse = env, rows, config, excuse
        self.prompts = prompts
        self.trials = trials(rows, prompts, config)

    def findings(self) -> Iterator[Finding]:
        """Yield one finding per check."""
        began_s = time.perf_counter()
        played = self._play()
        row_s = (time.perf_counter() - began_s) / len(played)
        problem = self._problem(played)
        if problem is not None:
            yield problem
            return
        yield Finding(_ENDS, "pass", f"{len(played)} tasks")
        yield self._asks(played)
        rewards = _rewards(played)
        # More requests follow what would have been the answer: the agent may need
        # others than the gold answer to them.
        full = rewards >= self.config.full_reward
        ends = full | np.asarray([len(one.exchanges) == 1 for one in played])
        yield from Verdicts(
            self.rows, self.trials, rewards, ends, self.config, self.excuse
        ).findings()
        yield self._equal(rewards)
        yield self._time(row_s)
        yield self._copy()

    def _play(self) -> list[PlayedTask]:
        try:
            # The listener's packages are needed here alone.
            from rl_envs.agents.stand_in import (  # noqa: PLC0415
                AgentReply,
                run_agents,
            )
        except ModuleNotFoundError as error:
            raise AgentSetupError(
                f"examining agents needs the package {error.name!r}; run: pip install "
                "'rl-distributed[http]'"
            ) from error

        async def answer(question: AgentQuestion) -> AgentReply:
            return AgentReply.of(self.trials[question.task].response)

        tasks = [(self.prompts[t.row], dict(self.rows[t.row])) for t in self.trials]
        return run_agents(self.env, tasks, answer)

    def _problem(self, played: Sequence[PlayedTask]) -> Finding | None:
        for trial, one in zip(self.trials, played, strict=True):
            if one.result.reward is None:
                return failed(_ENDS, f"{one.result.ending}: {one.result.error}", trial)
        return None

    def _asks(self, played: Sequence[PlayedTask]) -> Finding:
        for trial, one in zip(self.trials, played, strict=True):
            if not one.exchanges:
                reason = "its agent ended without a request, which leaves nothing to "
                return failed(_ASKS, f"{reason}train on", trial)
        mean = sum(len(one.exchanges) for one in played) / len(played)
        return Finding(_ASKS, "pass", f"{mean:.3g} requests per task")

    def _equal(self, rewards: npt.NDArray[np.float64]) -> Finding:
        if not self.config.deterministic:
            return Finding(_EQUAL, "skip", "random by design")
        again = self._play()
        for trial, one, before in zip(self.trials, again, rewards, strict=True):
            if one.result.reward is None:
                return failed(_EQUAL, f"{one.result.ending}: {one.result.error}", trial)
            if one.result.reward.reward != before:
                reason = (
                    f"the reward is {one.result.reward.reward:g}, and was {before:g}; "
                    "set deterministic to false if the agent is random by design"
                )
                return failed(_EQUAL, reason, trial)
        return Finding(_EQUAL, "pass", f"{len(again)} tasks")

    def _time(self, row_s: float) -> Finding:
        shown = f"{row_s * 1000:.3g} ms, of {len(self.trials)} tasks"
        if row_s <= self.config.max_row_s:
            return Finding("time per task", "pass", shown)
        limit = f", more than {self.config.max_row_s * 1000:g} ms"
        return Finding("time per task", "fail", shown + limit)

    def _copy(self) -> Finding:
        try:
            copied = pickle.loads(pickle.dumps(self.env))
        except Exception as error:
            # An agent that is a function of the driver's stays in the driver.
            return Finding(_COPY, "skip", f"{type(error).__name__}: {error}")
        copied.shutdown()
        if copied.agent_limits == self.env.agent_limits:
            return Finding(_COPY, "pass")
        reason = f"its limits are {copied.agent_limits}, not {self.env.agent_limits}"
        return Finding(_COPY, "fail", reason)


def _rewards(played: Sequence[PlayedTask]) -> npt.NDArray[np.float64]:
    return np.asarray(
        [
            float("nan") if one.result.reward is None else one.result.reward.reward
            for one in played
        ],
        dtype=np.float64,
    )
