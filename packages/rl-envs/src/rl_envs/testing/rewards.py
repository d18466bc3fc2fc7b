"""`examine_environment`: checks which responses earn rewards, and how reliably.

```
rows -> right and wrong responses -> one batch -> rewards --+--> full where right only
                                      |                     +--> the same in any batch
                                      +--> arguments, time   +--> the same elsewhere
```
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_distributed.batch.arrays import to_numpy
from rl_distributed.errors import ConfigError
from rl_envs.agents.tasks import AgentHost, agent_limits_of
from rl_envs.errors import EnvironmentContractError, SandboxError, TaskError
from rl_envs.interfaces import (
    EnvironmentInterface,
    MessageLog,
    as_columns,
    total_reward,
)
from rl_envs.registry import EnvironmentSpec
from rl_envs.testing.agents import AgentExamination
from rl_envs.testing.contract import check_environment, equal_values
from rl_envs.testing.findings import Examination, Finding
from rl_envs.testing.processes import rewards_in_another_process, says_it_pickles
from rl_envs.testing.responses import prompt_messages, trials
from rl_envs.testing.verdicts import Excuse, Verdicts, failed

__all__ = ["examine_environment"]

_ALONE = 8
"""Number of rows also scored one by one, which is slow."""
_OF_CONTRACT = 4
_EQUAL = "the same in any order and batch"
_ARGUMENTS = "arguments are left alone"


def examine_environment(
    env: Any,
    rows: Sequence[Mapping[str, Any]],
    config: Examination | None = None,
    *,
    prompts: Sequence[MessageLog] | None = None,
    excuse: Excuse | None = None,
) -> list[Finding]:
    """Try right and wrong responses to rows, and test the contract of the interface.

    Args:
        env: A registered name, a class, an environment, a reward function, or an
            `EnvironmentSpec`. An existing environment is shut down at the end.
        rows: Tasks: the columns that the environment reads.
        config: Strictness of the checks.
        prompts: Initial conversation of each row; None: its column `prompt` or
            `messages`.
        excuse: Function of a row and a response that earns the full reward without
            being the gold answer; returns True if the response is right, too.

    Returns:
        One finding per check; `assert_passed` raises if one failed.

    Raises:
        TaskError: There are no rows, or one has no prompt, or prompts are not one per
            row.
        ConfigError: The environment cannot be created.
        SandboxError: It needs a sandbox that is not available here.
    """
    if not rows:
        raise TaskError("an examination needs at least one row: got none")
    spec = env if isinstance(env, EnvironmentSpec) else EnvironmentSpec.of(env)
    if prompts is None:
        prompts = [prompt_messages(columns, row) for row, columns in enumerate(rows)]
    if len(prompts) != len(rows):
        raise TaskError(
            f"prompts must have one entry per row: got {len(prompts)} for {len(rows)}"
        )
    made, config = spec.make(), config or Examination()
    try:
        return list(_findings(made, rows, prompts, config, excuse))
    finally:
        made.shutdown()


def _findings(
    env: EnvironmentInterface[Any],
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[MessageLog],
    config: Examination,
    excuse: Excuse | None,
) -> Iterator[Finding]:
    usable = _usable(env, rows)
    yield usable
    if agent_limits_of(env) is None:
        yield from _Run(env, rows, prompts, config, excuse).findings()
    # An agent that cannot start says no more than that its row is unusable.
    elif usable.status == "pass" and isinstance(env, AgentHost):
        yield from AgentExamination(env, rows, prompts, config, excuse).findings()


def _usable(
    env: EnvironmentInterface[Any], rows: Sequence[Mapping[str, Any]]
) -> Finding:
    unusable = env.unusable_rows([dict(row) for row in rows])
    for row, reason in sorted(unusable.items()):
        more = f"{len(unusable)} of {len(rows)} rows cannot be scored; "
        return Finding("rows can be judged", "fail", f"{more}{reason}", row)
    return Finding("rows can be judged", "pass", f"{len(rows)} rows")


@dataclass(slots=True)
class _Judged:
    """Scores of some trials by one call of `step`."""

    rewards: npt.NDArray[np.float64]
    ends: npt.NDArray[np.bool_]
    time_s: float
    changed: str | None
    """Name of the argument that `step` modified; None: neither."""


class _Run:
    def __init__(
        self,
        env: EnvironmentInterface[Any],
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[MessageLog],
        config: Examination,
        excuse: Excuse | None,
    ) -> None:
        self.env, self.rows, self.config, self.excuse = env, rows, config, excuse
        self.trials = trials(rows, prompts, config)
        self.logs = [
            [
                *prompts[trial.row],
                {"role": "assistant", "content": trial.response},
            ]
            for trial in self.trials
        ]
        self.metadata = [dict(rows[trial.row]) for trial in self.trials]

    def findings(self) -> Iterator[Finding]:
        whole = self._first_call()
        if isinstance(whole, Finding):
            yield whole
            return
        verdicts = Verdicts(
            self.rows, self.trials, whole.rewards, whole.ends, self.config, self.excuse
        )
        yield from verdicts.findings()
        yield self._turns(whole)
        yield self._equal(whole)
        yield self._arguments(whole)
        yield self._time()
        yield self._elsewhere(whole)
        yield self._contract(whole)

    def judge(self, indices: Sequence[int]) -> _Judged:
        # Deep copies, to see whether the environment changes what it is given.
        logs = [copy.deepcopy(self.logs[index]) for index in indices]
        metadata = [copy.deepcopy(self.metadata[index]) for index in indices]
        start = time.perf_counter()
        result = as_columns(self.env.step(logs, metadata))
        time_s = time.perf_counter() - start
        before = [self.logs[index] for index in indices]
        columns = [self.metadata[index] for index in indices]
        changed = None if equal_values(logs, before) else "message_log_batch"
        if changed is None and not equal_values(metadata, columns):
            changed = "metadata"
        rewards = to_numpy(total_reward(result.rewards)).astype(np.float64)
        ends = to_numpy(result.terminateds).astype(np.bool_)
        if len(rewards) != len(indices) or len(ends) != len(indices):
            raise EnvironmentContractError(
                f"rewards and terminateds must have {len(indices)} entries: got "
                f"{len(rewards)} and {len(ends)}"
            )
        return _Judged(rewards, ends, time_s, changed)

    def _first_call(self) -> _Judged | Finding:
        """Score all trials; if that raises, find the trial responsible."""
        try:
            return self.judge(range(len(self.trials)))
        except (ConfigError, SandboxError):
            # The environment cannot run here at all, which says nothing about it.
            raise
        except Exception as error:
            # Any exception is a finding; find the row that causes it.
            whole = error
        for index, trial in enumerate(self.trials):
            try:
                self.judge([index])
            except Exception as error:
                return failed("step judges any response", _raised(error), trial)
        return Finding("step judges any response", "fail", _raised(whole))

    def _turns(self, whole: _Judged) -> Finding:
        name = "conversations end as declared"
        if self.env.many_turns is None:
            return Finding(name, "skip", "the class does not set many_turns")
        if self.env.many_turns or whole.ends.all():
            return Finding(name, "pass")
        trial = self.trials[int(np.argmin(whole.ends))]
        reason = "many_turns is False, but a conversation continues"
        return failed(name, reason, trial)

    def _equal(self, whole: _Judged) -> Finding:
        if not self.config.deterministic:
            return Finding(_EQUAL, "skip", "random by design")
        for what, batches in self._ways():
            for indices in batches:
                try:
                    again = self.judge(indices)
                except Exception as error:
                    trial = self.trials[indices[0]]
                    return failed(_EQUAL, f"{what}: {_raised(error)}", trial)
                expected = whole.rewards[indices]
                # NaN, which means not scored, must equal itself here.
                same = (again.rewards == expected) | (
                    np.isnan(again.rewards) & np.isnan(expected)
                )
                same &= again.ends == whole.ends[indices]
                if not same.all():
                    at = int(np.argmin(same))
                    reason = (
                        f"{what} the reward is {again.rewards[at]:g}, and was "
                        f"{expected[at]:g}; set deterministic to false if the "
                        "environment is random by design"
                    )
                    return failed(_EQUAL, reason, self.trials[indices[at]])
        return Finding(_EQUAL, "pass", f"{len(self.trials)} conversations")

    def _ways(self) -> Iterator[tuple[str, list[list[int]]]]:
        """Yield ways to split all trials into batches."""
        order = list(range(len(self.trials)))
        shuffled = random.Random(self.config.seed).sample(order, len(order))
        third = max(1, len(order) // 3)
        yield "the second time", [order]
        yield "in another order", [shuffled]
        yield (
            "in smaller batches",
            [shuffled[at : at + third] for at in range(0, len(order), third)],
        )
        yield "alone", [[index] for index in shuffled[:_ALONE]]

    def _arguments(self, whole: _Judged) -> Finding:
        if whole.changed is None:
            return Finding(_ARGUMENTS, "pass")
        reason = f"step changed its argument {whole.changed}; work on a copy"
        return Finding(_ARGUMENTS, "fail", reason)

    def _time(self) -> Finding:
        """Time a later call, as the first one may start processes."""
        size = len(self.trials)
        row_s = self.judge(range(size)).time_s / size
        shown = f"{row_s * 1000:.3g} ms in a batch of {size}"
        if row_s <= self.config.max_row_s:
            return Finding("time per row", "pass", shown)
        limit = f", more than {self.config.max_row_s * 1000:g} ms"
        return Finding("time per row", "fail", shown + limit)

    def _elsewhere(self, whole: _Judged) -> Finding:
        name = "the same in another process"
        indices = list(range(min(len(self.trials), _ALONE)))
        try:
            pickled = pickle.dumps(self.env)
        except Exception as error:
            # Most environments are never sent as objects; one that defines pickling
            # claims that it can be.
            says = says_it_pickles(self.env)
            reason = f"it cannot be pickled: {_raised(error)}"
            return Finding(name, "fail" if says else "skip", reason)
        if not self.config.deterministic:
            return Finding(name, "skip", "random by design")
        try:
            rewards = rewards_in_another_process(
                pickled,
                [self.logs[index] for index in indices],
                [self.metadata[index] for index in indices],
                self.config.process_deadline_s,
            )
        except EnvironmentContractError as error:
            return Finding(name, "fail", str(error))
        if np.array_equal(rewards, whole.rewards[indices], equal_nan=True):
            return Finding(name, "pass")
        here = [float(reward) for reward in whole.rewards[indices]]
        return Finding(name, "fail", f"rewards are {rewards} there, and {here} here")

    def _contract(self, whole: _Judged) -> Finding:
        """Test the contract; the last check, because it shuts the environment down."""
        step = max(1, len(self.trials) // _OF_CONTRACT)
        indices = range(0, len(self.trials), step)
        unscored = bool(np.isnan(whole.rewards).any())
        try:
            check_environment(
                self.env,
                [self.logs[index] for index in indices],
                [self.metadata[index] for index in indices],
                allow_unscored=self.config.allow_unscored,
                deterministic=self.config.deterministic,
            )
        except EnvironmentContractError as error:
            hint = "; allow_unscored permits NaN" if unscored else ""
            return Finding("interface", "fail", f"{error}{hint}")
        return Finding("interface", "pass")


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
