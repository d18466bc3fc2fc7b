"""The code environment."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from rl_distributed.batch.arrays import as_array, full, to_numpy
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    last_response,
    num_rows,
)
from rl_envs.metrics import calculate_pass_rate_per_prompt, reward_metrics
from rl_envs.outcomes import OUTCOME_KEY, ConversationOutcome
from rl_envs.registry import register_env
from rl_envs.sandbox import Program, Sandbox, SandboxLimits, SandboxResult
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.task_limits import limits_of
from rl_envs.worlds.code.checks import Checks, checks_of
from rl_envs.worlds.code.programs import (
    extract_program,
    passed_assertions,
    program_with_calls,
    same_output,
)

__all__ = ["CodeConfig", "CodeEnvironment"]

Columns: TypeAlias = Mapping[str, Any]


class CodeConfig(SandboxConfig):
    """Settings of the code environment.

    `timeout_s` and `memory_mib` are those of a run: of all assertions of a row
    together, or of one input.
    """

    credit: Literal["all", "share"] = "all"
    """Scoring. `all`: reward 1 if every test passes, else 0. `share`: the share of
    tests that pass, which also rewards programs that hard-code some answers."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    passed: int
    size: int
    status: str
    """Status of the worst run; `ok`: all fine, `sandbox`: it could not be run."""


@register_env("code")
class CodeEnvironment(EnvironmentInterface[Columns]):
    """Runs the program in a response against its row's tests; ends the conversation.

    The program is the last fenced block of its language, or the whole response. The
    language is the row's column `language`, or Python. The program runs in a sandbox
    (`rl_envs.sandbox`), and its results are checked outside. For the forms of tests see
    `rl_envs.worlds.code.checks`. A row whose program could not run because the sandbox
    failed is not scored.

    Args:
        config: The settings, or a mapping of them.

    Raises:
        SandboxError: In the first step, if the level, or the language of a row, is not
            available here.
    """

    config_class = CodeConfig
    many_turns = False
    runs_programs = True

    def __init__(self, config: CodeConfig | Mapping[str, Any] | None = None) -> None:
        if not isinstance(config, CodeConfig):
            config = CodeConfig.from_dict(
                dict(config or {}), source="environment 'code'"
            )
        self.config = config
        self._pool: Sandbox | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The pool's processes cannot be pickled; a copy starts its own.
        return type(self), (self.config,)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row no tests.
            SandboxError: The level of the config, or the language of a row, is not
                available here.
        """
        size = num_rows(message_log_batch, metadata)
        checks = [checks_of(columns, row) for row, columns in enumerate(metadata)]
        programs = [
            extract_program(last_response(log, row=row), own.language)
            for row, (log, own) in enumerate(
                zip(message_log_batch, checks, strict=True)
            )
        ]
        limits = [self.config.run_limits(limits_of(columns)) for columns in metadata]
        verdicts = self._judge(programs, checks, limits)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": _told(verdict)}
                for verdict in verdicts
            ],
            metadata=[
                {
                    **columns,
                    "correct": verdict.passed == verdict.size,
                    "status": verdict.status,
                    OUTCOME_KEY: _outcome(verdict).value,
                }
                for columns, verdict in zip(metadata, verdicts, strict=True)
            ],
            next_stop_strings=[None] * size,
            rewards=as_array([self._reward(v) for v in verdicts], "float32"),
            terminateds=full(size, True, "bool"),
            answers=list(programs),
        )

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows without tests, or with tests that cannot be checked."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                checks_of(columns, row)
            except MessageLogError as error:
                found[row] = str(error)
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and metrics.

        `accuracy` is the share of right programs, `pass@samples_per_prompt` that of
        prompts with at least one; `status/<status>` is the share of programs with that
        status (`time`, `memory`, `signal`, ...).
        """
        metrics = reward_metrics(batch)
        judged = [row for row in batch.get("metadata") or () if "status" in (row or {})]
        for row in judged:
            name = f"status/{row['status']}"
            metrics[name] = metrics.get(name, 0.0) + 1 / len(judged)
        if judged:
            metrics["accuracy"] = sum(row["correct"] for row in judged) / len(judged)
        if metrics and "group_index" in batch:
            metrics["pass@samples_per_prompt"] = calculate_pass_rate_per_prompt(
                batch["group_index"],
                as_array(to_numpy(batch["rewards"]) == 1.0, "bool"),
            )
        return batch, metrics

    def shutdown(self) -> None:
        """Close the sandbox; a later step starts another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _judge(
        self,
        programs: Sequence[str],
        checks: Sequence[Checks],
        limits: Sequence[SandboxLimits],
    ) -> list[_Verdict]:
        """Run all programs of a batch, one per worker at a time."""
        jobs: list[Program] = []
        each: list[SandboxLimits] = []
        marks: list[str] = []
        for program, own, limit in zip(programs, checks, limits, strict=True):
            mark = ""
            if own.assertions:
                code, stdin, mark = program_with_calls(program, own)
                jobs.append(Program(code, stdin))
            # All rows in one list, so that the sandbox's slots are shared among them.
            jobs.extend(Program(program, run.stdin, own.language) for run in own.runs)
            each.extend([limit] * (len(jobs) - len(each)))
            marks.append(mark)
        results = iter(self._run(jobs, each))
        verdicts = []
        for own, mark in zip(checks, marks, strict=True):
            taken, passed = [], 0
            if own.assertions:
                taken.append(next(results))
                passed += passed_assertions(own.assertions, taken[0], mark)
            for run in own.runs:
                result = next(results)
                taken.append(result)
                is_same = same_output(result.stdout, run.stdout)
                passed += result.status == "ok" and is_same
            verdicts.append(_Verdict(passed, own.size, _worst(taken)))
        return verdicts

    def _run(
        self, jobs: Sequence[Program], limits: Sequence[SandboxLimits]
    ) -> list[SandboxResult]:
        if not jobs:
            return []
        if self._pool is None:
            # On first use: a copy of the environment in the driver needs no processes.
            self._pool = self.config.open_sandbox()
        return self._pool.run_all(jobs, limits)

    def _reward(self, verdict: _Verdict) -> float:
        if verdict.status == "sandbox":
            # Not scored: the program is not to blame.
            return float(np.nan)
        if self.config.credit == "share":
            return verdict.passed / verdict.size
        return float(verdict.passed == verdict.size)


def _worst(results: Sequence[SandboxResult]) -> str:
    """Return the most severe status."""
    # The sandbox first: its failure leaves the row unscored, whatever the other runs
    # say.
    order = ("sandbox", "build", "time", "memory", "output", "signal", "error")
    found = {result.status for result in results}
    return next((status for status in order if status in found), "ok")


def _outcome(verdict: _Verdict) -> ConversationOutcome:
    if verdict.passed == verdict.size:
        return ConversationOutcome.SOLVED
    named = {
        "time": ConversationOutcome.OUT_OF_TIME,
        "memory": ConversationOutcome.OUT_OF_MEMORY,
        "sandbox": ConversationOutcome.ERROR,
    }
    return named.get(verdict.status, ConversationOutcome.LOST)


def _told(verdict: _Verdict) -> str:
    if verdict.passed == verdict.size:
        return "Environment: correct"
    if verdict.status == "build":
        return "Environment: the program could not be compiled"
    ended = "" if verdict.status == "ok" else f"; a run ended by: {verdict.status}"
    return f"Environment: {verdict.passed} of {verdict.size} tests passed{ended}"
