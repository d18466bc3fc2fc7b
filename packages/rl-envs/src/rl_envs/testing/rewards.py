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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_distributed.batch.arrays import to_numpy
from rl_distributed.errors import ConfigError
from rl_envs.errors import EnvironmentContractError, SandboxError, TaskError
from rl_envs.interfaces import (
    EnvironmentInterface,
    MessageLog,
    as_columns,
    total_reward,
)
from rl_envs.registry import EnvironmentSpec
from rl_envs.testing.contract import check_environment, equal_values
from rl_envs.testing.findings import Examination, Finding
from rl_envs.testing.processes import rewards_in_another_process, says_it_pickles
from rl_envs.testing.responses import Trial, prompt_messages, trials

__all__ = ["examine_environment"]

Excuse = Callable[[Mapping[str, Any], str], bool]

_ALONE = 8
"""Number of rows also scored one by one, which is slow."""
_OF_CONTRACT = 4
_WRONG = {
    "empty": "empty responses earn less",
    "garbage": "garbage earns less",
    "prompt": "the copied prompt earns less",
}
_GOLD = "gold answers earn the full reward"
_CHANGE = "one changed character earns less"
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
    run = _Run(spec.make(), rows, prompts, config or Examination(), excuse)
    try:
        return list(run.findings())
    finally:
        run.env.shutdown()


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
        yield self._usable()
        whole = self._first_call()
        if isinstance(whole, Finding):
            yield whole
            return
        yield self._gold(whole)
        for kind, name in _WRONG.items():
            yield self._wrong(whole, kind, name)
        yield self._changes(whole)
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

    def _usable(self) -> Finding:
        unusable = self.env.unusable_rows([dict(row) for row in self.rows])
        for row, reason in sorted(unusable.items()):
            more = f"{len(unusable)} of {len(self.rows)} rows cannot be scored; "
            return Finding("rows can be judged", "fail", f"{more}{reason}", row)
        return Finding("rows can be judged", "pass", f"{len(self.rows)} rows")

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
                return self._failed("step judges any response", _raised(error), trial)
        return Finding("step judges any response", "fail", _raised(whole))

    def _failed(self, name: str, reason: str, trial: Trial) -> Finding:
        return Finding(name, "fail", reason, trial.row, trial.response)

    def _of_kind(self, kind: str) -> list[int]:
        return [index for index, t in enumerate(self.trials) if t.kind == kind]

    def _gold(self, whole: _Judged) -> Finding:
        indices = self._of_kind("gold")
        if not indices:
            wanted = self.config.gold_column or "answer or ground_truth"
            return Finding(_GOLD, "skip", f"no row has a text in the column {wanted}")
        if not whole.ends[indices].any():
            return Finding(_GOLD, "skip", "conversations continue after a gold answer")
        full = whole.rewards[indices] >= self.config.full_reward
        if self.config.allow_unscored:
            full |= np.isnan(whole.rewards[indices])
        if full.all():
            return Finding(_GOLD, "pass", f"{len(indices)} rows")
        worst = indices[int(np.argmin(full))]
        reason = (
            f"{int((~full).sum())} of {len(indices)} earn less than "
            f"{self.config.full_reward:g}: got {whole.rewards[worst]:g}"
        )
        return self._failed(_GOLD, reason, self.trials[worst])

    def _wrong(self, whole: _Judged, kind: str, name: str) -> Finding:
        indices = self._of_kind(kind)
        accepted = self._accepted(whole, indices)
        if not accepted:
            return Finding(name, "pass", f"{len(indices)} rows")
        reason = f"{len(accepted)} of {len(indices)} earn the full reward"
        return self._failed(name, reason, self.trials[accepted[0]])

    def _changes(self, whole: _Judged) -> Finding:
        indices = self._of_kind("change")
        if not indices:
            return Finding(_CHANGE, "skip", "no row has a gold answer")
        accepted = self._accepted(whole, indices)
        limit = self.config.max_accepted_changes
        reason = f"{len(accepted)} of {len(indices)} earn the full reward"
        if len(accepted) <= limit * len(indices):
            return Finding(_CHANGE, "pass", reason)
        reason += f", more than {limit:.0%}"
        return self._failed(_CHANGE, reason, self.trials[accepted[0]])

    def _accepted(self, whole: _Judged, indices: Sequence[int]) -> list[int]:
        """Return the wrong responses with full reward that are not excused."""
        full = [i for i in indices if whole.rewards[i] >= self.config.full_reward]
        excuse = self.excuse
        if excuse is None:
            return full
        named = [(i, self.trials[i]) for i in full]
        return [i for i, t in named if not excuse(self.rows[t.row], t.response)]

    def _turns(self, whole: _Judged) -> Finding:
        name = "conversations end as declared"
        if self.env.many_turns is None:
            return Finding(name, "skip", "the class does not set many_turns")
        if self.env.many_turns or whole.ends.all():
            return Finding(name, "pass")
        trial = self.trials[int(np.argmin(whole.ends))]
        reason = "many_turns is False, but a conversation continues"
        return self._failed(name, reason, trial)

    def _equal(self, whole: _Judged) -> Finding:
        if not self.config.deterministic:
            return Finding(_EQUAL, "skip", "random by design")
        for what, batches in self._ways():
            for indices in batches:
                try:
                    again = self.judge(indices)
                except Exception as error:
                    trial = self.trials[indices[0]]
                    return self._failed(_EQUAL, f"{what}: {_raised(error)}", trial)
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
                    return self._failed(_EQUAL, reason, self.trials[indices[at]])
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
