"""`check_environment`: the contract test of `EnvironmentInterface`."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_distributed.batch.arrays import is_array, is_tensor, to_numpy
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    as_columns,
    has_own,
    observation_messages,
    total_reward,
)

__all__ = ["check_environment", "check_return", "example_message_logs"]


def example_message_logs(num_rows: int = 3) -> list[list[dict[str, str]]]:
    """Return conversations of one question and one response each."""
    return [
        [
            {"role": "user", "content": f"{row}+{row}="},
            {"role": "assistant", "content": str(2 * row)},
        ]
        for row in range(num_rows)
    ]


class _Report:
    def __init__(self) -> None:
        self.problems: list[str] = []

    def check(self, condition: bool, problem: str) -> bool:
        if not condition:
            self.problems.append(problem)
        return condition

    def call(self, what: str, fn: Callable[[], Any]) -> Any:
        try:
            return fn()
        except Exception as error:
            # Any exception is a finding; the remaining checks still run.
            self.problems.append(f"{what} raised {type(error).__name__}: {error}")
            return None


def check_return(
    result: Any, num_rows: int, *, allow_unscored: bool = False
) -> list[str]:
    """Return the problems of a result of `step`; an empty list if there are none.

    Args:
        result: The result returned by the environment.
        num_rows: Number of rows in the batch.
        allow_unscored: Allow NaN rewards, for rows that are not scored.
    """
    report = _Report()
    if not report.check(
        isinstance(result, EnvironmentReturn),
        f"step must return an EnvironmentReturn: got {type(result).__name__}",
    ):
        return report.problems
    with contextlib.suppress(EnvironmentContractError, TypeError):
        # Observations may be left out if all rows have ended.
        result = result._replace(observations=as_columns(result).observations)
    for name in ("observations", "metadata", "next_stop_strings"):
        _check_list(report, name, getattr(result, name), num_rows)
    if result.answers is not None and _check_list(
        report, "answers", result.answers, num_rows
    ):
        for row, answer in enumerate(result.answers):
            report.check(
                answer is None or isinstance(answer, str),
                f"answers[{row}] must be text or None: got {type(answer).__name__}",
            )
    _check_observations(report, result.observations)
    _check_stop_strings(report, result.next_stop_strings)
    _check_rewards(report, result.rewards, num_rows, allow_unscored)
    _check_column(report, "terminateds", result.terminateds, num_rows, "bool")
    return report.problems


def _check_list(report: _Report, name: str, value: Any, num_rows: int) -> bool:
    return report.check(
        isinstance(value, list), f"{name} must be a list: got {type(value).__name__}"
    ) and report.check(
        len(value) == num_rows,
        f"{name} must have one entry per row: got {len(value)} for {num_rows} rows",
    )


def _check_observations(report: _Report, observations: Any) -> None:
    for row, said in enumerate(observations if type(observations) is list else []):
        where = f"observations[{row}]"
        if not report.check(
            isinstance(said, dict)
            or (isinstance(said, list) and all(isinstance(m, dict) for m in said)),
            f"{where} must be a message or a list of messages: got "
            f"{type(said).__name__}",
        ):
            continue
        for message in observation_messages(said):
            for key in ("role", "content"):
                report.check(
                    isinstance(message.get(key), str),
                    f"{where}[{key!r}] must be text: got {message.get(key)!r}",
                )


def _check_stop_strings(report: _Report, stop_strings: Any) -> None:
    for row, texts in enumerate(stop_strings if type(stop_strings) is list else []):
        well_formed = texts is None or (
            isinstance(texts, list)
            and all(isinstance(text, str) and text for text in texts)
        )
        report.check(
            well_formed,
            f"next_stop_strings[{row}] must be None or a list of non-empty texts: got "
            f"{texts!r}",
        )


def _check_column(
    report: _Report, name: str, value: Any, num_rows: int, dtype: str
) -> bool:
    """Check a tensor, a numpy array or a list of float32 or bool."""
    if not report.check(
        is_array(value) or isinstance(value, list),
        f"{name} must be a tensor, a numpy array or a list: got {type(value).__name__}",
    ):
        return False
    if is_tensor(value):
        return _check_tensor(report, name, value, num_rows, dtype)
    try:
        array = np.asarray(value) if len(value) else np.asarray(value, dtype=dtype)
    except ValueError:
        return report.check(False, f"{name} must hold one value per row")
    shape = report.check(
        array.shape == (num_rows,),
        f"{name} must have shape [{num_rows}]: got {list(array.shape)}",
    )
    # Any width: numpy and Python default to 64 bits, and `as_columns` converts.
    kinds, rule = ("b", "bool") if dtype == "bool" else ("fiub", "real numbers")
    kind = report.check(
        array.dtype.kind in kinds, f"{name} must be {rule}: got {array.dtype}"
    )
    return shape and kind


def _check_tensor(
    report: _Report, name: str, value: Any, num_rows: int, dtype: str
) -> bool:
    shape = report.check(
        tuple(value.shape) == (num_rows,),
        f"{name} must have shape [{num_rows}]: got {list(value.shape)}",
    )
    kind = report.check(
        str(value.dtype) == f"torch.{dtype}",
        f"{name} must be torch.{dtype}: got {value.dtype}",
    )
    place = report.check(
        value.device.type == "cpu", f"{name} must be on the CPU: got {value.device}"
    )
    plain = report.check(
        not value.requires_grad, f"{name} must not require a gradient; detach it"
    )
    return shape and kind and place and plain


def _check_rewards(
    report: _Report, rewards: Any, num_rows: int, allow_unscored: bool
) -> None:
    columns = rewards if isinstance(rewards, dict) else {"rewards": rewards}
    report.check(bool(columns), "rewards must not be an empty mapping")
    for name, column in columns.items():
        if isinstance(rewards, dict):
            report.check(
                isinstance(name, str) and name.startswith("reward/"),
                f"names of rewards must begin with 'reward/': got {name!r}",
            )
        if not _check_column(report, str(name), column, num_rows, "float32"):
            continue
        values = to_numpy(column)
        infinite = np.flatnonzero(np.isinf(values)).tolist()
        report.check(not infinite, f"{name} must be finite: rows {infinite} are not")
        unscored = np.flatnonzero(np.isnan(values)).tolist()
        report.check(
            allow_unscored or not unscored,
            f"{name} is NaN, which means not scored, in rows {unscored}; if that is "
            "intended, or the reward does not apply to them, pass allow_unscored=True",
        )


def first_difference(first: Any, second: Any) -> str | None:
    """Name the first field in which two results of `step` differ."""
    for name in EnvironmentReturn._fields:
        if name == "rewards":
            a, b = total_reward(first.rewards), total_reward(second.rewards)
            same = np.array_equal(to_numpy(a), to_numpy(b), equal_nan=True)
        elif name == "terminateds":
            same = _equal_numbers(first.terminateds, second.terminateds)
        else:
            same = equal_values(getattr(first, name), getattr(second, name))
        if not same:
            return name
    return None


def _equal_numbers(first: Any, second: Any) -> bool:
    return np.array_equal(to_numpy(first), to_numpy(second))


def equal_values(first: Any, second: Any) -> bool:
    """Compare nested values that may contain arrays or objects without equality."""
    if is_array(first) and is_array(second):
        return _equal_numbers(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(
            equal_values(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(
            equal_values(a, b) for a, b in zip(first, second, strict=True)
        )
    same = first == second
    # Some objects return arrays from `==`; for these only identity is certain.
    return bool(same) if isinstance(same, (bool, int)) else first is second


def select_row(result: Any, row: int) -> Any:
    """Return one row of a result as a result of its own."""
    rewards = result.rewards
    return EnvironmentReturn(
        observations=result.observations[row : row + 1],
        metadata=[result.metadata[row]],
        next_stop_strings=[result.next_stop_strings[row]],
        rewards={name: column[row : row + 1] for name, column in rewards.items()}
        if isinstance(rewards, dict)
        else rewards[row : row + 1],
        terminateds=result.terminateds[row : row + 1],
        answers=None if result.answers is None else [result.answers[row]],
    )


class _Check:
    """One run of the contract test."""

    def __init__(
        self,
        env: EnvironmentInterface[Any],
        logs: Sequence[MessageLog],
        metadata: Sequence[Any],
        allow_unscored: bool,
    ) -> None:
        self.env = env
        self.logs = logs
        self.metadata = metadata
        self.allow_unscored = allow_unscored
        self.report = _Report()

    def _step(self, what: str, rows: Sequence[int]) -> Any:
        """Step copies of some rows; return None if that failed or is malformed."""
        logs = [copy.deepcopy(self.logs[row]) for row in rows]
        metadata = [copy.deepcopy(self.metadata[row]) for row in rows]
        # Copies, so that arguments changed by one call do not affect the next.
        failures = len(self.report.problems)
        result = self.report.call(what, lambda: self.env.step(logs, metadata))
        if len(self.report.problems) > failures:
            return None
        for name, after, before in (
            ("message_log_batch", logs, [self.logs[row] for row in rows]),
            ("metadata", metadata, [self.metadata[row] for row in rows]),
        ):
            self.report.check(
                equal_values(after, before),
                f"{what} changed its argument {name}; work on a copy",
            )
        problems = check_return(result, len(rows), allow_unscored=self.allow_unscored)
        self.report.problems.extend(f"{what}: {problem}" for problem in problems)
        return None if problems else result

    def run(self, deterministic: bool) -> list[str]:
        rows = range(len(self.logs))
        self._check_reset(deterministic)
        whole = self._step("step", rows)
        # Wrappers pass on the rows that are left for an environment, which may be none.
        self._step("step with an empty batch", [])
        if whole is not None:
            self._check_pickle(whole)
            if deterministic:
                self._check_repetition(whole)
                self._check_independence(whole)
            self._check_groups(whole)
            self._check_metrics(whole)
        tools = self.report.call("tool_schemas", self.env.tool_schemas)
        self.report.check(
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools),
            f"tool_schemas must return a list of mappings: got {tools!r:.80}",
        )
        unusable = self.report.call(
            "unusable_rows", lambda: self.env.unusable_rows(list(self.metadata))
        )
        self.report.check(
            isinstance(unusable, dict) and not unusable,
            "unusable_rows must return an empty dict for rows that step can score: got "
            f"{unusable!r:.80}",
        )
        if whole is not None and has_own(self.env, "close"):
            # Twice, and without rows: several owners may close a conversation.
            for _ in range(2):
                self.report.call("close", lambda: self.env.close(whole.metadata))
            self.report.call("close with an empty batch", lambda: self.env.close([]))
        # Twice: owners may shut down both on an error and at the end.
        for _ in range(2):
            self.report.call("shutdown", self.env.shutdown)
        return self.report.problems

    def _check_reset(self, deterministic: bool) -> None:
        """Begin the conversations, so that the other checks step what has begun."""
        if not has_own(self.env, "reset"):
            return
        seeds = list(range(len(self.metadata)))
        given = copy.deepcopy(list(self.metadata))
        begun = self.report.call("reset", lambda: self.env.reset(given, seeds))
        self.report.check(
            equal_values(given, list(self.metadata)),
            "reset changed its argument metadata; work on a copy",
        )
        if begun is None or not self.report.check(
            isinstance(begun, Sequence) and len(begun) == len(seeds),
            "reset must return a list with the metadata of each conversation: got "
            f"{begun!r:.80} for {len(seeds)}",
        ):
            return
        again = self.report.call("reset", lambda: self.env.reset(given, seeds))
        self.report.check(
            not deterministic or again is None or equal_values(begun, again),
            "reset must return the same for equal rows and seeds; pass "
            "deterministic=False if the environment is random by design",
        )
        self.report.call("reset with an empty batch", lambda: self.env.reset([], []))
        self.metadata = list(begun)

    def _check_pickle(self, whole: Any) -> None:
        self.report.call(
            "pickling the result, which crosses processes,",
            lambda: pickle.loads(pickle.dumps(whole)),
        )

    def _check_repetition(self, whole: Any) -> None:
        again = self._step("the second step", range(len(self.logs)))
        if again is not None:
            field = first_difference(whole, again)
            self.report.check(
                field is None,
                f"two equal calls must have equal results: {field} differ; pass "
                "deterministic=False if the environment is random by design",
            )

    def _check_independence(self, whole: Any) -> None:
        for row in range(len(self.logs)):
            alone = self._step(f"step with row {row} alone", [row])
            if alone is None:
                return
            field = first_difference(select_row(whole, row), alone)
            self.report.check(
                field is None,
                f"rows must be independent: {field} of row {row} differ when it is "
                "alone in the batch",
            )

    def _check_groups(self, whole: Any) -> None:
        """Check `score_groups` with each conversation as a group of its own."""
        groups = self.report.call(
            "score_groups",
            lambda: self.env.score_groups(
                [[log] for log in self.logs], [[row] for row in whole.metadata]
            ),
        )
        if groups is None or not self.report.check(
            isinstance(groups, list) and len(groups) == len(self.logs),
            "score_groups must return None or a list with one entry per prompt: got "
            f"{groups!r:.80} for {len(self.logs)} prompts",
        ):
            return
        for rewards in groups:
            _check_rewards(self.report, rewards, 1, self.allow_unscored)

    def _check_metrics(self, whole: Any) -> None:
        # Rewards only: metrics must work whatever else a trainer's batch has.
        batch = {"rewards": total_reward(whole.rewards)}
        result = self.report.call(
            "global_post_process_and_metrics",
            lambda: self.env.global_post_process_and_metrics(batch),
        )
        if result is None:
            return
        if not self.report.check(
            isinstance(result, tuple) and len(result) == 2,
            "global_post_process_and_metrics must return (batch, metrics)",
        ):
            return
        for name, value in dict(result[1]).items():
            self.report.check(
                isinstance(name, str)
                and isinstance(value, (int, float))
                and not isinstance(value, bool),
                f"metric {name!r} must be a plain number: got {value!r}",
            )


def check_environment(
    env: EnvironmentInterface[Any],
    message_log_batch: Sequence[MessageLog] | None = None,
    metadata: Sequence[Any] | None = None,
    *,
    allow_unscored: bool = False,
    deterministic: bool = True,
) -> None:
    """Test an environment against the contract, and shut it down.

    Checks the types, lengths, dtypes, shapes and finite rewards of the result of
    `step`; an empty batch; that arguments are not modified; that equal calls have equal
    results and rows do not depend on each other; that results can be pickled; the
    results of `score_groups` and `tool_schemas`; metrics; and that `shutdown` can be
    called twice. With a `reset` or `close` of its own, conversations begin and end by
    it: equal rows and seeds must give equal metadata, one per row, and `close` must
    accept conversations that it has closed before.

    Args:
        env: The environment.
        message_log_batch: Conversations to step; None: short sums, one per metadata.
        metadata: One entry per conversation; None: `{"answer": "0"}` and so on.
        allow_unscored: Allow NaN rewards, for rows that are not scored.
        deterministic: Require equal results of equal calls.

    Raises:
        EnvironmentContractError: The message lists all problems.
    """
    logs = message_log_batch
    if logs is None:
        logs = example_message_logs(3 if metadata is None else len(metadata))
    if metadata is None:
        metadata = [{"answer": str(2 * row)} for row in range(len(logs))]
    if not logs or len(logs) != len(metadata):
        raise EnvironmentContractError(
            "check_environment needs at least one conversation and one metadata each: "
            f"got {len(logs)} and {len(metadata)}"
        )
    problems: list[str] = []
    if isinstance(env, EnvironmentInterface):
        problems = _Check(env, logs, metadata, allow_unscored).run(deterministic)
    else:
        problems.append(f"it must be an EnvironmentInterface: got {type(env).__name__}")
    if problems:
        name = type(env).__name__
        # Once each: every call repeats the same problem.
        listed = "\n".join(f"- {problem}" for problem in dict.fromkeys(problems))
        raise EnvironmentContractError(f"{name} breaks the interface:\n{listed}")
