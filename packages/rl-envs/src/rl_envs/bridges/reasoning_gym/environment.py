"""The judge of Reasoning Gym: each family's own scorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rl_envs.bridges.reasoning_gym.families import (
    COLUMNS,
    SERVER,
    TaskSpec,
    read_task,
)
from rl_envs.errors import MessageLogError
from rl_envs.registry import register_env
from rl_envs.worlds.limited_verdict import LimitedConfig, LimitedVerdictEnvironment
from rl_envs.worlds.verdict import Columns, Given, Verdict, last_tagged

__all__ = ["ReasoningGymConfig", "ReasoningGymEnvironment"]

# Scorers that compute with floats give their own answers a little less than 1.
_RIGHT = 0.99


class ReasoningGymConfig(LimitedConfig):
    """Settings of the reasoning_gym environment."""

    timeout_s: float = Field(10.0, gt=0.0)
    """Seconds that making a task again and scoring one response to it may take; then it
    earns nothing."""
    credit: Literal["exact", "graded"] = "exact"
    """`exact`: reward 1 where the family's scorer gives at least 0.99, else 0.
    `graded`: what the scorer gives; many give a share to an answer that holds the right
    one among other text, or is none at all."""


@register_env("reasoning_gym")
class ReasoningGymEnvironment(LimitedVerdictEnvironment[TaskSpec]):
    """Scores the answer of a response by the scorer of the task's family.

    Rows come from `ReasoningGymTasks`. The answer is what stands between the last
    `<answer>` and `</answer>`, else the whole response. Scorers run in processes of
    their own, and evaluate nothing that a model wrote but literals and formulas.

    Args:
        config: The settings.
    """

    config_class = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig | None = None) -> None:
        settings = config or ReasoningGymConfig()
        super().__init__(settings, SERVER)
        self._is_graded = settings.credit == "graded"

    def read_row(self, columns: Columns, row: int) -> TaskSpec:
        """Return what the task is made of.

        Raises:
            MessageLogError: A column is missing or has no meaning.
        """
        given = columns if isinstance(columns, Mapping) else {}
        task = read_task(given)
        if task is None:
            found = {name: given.get(name) for name in COLUMNS}
            raise MessageLogError(
                f"metadata[{row}] must have the columns {', '.join(COLUMNS)}, as "
                f"ReasoningGymTasks writes them: got {found!r:.160}"
            )
        return {**task, "digest": given["question_digest"]}

    def request(self, given: Given[TaskSpec]) -> Mapping[str, Any]:
        """Return what is to be scored."""
        return {**_asked(given.task), "answer": _answer_in(given.response)}

    def row_request(self, task: TaskSpec) -> Mapping[str, Any] | None:
        """Let the task be made."""
        # An empty answer: the task is made and its digest compared, which is the actual
        # check of the row.
        return {**_asked(task), "answer": ""}

    def verdict(self, given: Given[TaskSpec], reply: Mapping[str, Any]) -> Verdict:
        """Return what the scorer said."""
        score, found = float(reply["score"]), _answer_in(given.response)
        if score >= _RIGHT:
            return Verdict(1.0, "correct", found)
        reason = f"incorrect: its score is {score:.3g}"
        return Verdict(score if self._is_graded else 0.0, reason, found)


def _asked(task: TaskSpec) -> dict[str, Any]:
    made = {key: value for key, value in task.items() if key != "digest"}
    return {"do": "score", "task": made, "digest": task["digest"]}


def _answer_in(response: str) -> str:
    tagged = last_tagged(response)
    return (response if tagged is None else tagged).strip()
