"""The math environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from rl_distributed.batch.arrays import as_array, full, to_numpy
from rl_distributed.config import Config
from rl_envs.errors import MessageLogError, SolutionError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    last_response,
    num_rows,
)
from rl_envs.metrics import calculate_pass_rate_per_prompt, reward_metrics
from rl_envs.registry import register_env
from rl_envs.worlds.math.choices import (
    canonical_choice,
    find_choice,
    find_english_choice,
)
from rl_envs.worlds.math.judge_pool import Judgement, JudgePool

__all__ = ["MathConfig", "MathEnvironment"]

Columns: TypeAlias = Mapping[str, Any]

_COLUMNS = ("ground_truth", "answer")
_MAX_NAMED = 5
_SHOWN_CHARACTERS = 120
_FINDERS = {
    "english_multichoice": find_english_choice,
    "multilingual_multichoice": find_choice,
}


class MathConfig(Config):
    """Settings of the math environment."""

    verifier_type: Literal[
        "math", "english_multichoice", "multilingual_multichoice"
    ] = "math"
    """Comparison of answers. `math`: by their meaning. Otherwise by the letter after
    `Answer:` or in `\\boxed{}`; `multilingual_multichoice` knows the word in some
    thirty languages, and letters of other scripts."""
    num_workers: int = Field(default=1, ge=1)
    """Number of processes that compare answers by their meaning."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """Time limit of one comparison, in seconds. An answer whose comparison exceeds it,
    or raises, is wrong and counts in `unverified_fraction`."""
    stop_strings: tuple[str, ...] | None = None
    """Strings that stop a response, in addition to those of the generation."""


@register_env("math")
class MathEnvironment(EnvironmentInterface[Columns]):
    """Rewards 1 for an answer that equals the solution, else 0; ends the conversation.

    The solution is the column `ground_truth` or `answer` of the row: a number, a
    formula in LaTeX or Python syntax, a few words, a text with the solution in
    `\\boxed{}`, or one that ends with `#### answer` as in GSM8K. The last answer in the
    response counts, preferably one in `\\boxed{}`. Answers are compared by sympy in
    separate processes (`rl-envs[math]`), because comparing formulas may take forever or
    exhaust memory; such an answer, or one that raises, earns nothing.

    Args:
        config: The settings, or a mapping of them.
    """

    config_class = MathConfig
    many_turns = False

    def __init__(self, config: MathConfig | Mapping[str, Any] | None = None) -> None:
        if not isinstance(config, MathConfig):
            config = MathConfig.from_dict(
                dict(config or {}), source="environment 'math'"
            )
        self.config = config
        self._pool = JudgePool(config.num_workers, config.timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        # The pool's processes cannot be pickled; a copy starts its own.
        return type(self), (self.config,)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row no solution.
            SolutionError: A solution cannot be read.
            ConfigError: sympy is missing.
            DeadlineExceededError: A process does not start.
        """
        size = num_rows(message_log_batch, metadata)
        pairs = [
            (last_response(log, row=row), _solution(metadata[row], row))
            for row, log in enumerate(message_log_batch)
        ]
        if self.config.verifier_type == "math":
            judgements = self._pool.judge(pairs)
        else:
            find = _FINDERS[self.config.verifier_type]
            judgements = [_judge_choice(*pair, find) for pair in pairs]
        _check_readable(pairs, judgements)
        stop = self.config.stop_strings
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": _verdict(judgement)}
                for judgement in judgements
            ],
            metadata=[
                {**columns, "correct": judged.correct, "verified": judged.verified}
                for columns, judged in zip(metadata, judgements, strict=True)
            ],
            next_stop_strings=[None if stop is None else list(stop)] * size,
            rewards=as_array([judged.correct for judged in judgements], "float32"),
            terminateds=full(size, True, "bool"),
            answers=[judgement.answer for judgement in judgements],
        )

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows without a readable solution.

        Raises:
            ConfigError: sympy is missing.
            DeadlineExceededError: A process does not start.
        """
        found: dict[int, str] = {}
        solutions: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                solutions[row] = _solution(columns, row)
            except MessageLogError as error:
                found[row] = str(error)
        if self.config.verifier_type == "math":
            reasons = self._pool.read(list(solutions.values()))
        else:
            reasons = [_reason_no_choice(text) for text in solutions.values()]
        for (row, text), reason in zip(solutions.items(), reasons, strict=True):
            if reason is not None:
                found[row] = f"the solution {_short(text)} cannot be read: {reason}"
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and metrics.

        `accuracy` is the share of right answers, `pass@samples_per_prompt` that of
        prompts with at least one, `fraction_of_samples_properly_ended` that of answers
        within the length limit, `unverified_fraction` that of answers whose comparison
        took too long or too much memory, or raised.
        """
        metrics = reward_metrics(batch)
        judged = [
            row for row in batch.get("metadata") or () if "correct" in (row or {})
        ]
        if judged:
            metrics["accuracy"] = sum(row["correct"] for row in judged) / len(judged)
            unverified = sum(not row["verified"] for row in judged)
            metrics["unverified_fraction"] = unverified / len(judged)
        # A batch without the columns of this environment: only its rewards tell.
        elif metrics:
            rewards = to_numpy(batch.get("rewards", batch.get("total_reward")))
            metrics["accuracy"] = float(np.mean(rewards == 1.0))
        if metrics and "group_index" in batch:
            metrics["pass@samples_per_prompt"] = calculate_pass_rate_per_prompt(
                batch["group_index"],
                as_array(to_numpy(batch["rewards"]) == 1.0, "bool"),
            )
        if metrics and "truncated" in batch:
            ended = ~to_numpy(batch["truncated"]).astype(np.bool_)
            metrics["fraction_of_samples_properly_ended"] = float(np.mean(ended))
        return batch, metrics

    def shutdown(self) -> None:
        """Stop the processes; a later step starts new ones."""
        self._pool.close()


