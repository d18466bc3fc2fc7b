"""`Judge`: calls an environment, checks what it says, and types its failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.data.types import LLMMessageLogType
from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.result import Outcome
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import DeadlineExceededError, UserError, WorkerError
from rl_distributed.logging import get_logger
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn, total_reward

__all__ = ["Judge", "Verdict"]

_logger = get_logger(__name__)
_SHARED_COLUMNS = (
    "rewards",
    "group_index",
    "outcome",
    "truncated",
    "generation_lengths",
    "texts",
    "metadata",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the environment said about M active rows."""

    rewards: Tensor
    """[M] float32; 0.0 where the row failed."""
    named_rewards: dict[str, Tensor]
    """The same by `reward/<name>`; empty if there is one reward only."""
    outcome: Tensor
    """[M] int8: `OK`, or how the environment failed."""
    terminateds: Tensor
    """[M] bool; true where the row failed."""
    observations: Sequence[dict[str, str]]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[list[str] | None]
    answers: Sequence[str | None]


class Judge:
    """An environment behind checks.

    Args:
        environment: Any environment.
        config: What to do when it fails.
    """

    def __init__(
        self, environment: EnvironmentInterface[Any], config: RolloutConfig
    ) -> None:
        self._environment, self._config = environment, config
        self.last_failure = ""
        """The newest failure as the end of a sentence."""

    def step(
        self, message_logs: list[LLMMessageLogType], metadata: list[Any]
    ) -> Verdict:
        """Let the environment judge; a failure becomes an outcome if so configured."""
        try:
            answer = self._environment.step(message_logs, metadata)
        except UserError:
            raise
        except (WorkerError, DeadlineExceededError) as error:
            return self._failed(error, len(metadata), Outcome.INFRASTRUCTURE_ERROR)
        except Exception as error:
            return self._failed(error, len(metadata), Outcome.ENVIRONMENT_ERROR)
        return self._verdict(answer, metadata)

    def post_process(self, rows: BatchedDataDict[Any]) -> dict[str, Any]:
        """Show the finished rows to the environment, and return its metrics.

        It is given rewards, outcomes, lengths and texts, and may change them.
        """
        shared: BatchedDataDict[Any] = BatchedDataDict(
            {name: rows[name] for name in _SHARED_COLUMNS if name in rows}
        )
        changed, metrics = self._environment.global_post_process_and_metrics(shared)
        for name in _SHARED_COLUMNS:
            if name in changed:
                rows[name] = changed[name]
        return metrics

    def _failed(self, error: Exception, num_rows: int, outcome: Outcome) -> Verdict:
        if self._config.on_environment_error == "raise":
            raise error
        self.last_failure = f"; the last failure was {type(error).__name__}: {error}"
        _logger.warning(
            "the environment failed for %d rows, which are left out: %s: %s",
            num_rows,
            type(error).__name__,
            error,
        )
        return Verdict(
            rewards=torch.zeros(num_rows),
            named_rewards={},
            outcome=torch.full((num_rows,), int(outcome), dtype=torch.int8),
            terminateds=torch.ones(num_rows, dtype=torch.bool),
            observations=[{"role": "environment", "content": ""}] * num_rows,
            metadata=[None] * num_rows,
            next_stop_strings=[None] * num_rows,
            answers=[None] * num_rows,
        )

    def _verdict(self, answer: EnvironmentReturn[Any], metadata: list[Any]) -> Verdict:
        num_rows = len(metadata)
        named = answer.rewards if isinstance(answer.rewards, dict) else {}
        rewards = total_reward(answer.rewards).to(torch.float32)
        self._check_lengths(answer, rewards, num_rows)
        scored = rewards.isfinite()
        if not bool(scored.all()):
            self.last_failure = "; rows without a finite reward count as failed"
        outcome = torch.where(scored, int(Outcome.OK), int(Outcome.ENVIRONMENT_ERROR))
        return Verdict(
            rewards=torch.where(scored, rewards, 0.0),
            named_rewards={
                name: torch.where(scored, value.to(torch.float32), 0.0)
                for name, value in named.items()
            },
            outcome=outcome.to(torch.int8),
            terminateds=answer.terminateds.bool() | ~scored,
            observations=answer.observations,
            metadata=answer.metadata,
            next_stop_strings=answer.next_stop_strings,
            answers=answer.answers or [None] * num_rows,
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
