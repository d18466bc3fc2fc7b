"""The judge of arithmetic."""

from __future__ import annotations

import re
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

__all__ = ["ArithmeticConfig", "ArithmeticEnvironment"]

Columns: TypeAlias = Mapping[str, Any]

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
# ASCII digits only: `\d` also matches those of other scripts. The bound keeps `int`
# fast, and below the number of digits that Python refuses to convert.
_WHOLE = re.compile(r"[+-]?(?:[0-9]{1,1000}|[0-9]{1,3}(?:,[0-9]{3}){1,300})")
_MINUS = str.maketrans({"\u2212": "-"})
_WELL_FORMED = 0.1


class ArithmeticConfig(Config):
    """Settings of the arithmetic environment."""

    credit: Literal["exact", "graded"] = "exact"
    """`exact`: reward 1 for the right number, else 0. `graded`: 0.1 for a whole number
    that is not the right one."""


@register_env("arithmetic")
class ArithmeticEnvironment(EnvironmentInterface[Columns]):
    """Compares the whole number of a response with the row's; ends the conversation.

    A row has the column `answer`, a whole number or its digits. The answer of a
    response is what stands between `<answer>` and `</answer>`, the last one, else the
    last line; `12+34=` before it does not count. It must be one whole number and
    nothing else; a sign, leading zeros and commas between thousands are allowed.

    Args:
        config: The settings.
    """

    config_class = ArithmeticConfig
    many_turns = False

    def __init__(self, config: ArithmeticConfig | None = None) -> None:
        self.config = config or ArithmeticConfig()
        self._for_well_formed = _WELL_FORMED if self.config.credit == "graded" else 0.0

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Judge the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row no whole number.
        """
        size = num_rows(message_log_batch, metadata)
        rewards, verdicts, answers = [], [], []
        for row, (log, columns) in enumerate(
            zip(message_log_batch, metadata, strict=True)
        ):
            answer = _answer_in(last_response(log, row=row))
            reward, verdict = self._judge(answer, _solution_of(columns, row))
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
        """Return the rows whose answer is no whole number."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                _solution_of(columns, row)
            except MessageLogError as error:
                found[row] = str(error)
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged; `accuracy` is the share of right answers."""
        metrics = reward_metrics(batch)
        judged = [
            row for row in batch.get("metadata") or () if "correct" in (row or {})
        ]
        if judged:
            metrics["accuracy"] = sum(row["correct"] for row in judged) / len(judged)
        return batch, metrics

    def _judge(self, answer: str, solution: int) -> tuple[float, str]:
        value = _whole_number(answer)
        if value is None:
            return 0.0, "incorrect: it must be one whole number"
        if value == solution:
            return 1.0, "correct"
        return self._for_well_formed, f"incorrect: it is not {solution}"


def _answer_in(response: str) -> str:
    tagged = _TAGGED.findall(response)
    lines = (tagged[-1] if tagged else response).strip().splitlines()
    return lines[-1].rpartition("=")[2].strip() if lines else ""


def _whole_number(text: str) -> int | None:
    plain = text.translate(_MINUS)
    return int(plain.replace(",", "")) if _WHOLE.fullmatch(plain) else None


def _solution_of(columns: Columns, row: int) -> int:
    given = columns.get("answer") if isinstance(columns, Mapping) else None
    solution = _whole_number(given.strip()) if isinstance(given, str) else given
    if type(solution) is not int:
        raise MessageLogError(
            f"metadata[{row}] must have the column 'answer', a whole number: got "
            f"{given!r:.80}"
        )
    return solution
