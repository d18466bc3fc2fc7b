"""The judge of countdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

from rl_distributed.batch.arrays import as_array, full
from rl_distributed.config import Config
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    last_response,
    num_rows,
)
from rl_envs.metrics import reward_metrics
from rl_envs.registry import register_env
from rl_envs.worlds.countdown.expressions import ExpressionError, read_expression

__all__ = ["CountdownConfig", "CountdownEnvironment"]

Columns: TypeAlias = Mapping[str, Any]

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_WELL_FORMED = 0.1


class CountdownConfig(Config):
    """Settings of the countdown environment."""

    credit: Literal["exact", "graded"] = "exact"
    """`exact`: reward 1 for an expression that reaches the target, else 0. `graded`:
    0.1 for one that uses the numbers as it must and misses the target."""
    use_all: bool = True
    """Whether each number must be used; False: each at most once."""


@register_env("countdown")
class CountdownEnvironment(EnvironmentInterface[Columns]):
    """Computes the expression of a response exactly; ends the conversation.

    A row has the columns `numbers`, a list of whole numbers, and `target`. The answer
    is what stands between `<answer>` and `</answer>`, the last one, else the last line
    of the response; `= target` at its end does not count. Each number is used once, no
    other number occurs, and fractions on the way are exact.

    Args:
        config: The settings.
    """

    config_class = CountdownConfig
    many_turns = False

    def __init__(self, config: CountdownConfig | None = None) -> None:
        self.config = config or CountdownConfig()
        self._uses_all = self.config.use_all
        self._for_well_formed = _WELL_FORMED if self.config.credit == "graded" else 0.0

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row no numbers.
        """
        size = num_rows(message_log_batch, metadata)
        rewards, verdicts, answers = [], [], []
        for row, (log, columns) in enumerate(
            zip(message_log_batch, metadata, strict=True)
        ):
            answer = _answer_in(last_response(log, row=row))
            reward, verdict = self._judge(answer, *_task_of(columns, row))
            rewards.append(reward)
            verdicts.append(verdict)
            answers.append(answer)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": verdict} for verdict in verdicts
            ],
            metadata=[
                {**columns, "correct": reward == 1.0}
                for columns, reward in zip(metadata, rewards, strict=True)
            ],
            next_stop_strings=[None] * size,
            rewards=as_array(rewards, "float32"),
            terminateds=full(size, True, "bool"),
            answers=list(answers),
        )

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows without numbers or a target."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                _task_of(columns, row)
            except MessageLogError as error:
                found[row] = str(error)
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged; `accuracy` is the share that reach the target."""
        metrics = reward_metrics(batch)
        judged = [
            row for row in batch.get("metadata") or () if "correct" in (row or {})
        ]
        if judged:
            metrics["accuracy"] = sum(row["correct"] for row in judged) / len(judged)
        return batch, metrics

    def _judge(
        self, answer: str, numbers: Counter[int], target: int
    ) -> tuple[float, str]:
        try:
            value, used = read_expression(answer)
        except ExpressionError as error:
            return 0.0, f"incorrect: {error}"
        fits = used == numbers if self._uses_all else used <= numbers
        if not fits:
            given = " ".join(map(str, sorted(numbers.elements())))
            return 0.0, f"incorrect: the numbers are {given}"
        if value == target:
            return 1.0, "correct"
        return self._for_well_formed, f"incorrect: it is {value}, not {target}"


def _answer_in(response: str) -> str:
    tagged = _TAGGED.findall(response)
    lines = (tagged[-1] if tagged else response).strip().splitlines()
    line = lines[-1] if lines else ""
    return line.partition("=")[0].strip()


def _task_of(columns: Columns, row: int) -> tuple[Counter[int], int]:
    given = columns if isinstance(columns, Mapping) else {}
    numbers, target = given.get("numbers"), given.get("target")
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    whole = is_list and all(type(number) is int for number in numbers or ())
    if not whole or not numbers or type(target) is not int:
        raise MessageLogError(
            f"metadata[{row}] must have the columns 'numbers', a list of whole "
            f"numbers, and 'target', a whole number: got {numbers!r} and {target!r}"
        )
    return Counter(numbers), target
