"""Environments written by `rl init`, with their tests, as texts by file name."""

from __future__ import annotations

__all__ = ["environment_files", "needed_characters", "num_new_tokens"]

_RETRY = {True: " no, ", False: "That is wrong. Give another answer."}


def environment_files(task: str, column: str, *, is_short: bool) -> dict[str, str]:
    """Return an environment and its tests.

    Args:
        task: `turns` or `tools`.
        column: Column of the final answer.
        is_short: True for a model whose answers are a few characters.
    """
    if task == "turns":
        code, test = _TURNS, _TEST_TURNS
    else:
        code, test = (_SHORT_TOOLS, _TEST_SHORT_TOOLS) if is_short else (
            _TOOLS, _TEST_TOOLS,
        )  # fmt: skip
    texts = {"environment.py": code, "test_environment.py": test}
    return {
        name: text.replace("COLUMN", column).replace("RETRY_TEXT", _RETRY[is_short])
        for name, text in texts.items()
    }


def needed_characters(task: str) -> str:
    """Return the characters that the short environment of a task adds to a model's."""
    return {"turns": "no,", "tools": "?"}.get(task, "")


def num_new_tokens(task: str) -> int:
    """Return the length of an answer to the short environment of a task."""
    return {"tools": 4}.get(task, 2)


