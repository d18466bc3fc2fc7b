from __future__ import annotations

import pickle

import pytest

from rl_distributed.errors import BatchError, DistributedError, UserError
from rl_models import errors
from rl_models.testing import ContractError
from rl_models.weights.sync import TrainerLostError

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("cls", [*CLASSES, ContractError, TrainerLostError])
def test_errors_have_one_root_and_can_be_sent(cls):
    error = pickle.loads(pickle.dumps(cls("the message")))
    assert type(error) is cls
    assert str(error) == "the message"
    assert isinstance(error, errors.ModelsError)
    assert isinstance(error, DistributedError)


def test_input_that_the_caller_can_fix_is_told_from_failures():
    fixable = {cls for cls in CLASSES if issubclass(cls, UserError)}
    assert fixable == {
        errors.ModelLoadError,
        errors.UnsupportedModelError,
        errors.ContextLengthError,
    }


def test_they_replace_builtins():
    assert issubclass(errors.ModelLoadError, OSError)
    assert issubclass(errors.UnsupportedModelError, TypeError)
    assert issubclass(errors.ContextLengthError, BatchError)
    assert issubclass(errors.NonFiniteGradientError, ArithmeticError)
    assert issubclass(ContractError, AssertionError)
    assert issubclass(errors.GenerationError, RuntimeError)
    assert issubclass(errors.WeightSyncError, RuntimeError)


def test_wrong_input_is_no_failure_of_the_run():
    for cls in (errors.ModelLoadError, errors.UnsupportedModelError):
        assert not issubclass(cls, RuntimeError)
