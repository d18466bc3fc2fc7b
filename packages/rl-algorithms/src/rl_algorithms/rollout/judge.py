"""`Judge`: calls an environment, checks its verdicts and classifies its failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.data.types import LLMMessageLogType
from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout.result import Outcome
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.errors import DeadlineExceededError, UserError, WorkerError
from rl_distributed.logs.logging import get_logger
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Observation,
    Rewards,
    as_columns,
    as_rewards,
    has_own,
    total_reward,
)
from rl_envs.row_jobs import RowHost, row_host_of

__all__ = ["Judge", "Verdict", "outcome_of"]

_logger = get_logger(__name__)
# Columns that an environment may see and change. Tokens, masks and log-probs stay with
# the trainer, which must be able to rely on them.
_SHARED_COLUMNS = (
    "rewards",
    "group_index",
    "outcome",
    "truncated",
    "generation_lengths",
    "texts",
    "metadata",
)
# After failures on this many single rows no more are tried: the environment is broken
# as a whole, and each further try may cost its full time limit.
_MAX_SINGLE_FAILURES = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's verdict on M active rows."""

    rewards: Tensor
    """[M] float32; 0.0 where the row failed."""
    named_rewards: dict[str, Tensor]
    """[M] each, by `reward/<name>`; NaN where a reward does not apply. Empty for a
    single reward."""
    outcome: Tensor
    """[M] int8 of `Outcome`: `OK` or a failure of the environment."""
    terminateds: Tensor
    """[M] bool; also true where the row failed."""
    observations: Sequence[Observation]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[list[str] | None]
    answers: Sequence[str | None]
    errors: Sequence[Exception | None]
    """[M] exceptions raised in place of a verdict."""

    @classmethod
    def joined(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """Return the verdict on the rows of several."""
        return verdicts[0] if len(verdicts) == 1 else _join(verdicts)

    def select(self, rows: Sequence[int]) -> Verdict:
        """Return the verdict on some rows."""
        if list(rows) == list(range(len(self.errors))):
            return self
        index = torch.tensor(rows, dtype=torch.int64)
        return Verdict(
            self.rewards[index],
            {name: value[index] for name, value in self.named_rewards.items()},
            self.outcome[index],
            self.terminateds[index],
            [self.observations[row] for row in rows],
            [self.metadata[row] for row in rows],
            [self.next_stop_strings[row] for row in rows],
            [self.answers[row] for row in rows],
            [self.errors[row] for row in rows],
        )

    def rows(self) -> list[Verdict]:
        """Return the verdict on each row."""
        size = len(self.errors)
        if size == 1:
            return [self]
        # One operation per column, not per row: slices cost more than the verdict.
        rewards, outcome = torch.split(self.rewards, 1), torch.split(self.outcome, 1)
        terminateds = torch.split(self.terminateds, 1)
        named = {
            name: torch.split(value, 1) for name, value in self.named_rewards.items()
        }
        return [
            Verdict(
                rewards[row],
                {name: value[row] for name, value in named.items()},
                outcome[row],
                terminateds[row],
                self.observations[row : row + 1],
                self.metadata[row : row + 1],
                self.next_stop_strings[row : row + 1],
                self.answers[row : row + 1],
                self.errors[row : row + 1],
            )
            for row in range(size)
        ]


@dataclass(frozen=True, slots=True)
class _Tried:
    """A call of the environment."""

    verdict: Verdict
    error: Exception | None
    metadata: list[Any]
    """What the call was given, after its conversations had begun."""
    seeds: Sequence[int | None] | None
    """Seeds of rows that have not begun, as `reset` failed; None: all have."""


def outcome_of(error: Exception) -> Outcome:
    """Return the outcome that an exception stands for.

    A dead or hung worker and an exceeded deadline say nothing about the row; any other
    exception comes from the environment's own code.
    """
    if isinstance(error, (WorkerError, DeadlineExceededError)):
        return Outcome.INFRASTRUCTURE_ERROR
    return Outcome.ENVIRONMENT_ERROR


class Judge:
    """An environment behind checks.

    A failure becomes the outcome of the rows, which keep the exception. Only mistakes
    of the user are raised.

    Args:
        environment: The environment.
        isolate: Whether to judge each row alone after an exception, so that one bad row
            does not cost the others.
    """

    def __init__(
        self, environment: EnvironmentInterface[Any], *, isolate: bool = True
    ) -> None:
        self._environment, self._isolate = environment, isolate
        self._resets = has_own(environment, "reset")
        self.closes = has_own(environment, "close")
        """Whether `close` does anything."""
        self.begins = self._resets or self.closes
        """Whether it matters that a conversation begins. Where it does not, its seed
        need not be computed, which costs more than a quick verdict."""
        self.last_failure = ""
        """Description of the latest failure, to append to a sentence."""

    def step(
        self,
        message_logs: list[LLMMessageLogType],
        metadata: list[Any],
        seeds: Sequence[int | None] | None = None,
    ) -> Verdict:
        """Return the environment's verdict on rows.

        Args:
            message_logs: Conversations, each ending with an answer.
            metadata: The environment's metadata of each.
            seeds: Seeds of conversations that begin, None for others; None if all of
                them have begun.
        """
        tried = self._try(message_logs, metadata, seeds)
        verdict, error = tried.verdict, tried.error
        alone = self._isolate and len(metadata) > 1
        # A lost worker says nothing about single rows, so judging them alone would not
        # help.
        if error is None or not alone or outcome_of(error).is_infrastructure:
            return verdict
        return self._step_alone(message_logs, tried)

    def close(self, metadata: Sequence[Any]) -> None:
        """Tell the environment that conversations have ended.

        A failure is logged, as it changes neither rewards nor answers.
        """
        if not metadata or not self.closes:
            return
        try:
            self._environment.close(metadata)
        except Exception as error:
            _logger.warning(
                "the environment did not close %d conversations: %s: %s",
                len(metadata),
                type(error).__name__,
                error,
            )

    def _step_alone(self, logs: list[LLMMessageLogType], tried: _Tried) -> Verdict:
        verdicts, failures, failed = [], 0, tried.verdict
        size = len(tried.metadata)
        seeds = tried.seeds or [None] * size
        for row in range(size):
            if failures >= _MAX_SINGLE_FAILURES:
                return failed
            again = self._try([logs[row]], [tried.metadata[row]], [seeds[row]])
            failures += again.error is not None
            verdicts.append(again.verdict)
        # If every row fails alone as well, the error of the whole batch is kept.
        return failed if failures == size else _join(verdicts)

    def _try(
        self,
        logs: list[LLMMessageLogType],
        metadata: list[Any],
        seeds: Sequence[int | None] | None,
    ) -> _Tried:
        try:
            # The begun rows are kept if `step` fails: they must not begin twice.
            metadata, seeds = self._begun(metadata, seeds), None
            answer = self._environment.step(logs, metadata)
        except UserError:
            # A user's mistake fails in the same way for each row and each attempt.
            raise
        except Exception as error:
            return _Tried(self.failed(metadata, error), error, metadata, seeds)
        return _Tried(self.verdict(answer, len(metadata)), None, metadata, seeds)

    def _begun(
        self, metadata: list[Any], seeds: Sequence[int | None] | None
    ) -> list[Any]:
        """Return the metadata for a step, after beginning the rows with a seed."""
        if not self._resets or seeds is None:
            return metadata
        new = {row: seed for row, seed in enumerate(seeds) if seed is not None}
        if not new:
            return metadata
        begun = list(
            self._environment.reset([metadata[row] for row in new], [*new.values()])
        )
        if len(begun) != len(new):
            raise RolloutError(
                f"{type(self._environment).__name__}.reset was given {len(new)} rows "
                f"and returned {len(begun)}: it must return the metadata of each"
            )
        found = list(metadata)
        for row, value in zip(new, begun, strict=True):
            found[row] = value
        return found

    def score_groups(
        self,
        message_logs: Sequence[Sequence[LLMMessageLogType]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | Exception | None:
        """Score the rows of each prompt together.

        Returns:
            Rewards by prompt; None if the environment does not score groups; or the
            exception that it raised.
        """
        try:
            scores = self._environment.score_groups(message_logs, metadata)
        except UserError:
            raise
        except Exception as error:
            self.note(error, sum(len(group) for group in metadata))
            return error
        if scores is None:
            return None
        sizes = [len(group) for group in metadata]
        got = [len(total_reward(score)) for score in scores]
        if got != sizes:
            raise RolloutError(
                f"{type(self._environment).__name__}.score_groups was given groups of "
                f"{sizes} rows and returned {got} rewards: it must return one of each "
                "per row"
            )
        return [as_rewards(score) for score in scores]

    def post_process(self, rows: AnyRows) -> dict[str, Any]:
        """Post-process finished rows in the environment, and return its metrics.

        The environment sees rewards, outcomes, lengths and texts, and may change them.
        """
        shared: AnyRows = BatchedDataDict(
            {name: rows[name] for name in _SHARED_COLUMNS if name in rows}
        )
        changed, metrics = self._environment.global_post_process_and_metrics(shared)
        # Only the columns that were shared: an environment cannot replace tokens or
        # masks.
        for name in _SHARED_COLUMNS:
            if name in changed:
                rows[name] = changed[name]
        return metrics

    def note(self, error: Exception, num_rows: int) -> None:
        """Remember a failure and log it."""
        self.last_failure = f"; the last failure was {type(error).__name__}: {error}"
        _logger.warning(
            "%s for %d rows: %s: %s",
            outcome_of(error).name.lower().replace("_", " "),
            num_rows,
            type(error).__name__,
            error,
        )

    @property
    def row_s(self) -> float | None:
        """Mean time of a row in the environment, in seconds, if it is known."""
        return self._environment.row_s

    @property
    def row_host(self) -> RowHost | None:
        """The environment, if its workers judge many conversations at a time."""
        return row_host_of(self._environment)

    def failed(self, metadata: list[Any], error: Exception) -> Verdict:
        """Return the verdict on rows that the environment gave none on."""
        self.note(error, len(metadata))
        return _failed(metadata, error)

    def verdict(self, answer: EnvironmentReturn[Any], num_rows: int) -> Verdict:
        """Return the checked verdict on rows.

        Args:
            answer: Reply of the environment.
            num_rows: Number of rows that it was given.

        Raises:
            RolloutError: The reply has not one entry per row.
        """
        answer = as_columns(answer)
        named = answer.rewards if isinstance(answer.rewards, dict) else {}
        rewards = total_reward(answer.rewards).to(torch.float32)
        self._check_lengths(answer, rewards, num_rows)
        # NaN in one row would spread to its whole group through mean and deviation.
        scored = rewards.isfinite()
        if not bool(scored.all()):
            self.last_failure = "; rows without a finite reward count as failed"
        outcome = torch.where(scored, int(Outcome.OK), int(Outcome.ENVIRONMENT_ERROR))
        return Verdict(
            rewards=torch.where(scored, rewards, 0.0),
            named_rewards={
                name: value.to(torch.float32) for name, value in named.items()
            },
            outcome=outcome.to(torch.int8),
            # A failed row has no observation from which another turn could continue.
            terminateds=answer.terminateds.bool() | ~scored,
            observations=answer.observations,
            metadata=answer.metadata,
            next_stop_strings=answer.next_stop_strings,
            answers=answer.answers or [None] * num_rows,
            errors=[None] * num_rows,
        )

    def _check_lengths(
        self, answer: EnvironmentReturn[Any], rewards: Tensor, num_rows: int
    ) -> None:
        lengths = {
            "rewards": len(rewards),
            "terminateds": len(answer.terminateds),
            "observations": len(answer.observations),
            "metadata": len(answer.metadata),
            "next_stop_strings": len(answer.next_stop_strings),
            "answers": num_rows if answer.answers is None else len(answer.answers),
        }
        wrong = {name: size for name, size in lengths.items() if size != num_rows}
        if wrong:
            raise RolloutError(
                f"{type(self._environment).__name__}.step was given {num_rows} rows "
                f"and returned {', '.join(f'{n} {name}' for name, n in wrong.items())}:"
                " it must return one of each per row (see check_environment)"
            )


def _failed(metadata: list[Any], error: Exception) -> Verdict:
    num_rows = len(metadata)
    outcome = outcome_of(error)
    return Verdict(
        rewards=torch.zeros(num_rows),
        named_rewards={},
        outcome=torch.full((num_rows,), int(outcome), dtype=torch.int8),
        terminateds=torch.ones(num_rows, dtype=torch.bool),
        observations=[{"role": "environment", "content": ""}] * num_rows,
        # The metadata from before, since the environment returned none.
        metadata=list(metadata),
        next_stop_strings=[None] * num_rows,
        answers=[None] * num_rows,
        errors=[error] * num_rows,
    )


def _join(verdicts: Sequence[Verdict]) -> Verdict:
    """Join the verdicts on single rows."""
    names = dict.fromkeys(name for v in verdicts for name in v.named_rewards)
    return Verdict(
        rewards=torch.cat([v.rewards for v in verdicts]),
        named_rewards={
            name: torch.cat([_named(v, name) for v in verdicts]) for name in names
        },
        outcome=torch.cat([v.outcome for v in verdicts]),
        terminateds=torch.cat([v.terminateds for v in verdicts]),
        observations=[v.observations[0] for v in verdicts],
        metadata=[v.metadata[0] for v in verdicts],
        next_stop_strings=[v.next_stop_strings[0] for v in verdicts],
        answers=[v.answers[0] for v in verdicts],
        errors=[v.errors[0] for v in verdicts],
    )


def _named(verdict: Verdict, name: str) -> Tensor:
    """Return a named reward of one row, which a continuing row may not have yet."""
    # NaN means "does not apply", which only the last turn of a row can say.
    unknown = torch.where(verdict.terminateds, torch.nan, 0.0)
    return verdict.named_rewards.get(name, unknown)
