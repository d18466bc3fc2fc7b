from __future__ import annotations

import pickle

import pytest

from rl_algorithms import errors
from rl_algorithms.testing import ConformanceError
from rl_distributed.errors import DistributedError, UserError

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_can_be_raised_caught_and_sent(cls):
    error = pickle.loads(pickle.dumps(cls("the message")))
    assert type(error) is cls
    assert str(error) == "the message"
    assert isinstance(error, errors.AlgorithmError)
    assert isinstance(error, DistributedError)


def test_they_replace_builtins():
    assert issubclass(errors.DatasetNotFoundError, FileNotFoundError)
    assert issubclass(errors.ColumnError, (UserError, LookupError))
    assert issubclass(errors.PromptTooLongError, ValueError)
    assert not issubclass(errors.RolloutError, UserError)
    assert issubclass(errors.RolloutError, RuntimeError)
    assert not issubclass(errors.DataError, RuntimeError)


def test_a_violated_rule_is_an_assertion_and_of_the_same_root():
    assert issubclass(ConformanceError, errors.AlgorithmError)
    assert issubclass(ConformanceError, AssertionError)