_TURNS = '''\
"""The environment of run.yaml. Test it with: python -m pytest test_environment.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_envs import EnvironmentInterface, EnvironmentReturn, last_response

RETRY = "RETRY_TEXT"
# Reward of a right answer at the first try, the second, the third.
REWARDS = (1.0, 0.75, 0.5)


class Environment(EnvironmentInterface[Mapping[str, Any]]):
    """Says that an answer is wrong, and lets the model try again."""

    many_turns = True

    def step(
        self,
        message_log_batch: Sequence[Any],
        metadata: Sequence[Mapping[str, Any]],
    ) -> EnvironmentReturn[Mapping[str, Any]]:
        """Score the last response of each conversation.

        Args:
            message_log_batch: The conversations; each ends with a response.
            metadata: The row of each, in its first turn; then what the turn before
                returned. The state of a conversation belongs here, and not in `self`.
        """
        turns = [
            self.turn(last_response(log, row=row), columns)
            for row, (log, columns) in enumerate(
                zip(message_log_batch, metadata, strict=True)
            )
        ]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": said} for said, *_ in turns],
            metadata=[columns for _, columns, *_ in turns],
            next_stop_strings=[None] * len(turns),
            rewards=[reward for *_, reward, _ in turns],
            terminateds=[ends for *_, ends in turns],
            answers=None,
        )

    def turn(
        self, response: str, columns: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any], float, bool]:
        """Return what to say, the columns, the reward, and whether it ends here."""
        tries = columns.get("tries", 0) + 1
        is_right = response.strip() == str(columns["COLUMN"]).strip()
        reward = REWARDS[tries - 1] if is_right else 0.0
        ends = is_right or tries == len(REWARDS)
        return RETRY, {**columns, "tries": tries}, reward, ends
'''
_TEST_TURNS = '''\
"""Tests of environment.py; run them by: python -m pytest test_environment.py."""

from environment import REWARDS, RETRY, Environment

from rl_envs.testing import Examination, assert_passed, examine_environment

# Replace these by tasks like yours.
ROWS = [
    {"prompt": "max 274 = ", "COLUMN": "7"},
    {"prompt": "max 309 = ", "COLUMN": "9"},
    {"prompt": "max 551 = ", "COLUMN": "5"},
]


def rewards_of(*responses: str) -> list[float]:
    """Return the rewards of a conversation, turn by turn, until it ends."""
    environment, columns, rewards = Environment(), ROWS[0], []
    log = [{"role": "user", "content": ROWS[0]["prompt"]}]
    for response in responses:
        log.append({"role": "assistant", "content": response})
        turn = environment.step([log], [columns])
        columns = turn.metadata[0]
        rewards.append(float(turn.rewards[0]))
        if turn.terminateds[0]:
            break
        assert turn.observations[0]["content"] == RETRY
        log.append(turn.observations[0])
    return rewards


def test_the_sooner_the_answer_is_right_the_more_it_earns() -> None:
    assert rewards_of("7") == [REWARDS[0]]
    assert rewards_of("4", "7") == [0.0, REWARDS[1]]
    assert rewards_of("4", "2", "7") == [0.0, 0.0, REWARDS[2]]


def test_the_conversation_ends_after_three_wrong_answers() -> None:
    assert rewards_of("4", "2", "0", "7") == [0.0, 0.0, 0.0]


def test_only_right_responses_earn_the_full_reward() -> None:
    # Tries right, empty, garbled and slightly changed answers, in several orders, and
    # in another process.
    examination = Examination(gold_column="COLUMN", full_reward=1.0)
    assert_passed(examine_environment(Environment, ROWS, examination))
'''
_HEAD_OF_TOOLS = '''\
"""The environment of run.yaml. Test it with: python -m pytest test_environment.py."""

IMPORTS


def largest(digits: str) -> str:
    """Return the largest of some digits.

    What the model reads of a tool is its name, its parameters and this text.

    Args:
        digits: The digits, such as 274.
    """
    return max(digits.strip())


def reward(response: str, COLUMN: str) -> float:
    """Return 1 for the right final answer, else 0.

    Args:
        response: The response that calls no tool; it ends the conversation.
        COLUMN: The column of that name; every column of the row can be asked for.
    """
    return float(response.strip() == COLUMN.strip())


'''
_TOOLS = _HEAD_OF_TOOLS.replace(
    "IMPORTS\n", "from rl_envs import ToolEnvironment, ToolLimits\n"
) + '''\
class Environment(ToolEnvironment):
    """Runs the tools that the model calls, and scores its final answer."""

    def __init__(self) -> None:
        limits = ToolLimits(max_calls_per_turn=2, call_deadline_s=5.0)
        super().__init__([largest], reward, limits=limits)
'''  # fmt: skip
_SHORT_TOOLS = _HEAD_OF_TOOLS.replace(
    "IMPORTS\n",
    "import re\n\nfrom rl_envs import ToolCall, ToolEnvironment, ToolLimits\n",
) + '''\
class ShortCalls:
    """Reads a call as `?274`.

    A tiny model cannot learn the JSON that real models write. Remove this class and
    `parser=` for one of those.
    """

    def __call__(self, response: str) -> list[ToolCall]:
        """Return the calls of a response."""
        called = re.fullmatch(r"\\?(\\d+)", response.strip())
        return [ToolCall("largest", {"digits": called[1]})] if called else []


class Environment(ToolEnvironment):
    """Runs the tools that the model calls, and scores its final answer."""

    def __init__(self) -> None:
        limits = ToolLimits(max_calls_per_turn=2, call_deadline_s=5.0)
        super().__init__([largest], reward, parser=ShortCalls(), limits=limits)
'''  # fmt: skip
_TEST_TOOLS = '''\
"""Tests of environment.py; run them by: python -m pytest test_environment.py."""

from environment import Environment

from rl_envs.testing import Examination, assert_passed, examine_environment

# Replace these by tasks like yours.
ROWS = [
    {"prompt": "max 274 = ", "COLUMN": "7"},
    {"prompt": "max 309 = ", "COLUMN": "9"},
    {"prompt": "max 551 = ", "COLUMN": "5"},
]
CALL = 'THE_CALL'


def test_a_call_is_answered_and_the_answer_after_it_is_scored() -> None:
    environment = Environment()
    log = [
        {"role": "user", "content": ROWS[0]["prompt"]},
        {"role": "assistant", "content": CALL},
    ]
    called = environment.step([log], [ROWS[0]])
    assert not called.terminateds[0]
    assert [said["content"] for said in called.observations[0]] == ["7"]

    log += [*called.observations[0], {"role": "assistant", "content": "7"}]
    answered = environment.step([log], list(called.metadata))
    assert answered.terminateds[0]
    assert float(answered.rewards[0]) == 1.0


def test_only_right_responses_earn_the_full_reward() -> None:
    # Tries right, empty, garbled and slightly changed answers, in several orders, and
    # in another process.
    examination = Examination(gold_column="COLUMN", full_reward=1.0)
    assert_passed(examine_environment(Environment, ROWS, examination))
'''
_TEST_SHORT_TOOLS = _TEST_TOOLS.replace("'THE_CALL'", '"?274"')
_TEST_TOOLS = _TEST_TOOLS.replace(
    "'THE_CALL'",
    '\'<tool_call>{"name": "largest", "arguments": {"digits": "274"}}</tool_call>\'',
)
