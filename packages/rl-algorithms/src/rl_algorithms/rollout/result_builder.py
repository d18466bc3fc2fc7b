"""`Finisher`: turns played rows into a `RolloutResult`.

It scores groups, masks rows that cannot be trained on, counts them by reason and
computes metrics. Shapes: N rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.judge import Judge, outcome_of
from rl_algorithms.rollout.result import Outcome, RolloutResult
from rl_algorithms.rollout.rollout_metrics import ending_metrics, rollout_metrics
from rl_algorithms.rollout.trajectories import Trajectories
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.values import Mean, MetricValue, Sum, as_metric
from rl_envs.interfaces import total_reward
from rl_envs.outcomes import ConversationOutcome

__all__ = ["Finisher"]

_logger = get_logger(__name__)


class Finisher:
    """Builds results.

    Args:
        judge: Scores groups, post-processes rows, and knows the latest failure.
        config: Handling of failures.
        pad_token_id: Token that pads rows on the right.
    """

    def __init__(self, judge: Judge, config: RolloutConfig, pad_token_id: int) -> None:
        self._judge, self._config = judge, config
        self.pads = {"input_ids": pad_token_id, "token_versions": -1}
        """Padding of the token columns, by name."""

    def finish(self, played: Trajectories, num_retried: int) -> RolloutResult:
        """Build the result of complete groups.

        Args:
            played: The rows, which are changed.
            num_retried: Number of retried rows.

        Raises:
            RolloutError: Too many rows failed.
            Exception: Raised by environment or generator, if that ends the run.
        """
        self._score_groups(played)
        outcome = played.outcome
        # Counted after scoring the groups, which may fail rows as well.
        self._refuse_failures(outcome, played.notes.errors)
        reasons = _reasons(outcome)
        healthy = outcome <= int(Outcome.TRUNCATED)
        _blank_failed(played, healthy)
        _name_errors(played)
        whole = healthy
        if self._config.incomplete_groups == "drop":
            groups = played.group_index
            # The baseline of a group needs all of its answers.
            whole = healthy & ~torch.isin(groups, groups[~healthy])
            reasons["incomplete_group"] = int((healthy & ~whole).sum())
        played.sample_mask = played.sample_mask * whole
        self._report(reasons, len(outcome), num_retried)
        metrics = self._metrics(played) | ending_metrics(played.ending)
        metrics["num_retried"] = Sum(float(num_retried))
        for reason, count in reasons.items():
            metrics[f"num_dropped/{reason}"] = Sum(float(count))
        rows = played.rows()
        for name, value in self._judge.post_process(rows).items():
            metrics[f"env/{name}"] = _over_rows(value, name, rows.size)
        notes = played.notes
        return RolloutResult(
            rows=rows,
            metrics=metrics,
            message_logs=notes.message_logs,
            num_prompt_messages=notes.num_prompt_messages,
            answers=notes.answers,
            extra_env_info=notes.extra_env_info,
        )

    def _score_groups(self, played: Trajectories) -> None:
        """Add the rewards that the environment gives to the rows of each prompt."""
        healthy = played.outcome <= int(Outcome.TRUNCATED)
        members = _members(played.group_index, healthy)
        logs, metadata = played.notes.message_logs, played.metadata
        scores = self._judge.score_groups(
            [[logs[row] for row in rows] for rows in members],
            [[metadata[row] for row in rows] for rows in members],
        )
        if scores is None:
            return
        if isinstance(scores, Exception):
            played.outcome = played.outcome.masked_fill(
                healthy, int(outcome_of(scores))
            )
            played.notes.errors = [scores] * played.size
            return
        for rows, score in zip(members, scores, strict=True):
            total = total_reward(score).to(torch.float32)
            unscored = torch.tensor(rows)[~total.isfinite()]
            played.rewards[rows] += total.nan_to_num(0.0, 0.0, 0.0)
            played.outcome[unscored] = int(Outcome.ENVIRONMENT_ERROR)
            for name, value in score.items() if isinstance(score, dict) else ():
                # NaN for rows outside of these groups: the reward does not apply to
                # them.
                empty = torch.full((played.size,), torch.nan)
                column = played.named_rewards.setdefault(name, empty)
                # Added to the rewards of the turns, or taken alone where there are
                # none.
                before = column[rows]
                column[rows] = torch.where(before.isnan(), 0.0, before) + value

    def _refuse_failures(self, outcome: Tensor, errors: list[Exception | None]) -> None:
        failed = int((outcome > Outcome.TRUNCATED).sum())
        if not failed:
            return
        if self._config.on_environment_error == "raise":
            for error in errors:
                if error is not None:
                    raise error
        rate = failed / len(outcome)
        # Even if any rate is allowed, a rollout without a scored row has nothing to
        # train on.
        if rate > self._config.max_failed_rate or failed == len(outcome):
            reasons = ", ".join(
                f"{count} {name.replace('_', ' ')}"
                for name, count in _reasons(outcome).items()
                if count
            )
            raise RolloutError(
                f"the environment failed for {failed} of {len(outcome)} rows "
                f"({reasons}), more than "
                f"rollout.max_failed_rate={self._config.max_failed_rate} allows"
                f"{self._judge.last_failure}"
            )

    def _report(self, reasons: dict[str, int], num_rows: int, num_retried: int) -> None:
        dropped = {name: count for name, count in reasons.items() if count}
        if dropped:
            _logger.warning(
                "left out %d of %d rows: %s%s%s",
                sum(dropped.values()),
                num_rows,
                ", ".join(f"{count} {name}" for name, count in dropped.items()),
                f" ({num_retried} retried)" if num_retried else "",
                self._judge.last_failure,
            )

    def _metrics(self, played: Trajectories) -> dict[str, MetricValue]:
        return rollout_metrics(
            rewards=played.rewards,
            outcome=played.outcome,
            truncated=played.truncated,
            generation_lengths=played.generation_lengths,
            prompt_lengths=played.notes.prompt_lengths,
            env_tokens=played.notes.env_tokens,
            total_lengths=played.input_lengths,
            num_turns=played.num_turns,
            cut_answers=played.notes.cut_answers,
            turn_limit_reached=played.notes.turn_limit_reached,
            weight_version=played.weight_version,
            num_branches=torch.tensor([len(row) for row in played.branches]),
        )


def _members(group_index: Tensor, healthy: Tensor) -> list[list[int]]:
    """Return the healthy rows of each group that has any, in the order of groups."""
    # One sort for all groups: a search for each would be quadratic in their number.
    rows = healthy.nonzero().flatten()
    rows = rows[group_index[rows].argsort(stable=True)]
    _, counts = torch.unique_consecutive(group_index[rows], return_counts=True)
    ends = counts.cumsum(0).tolist()
    found = rows.tolist()
    return [found[a:b] for a, b in itertools.pairwise([0, *ends])]


def _over_rows(value: Any, name: str, num_rows: int) -> MetricValue:
    """Weight a plain number by the number of rows behind it.

    Otherwise batches of different sizes would count alike in the mean of a validation.
    """
    if isinstance(value, MetricValue):
        return value
    return Mean(float(as_metric(value, name=name)) * num_rows, float(num_rows))


def _reasons(outcome: Tensor) -> dict[str, int]:
    """Count the rows of each outcome that is not trained on."""
    counts = torch.bincount(outcome.to(torch.int64), minlength=len(Outcome)).tolist()
    return {
        ending.name.lower(): counts[ending]
        for ending in Outcome
        if not ending.is_trainable
    }


def _name_errors(played: Trajectories) -> None:
    """Set the ending of rows that failed; stale ones keep theirs."""
    # Here and not where rows are played: scoring the groups may fail rows as well.
    errors = (Outcome.ENVIRONMENT_ERROR, Outcome.INFRASTRUCTURE_ERROR)
    failed = torch.isin(played.outcome, torch.tensor([int(error) for error in errors]))
    # A copy, as the rows may be part of another result.
    played.ending = list(played.ending)
    for row in failed.nonzero().flatten().tolist():
        played.ending[row] = ConversationOutcome.ERROR


def _blank_failed(played: Trajectories, healthy: Tensor) -> None:
    """Clear the rewards of failed rows: 0.0 in the sum, NaN in its parts."""
    # Stale rows were scored, and their rewards are worth reporting.
    unscored = ~healthy & (played.outcome != int(Outcome.STALE))
    for name, column in played.named_rewards.items():
        played.named_rewards[name] = column.masked_fill(unscored, torch.nan)
    played.rewards = played.rewards.masked_fill(unscored, 0.0)
