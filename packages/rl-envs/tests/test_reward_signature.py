from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from rl_envs.errors import RewardSignatureError
from rl_envs.rewards.signature import inspect_reward_fn


class Scorer:
    def __call__(self, response: str, answer: str) -> float:
        return 0.0

    def method(self, prompts: list[str], completions: list[str]) -> list[float]:
        return []


def annotated(xs: list[str], ys: list[str]) -> list[float]:
    return []


@functools.wraps(annotated)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return annotated(*args, **kwargs)


def bare_decorated(*args: Any, **kwargs: Any) -> Any:
    return 0.0


def places_only(prompt: str, response: str, /, answer: str = "") -> float:
    return 0.0


ROW: dict[str, Callable[..., Any]] = {
    "names": lambda prompt, response: 0,
    "completion": lambda prompt, completion: 0,
    "any names": lambda p, r: 0,
    "one": lambda text: 0,
    "response and column": lambda response, answer: 0,
    "text and column": lambda text, answer: 0,
    "object": Scorer(),
    "decorated": bare_decorated,
    "places": places_only,
    "messages": lambda messages: 0,
    "keywords": lambda *, response, **columns: 0,
    "builtin": max,
}
BATCH: dict[str, Callable[..., Any]] = {
    "names": lambda prompts, responses: [],
    "completions": lambda prompts, completions, **kwargs: [],
    "completions only": lambda completions, answer: [],
    "method": Scorer().method,
    "annotations": annotated,
    "wrapped": wrapped,
    "partial": functools.partial(Scorer().method),
    "conversations": lambda message_logs: [],
}


@pytest.mark.parametrize("kind", ROW)
def test_functions_of_one_row(kind: str) -> None:
    assert not inspect_reward_fn(ROW[kind]).batched


@pytest.mark.parametrize("kind", BATCH)
def test_functions_of_a_batch(kind: str) -> None:
    assert inspect_reward_fn(BATCH[kind]).batched


def test_the_caller_may_say_so() -> None:
    assert inspect_reward_fn(lambda p, r: [], batched=True).batched


def test_columns_are_the_other_parameters() -> None:
    signature = inspect_reward_fn(
        lambda prompt, response, answer, *, level=1, **rest: 0
    )
    assert signature.required_columns == ("answer",)
    assert signature.optional_columns == ("level",)
    assert signature.all_columns
    places, named = signature.bind(
        {"prompt": "p", "response": "r"}, {"answer": "a", "x": 1, "prompt": "other"}
    )
    assert places == []
    assert named == {"prompt": "p", "response": "r", "answer": "a", "x": 1}


def test_parameters_without_a_name_are_passed_by_place() -> None:
    signature = inspect_reward_fn(places_only)
    places, named = signature.bind({"prompt": "p", "response": "r"}, {"answer": "a"})
    assert places == ["p", "r"]
    assert named == {"answer": "a"}


def test_the_second_name_decides_what_the_first_means() -> None:
    roles = inspect_reward_fn(lambda prompt, text: 0).roles
    assert roles == {"prompt": "prompt", "text": "response"}
    roles = inspect_reward_fn(lambda text, answer: 0).roles
    assert roles == {"text": "response"}


@pytest.mark.parametrize(
    "fn",
    [lambda: 0, lambda prompt: 0, lambda prompt, answer: 0, lambda answer: 0],
)
def test_a_function_without_a_response_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(RewardSignatureError, match="takes no response"):
        inspect_reward_fn(fn)


def test_mixed_and_uncallable_ones_are_refused() -> None:
    with pytest.raises(RewardSignatureError, match="mixes parameters for one row"):
        inspect_reward_fn(lambda prompt, responses: 0)
    with pytest.raises(RewardSignatureError, match="must be callable: got int"):
        inspect_reward_fn(3)  # type: ignore[arg-type]