def _verdict(judgement: Judgement) -> str:
    return f"Environment: {'correct' if judgement.correct else 'incorrect'}"


def _judge_choice(
    response: str, solution: str, find: Callable[[str], str | None]
) -> Judgement:
    answer = find(response)
    return Judgement(
        answer == canonical_choice(solution),
        answer,
        unreadable=_reason_no_choice(solution),
    )


def _reason_no_choice(solution: str) -> str | None:
    """Return why a solution is not a choice; None: it is one."""
    letter = canonical_choice(solution)
    if len(letter) == 1 and "A" <= letter <= "Z":
        return None
    return "a multiple choice is one letter, A to Z, or its form in another script"


def _check_readable(
    pairs: Sequence[tuple[str, str]], judgements: Sequence[Judgement]
) -> None:
    """Raise if solutions cannot be read, as every answer would then be wrong."""
    bad = [row for row, judged in enumerate(judgements) if judged.unreadable]
    if not bad:
        return
    named = "; ".join(
        f"metadata[{row}]: {_short(pairs[row][1])}: {judgements[row].unreadable}"
        for row in bad[:_MAX_NAMED]
    )
    more = f"; and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
    raise SolutionError(
        f"{len(bad)} of {len(pairs)} solutions cannot be read: {named}{more}. Write a "
        "solution as a number, LaTeX, Python or words, in \\boxed{} or after '####' "
        "at the end of a longer text, or leave the row out"
    )


def _short(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return repr(cut)


def _solution(columns: Columns, row: int) -> str:
    given = columns if isinstance(columns, Mapping) else {}
    for name in _COLUMNS:
        value = given.get(name)
        # A bool is an int, but no solution.
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    raise MessageLogError(
        f"metadata[{row}] must have the column 'ground_truth' or 'answer', a text or "
        f"number: it has {sorted(given) if given else columns!r}"
    )
