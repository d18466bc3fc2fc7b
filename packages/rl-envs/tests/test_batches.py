"""Environments called with a batch as `generate` returns it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from rl_envs import FunctionalRewardWrapper, MathEnvironment
from rl_envs.batches import conversations_of
from rl_envs.errors import EnvironmentContractError, MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    as_columns,
    observation_messages,
)
from rl_envs.testing import check_return


def batch(**changes):
    columns = {
        "prompt": ["1+1=", [{"role": "user", "content": "2+2="}]],
        "answer": ["2", "4"],
        "response": ["2", "5"],
        "truncated": np.array([False, True]),
        "output_ids": np.zeros((2, 3)),
        "difficulty": np.array([1.0, 2.0]),
    }
    return {**columns, **changes}


class Bare(EnvironmentInterface):
    """Returns what its test sets, and records its input."""

    def __init__(self, result=None):
        self.result = result

    def step(self, message_log_batch, metadata):
        self.asked = message_log_batch, metadata
        return self.result


class Inheriting(Bare):
    def step(self, message_log_batch, metadata):
        return super().step(message_log_batch, metadata)


def ended(size, observations=(), terminateds=None):
    return EnvironmentReturn(
        observations=list(observations),
        metadata=[None] * size,
        next_stop_strings=[None] * size,
        rewards=[1.0] * size,
        terminateds=[True] * size if terminateds is None else terminateds,
        answers=None,
    )


@pytest.mark.parametrize("kind", [Bare, Inheriting])
def test_conversations_and_columns_of_a_batch(kind):
    environment = kind(ended(2))
    assert environment.step(batch()) is environment.result
    logs, metadata = environment.asked
    assert logs == [
        [
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": "2", "truncated": False},
        ],
        [
            {"role": "user", "content": "2+2="},
            {"role": "assistant", "content": "5", "truncated": True},
        ],
    ]
    assert [row["answer"] for row in metadata] == ["2", "4"]
    assert set(metadata[0]) == {"prompt", "answer"}


def test_conversations_of_processed_rows():
    logs, metadata = conversations_of(
        {
            "message_log": [[{"role": "system", "content": "Add."}]],
            "extra_env_info": [{"answer": "3"}],
            "response": ["3"],
            "prompt": ["not this one"],
        }
    )
    assert [message["role"] for message in logs[0]] == ["system", "assistant"]
    assert metadata == [{"answer": "3"}]


def test_two_arguments_are_as_before():
    environment = pickle.loads(pickle.dumps(Bare(ended(1))))
    log = [[{"role": "assistant", "content": "x"}]]
    environment.step(log, [None])
    assert environment.asked == (log, [None])
    environment.step(message_log_batch=log, metadata=[1])
    assert environment.asked == (log, [1])
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        environment.step(log)


class Mixin:
    def step(self, logs, columns=None):
        return logs, columns


class Named(Mixin, EnvironmentInterface):
    """Inherits `step` from a class that is not an environment, with its own names."""


def test_other_names_and_mixins():
    environment = Named()
    log = [[{"role": "assistant", "content": "x"}]]
    assert environment.step(log) == (log, None)
    assert environment.step(logs=log, columns=[1]) == (log, [1])
    logs, columns = environment.step(batch())
    assert [row["answer"] for row in columns] == ["2", "4"]
    assert len(logs) == 2


def test_mathematics_needs_no_arguments():
    result = MathEnvironment().step(
        batch(response=["The answer is 2.", "The answer is 5."], truncated=[False] * 2)
    )
    assert list(result.rewards) == [1.0, 0.0]


def test_reward_functions_get_the_columns():
    def right(prompt: str, response: str, answer: str) -> float:
        return float(response == answer)

    found = FunctionalRewardWrapper(right).step(batch(prompt=["1+1=", "2+2="]))
    assert list(found.rewards) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response": []}, "the batch has no rows"),
        ({"response": ["2"]}, "prompt must have one entry per row: got 2 for 1"),
        ({"answer": ["2"]}, "answer must have one entry per row: got 1 for 2"),
        ({"truncated": [True]}, "truncated must have one entry per row"),
        ({"truncated": False}, "truncated must have one entry per row"),
        ({"truncated": np.ones((2, 2))}, "truncated must have one entry per row"),
        ({"response": "25"}, "response must be a list with one entry per row: got str"),
        ({"response": None}, "response must be a list"),
        ({"prompt": "ab"}, "prompt must be a list"),
        ({"task": "ab"}, "task must be a list with one entry per row: got str 'ab'"),
        ({"step": 3}, "step must be a list"),
        ({"step": {"a": 1, "b": 2}}, "step must be a list"),
        ({"prompt": ["a", []]}, r"prompt\[1\] must be text or a list of messages"),
        ({"response": ["2", None]}, r"response\[1\] must be text"),
        ({"prompt": ["a", 3]}, r"prompt\[1\] must be text or a list of messages"),
    ],
)
def test_wrong_batches(changes, message):
    with pytest.raises(MessageLogError, match=message):
        Bare().step(batch(**changes))


def test_batches_that_lack_texts():
    with pytest.raises(MessageLogError, match="needs a column response"):
        Bare().step({"output_ids": np.zeros((2, 3))})
    with pytest.raises(MessageLogError, match="needs prompt or message_log"):
        Bare().step({"response": ["a"]})


class TestObservations:
    def test_rows_that_have_ended_need_none(self):
        found = as_columns(ended(2))
        assert [observation_messages(said) for said in found.observations] == [[], []]
        assert check_return(ended(2), 2) == []
        left_out = as_columns(ended(2)._replace(observations=None))
        assert left_out.observations == [[], []]

    def test_rows_that_go_on_do(self):
        result = ended(3, terminateds=[True, False, False])
        with pytest.raises(EnvironmentContractError, match=r"2 of 3 rows continue"):
            as_columns(result)
        assert any("observations" in problem for problem in check_return(result, 3))

    def test_nothing_is_no_answer(self):
        with pytest.raises(EnvironmentContractError, match="got NoneType None"):
            as_columns(None)
