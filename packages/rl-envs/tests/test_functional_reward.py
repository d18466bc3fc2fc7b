from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rl_distributed.errors import UserError
from rl_envs import (
    FunctionalRewardWrapper,
    MessageLogError,
    RewardCallError,
    RewardError,
    RewardValueError,
    check_environment,
    check_reward_fn,
    combine_reward_functions,
)
from rl_envs.interfaces import scored_mask
from rl_envs.rewards.functions import numeric_match


def batch_of(*texts: str, **columns: list[Any]) -> tuple[list[Any], list[Any]]:
    logs = [
        [
            {"role": "user", "content": f"q{row}"},
            {"role": "assistant", "content": text},
        ]
        for row, text in enumerate(texts)
    ]
    metadata = [
        {name: values[row] for name, values in columns.items()}
        for row in range(len(texts))
    ]
    return logs, metadata


def score(fn: Callable[..., Any], *texts: str, **columns: list[Any]) -> Any:
    wrapper = FunctionalRewardWrapper(fn)
    return wrapper.step(*batch_of(*texts, **columns)).rewards


async def slow_length(response: str) -> float:
    await asyncio.sleep(0)
    return float(len(response))


async def slow_batch(prompts: list[str], responses: list[str]) -> list[int]:
    await asyncio.sleep(0)
    return [len(text) for text in responses]


KINDS: dict[str, Callable[..., Any]] = {
    "row": lambda prompt, response: len(response),
    "bool free": lambda response: float(len(response)),
    "batch": lambda prompts, responses: [len(text) for text in responses],
    "numpy": lambda prompts, completions, **kw: np.array([len(t) for t in completions]),
    "tensor": lambda responses: torch.tensor([len(text) for text in responses]),
    "tuple": lambda responses: tuple(len(text) for text in responses),
    "scalar tensor": lambda response: torch.tensor([len(response)]),
    "async": slow_length,
    "async batch": slow_batch,
    "async lambda": lambda response: slow_length(response),
    "messages": lambda messages: len(messages[-1]["content"]),
    "message logs": lambda message_logs: [
        len(log[-1]["content"]) for log in message_logs
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_usual_kind_of_function(kind: str) -> None:
    rewards = score(KINDS[kind], "", "a", "bb")
    assert torch.equal(rewards, torch.tensor([0.0, 1.0, 2.0]))
    assert rewards.dtype is torch.float32
    check_environment(FunctionalRewardWrapper(KINDS[kind]))


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=8))
def test_row_and_batch_functions_agree(pairs: list[tuple[str, str]]) -> None:
    texts = [text for text, _ in pairs]
    answers = [answer for _, answer in pairs]
    one = score(lambda response, answer: response == answer, *texts, answer=answers)
    many = score(
        lambda responses, answer: [
            r == a for r, a in zip(responses, answer, strict=True)
        ],
        *texts,
        answer=answers,
    )
    assert torch.equal(one, many)
    assert one.shape == (len(pairs),)


def test_the_prompt_is_what_stands_before_the_response() -> None:
    seen: list[Any] = []
    log = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
    ]
    FunctionalRewardWrapper(
        lambda prompt, response: seen.append((prompt, response)) or 1
    ).step([log], [None])
    assert seen == [("be brief\n1+1", "2")]


def test_columns_reach_the_function() -> None:
    rewards = score(
        lambda response, answer, level=0, missing=5: (
            (response == answer) * level + missing
        ),
        "a",
        "b",
        answer=["a", "a"],
        level=[2, 3],
    )
    assert rewards.tolist() == [7, 5]
    seen: list[Any] = []

    def all_columns(responses: list[str], **columns: list[Any]) -> list[int]:
        seen.append(columns)
        return [0] * len(responses)

    logs, _ = batch_of("a", "b")
    FunctionalRewardWrapper(all_columns).step(logs, [{"x": 1}, {"y": 2}])
    assert seen == [{"x": [1, None], "y": [None, 2]}]
    metadata: list[Any] = []
    score(lambda response, metadata_: 0, "a", metadata_=[3])
    score(lambda response, metadata: 1 if metadata["x"] == 3 else 0, "a", x=[3])
    assert metadata == []


def test_several_rewards_by_name() -> None:
    rewards = score(lambda response: {"right": 1, "reward/short": 0.5}, "a", "b")
    assert set(rewards) == {"reward/right", "reward/short"}
    assert rewards["reward/short"].tolist() == [0.5, 0.5]
    rewards = score(
        lambda responses: {"a": [1, 2], "b": torch.tensor([3, 4])}, "x", "y"
    )
    assert rewards["reward/b"].tolist() == [3, 4]
    rewards = score(lambda response: {"a": 1} if response else None, "x", "")
    assert rewards["reward/a"][0] == 1
    assert scored_mask(rewards).tolist() == [True, False]


def test_none_means_not_scored_and_is_counted() -> None:
    wrapper = FunctionalRewardWrapper(lambda response: None if response == "?" else 1)
    result = wrapper.step(*batch_of("a", "?", "b"))
    assert isinstance(result.rewards, torch.Tensor)
    assert scored_mask(result.rewards).tolist() == [True, False, True]
    assert result.terminateds.tolist() == [True] * 3
    _, metrics = wrapper.global_post_process_and_metrics({"rewards": result.rewards})
    assert metrics["unscored_fraction"] == pytest.approx(1 / 3)
    assert metrics["reward_mean"] == 1
    with pytest.raises(RewardValueError, match="returned None for all 2 responses"):
        score(lambda prompt, response: None, "a", "b")


def test_the_responses_to_one_prompt_may_all_be_unscored() -> None:
    log = [
        {"role": "user", "content": "Expand it."},
        {"role": "assistant", "content": "1"},
    ]
    wrapper = FunctionalRewardWrapper(numeric_match)
    result = wrapper.step([log] * 4, [{"answer": "x**2 + 1"}] * 4)
    assert np.isnan(np.asarray(result.rewards)).all()


def nameless(prompt: str, response: str) -> float:
    return 1 / 0


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (nameless, r"'nameless' raised ZeroDivisionError.*row 0 \(prompt 'q0'"),
    "nan": (lambda response: math.nan, "returned nan for row 0"),
    "inf": (lambda responses: [1.0, -math.inf], "returned -inf for row 1"),
    "huge": (lambda response: 10**400, "returned inf"),
    "text": (lambda response: "good", "returned str 'good'"),
    "list for a row": (lambda response: [1.0, 0.0], "takes one row at a time"),
    "short": (lambda responses: [1.0], "got 1 for 2 responses"),
    "long": (lambda responses: [1.0] * 3, "got 3 for 2 responses"),
    "number for a batch": (lambda responses: 1.0, "must return a list of 2 rewards"),
    "text for a batch": (lambda responses: "ab", "must return a list"),
    "empty mapping": (lambda response: {}, "empty mapping"),
    "nan in mapping": (lambda response: {"a": math.nan}, "returned nan as 'a'"),
    "short column": (lambda responses: {"a": [1]}, "got 1 as 'a' for 2"),
    "other names": (
        lambda prompt, response: {prompt: 1.0},
        r"must return the same names for every row: got \['q1'\]",
    ),
    "two kinds": (
        lambda prompt, response: 1.0 if prompt == "q0" else {"a": 1.0},
        "numbers for some rows and mappings",
    ),
    "missing column": (
        lambda response, solution: 0,
        r"asks for the column 'solution'.*its columns are \['answer'\]",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_mistakes_are_named(kind: str) -> None:
    fn, message = WRONG[kind]
    with pytest.raises(RewardError, match=message) as caught:
        score(fn, "a", "b", answer=["x", "y"])
    assert isinstance(caught.value, UserError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_the_cause_and_its_place_are_kept() -> None:
    with pytest.raises(
        RewardCallError, match=r"test_functional_reward\.py:\d+"
    ) as caught:
        score(nameless, "a")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_wrong_batches_are_named() -> None:
    wrapper = FunctionalRewardWrapper(lambda response: 0)
    with pytest.raises(MessageLogError, match="got 1 for 2"):
        wrapper.step(batch_of("a", "b")[0], [None])
    with pytest.raises(MessageLogError, match=r"\[0\] must hold an assistant message"):
        wrapper.step([[{"role": "user", "content": "x"}]], [None])
    with pytest.raises(MessageLogError, match="content must be text: got int"):
        wrapper.step([[{"role": "assistant", "content": 3}]], [None])
    with pytest.raises(MessageLogError, match=r"metadata\[0\] must be a mapping"):
        wrapper.step(batch_of("a")[0], [3])


# Asynchronous functions


def test_async_calls_run_together_and_are_bounded() -> None:
    running = most = 0

    async def fn(response: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    wrapper = FunctionalRewardWrapper(fn, max_concurrency=3)
    rewards = wrapper.step(*batch_of(*"abcdefgh")).rewards
    assert isinstance(rewards, torch.Tensor)
    assert rewards.tolist() == [1.0] * 8
    assert most == 3


class InTurn:
    """Scores each response with its number; calls finish in the order of `order`."""

    def __init__(self, order: Sequence[int], *, named: bool) -> None:
        self._order, self._named, self.ended = list(order), named, list[int]()

    async def __call__(self, response: str) -> float | dict[str, float] | None:
        number = int(response)
        while self._order[len(self.ended)] != number:
            await asyncio.sleep(0)
        self.ended.append(number)
        if number == 2:
            return None
        return {"number": number, "half": number / 2} if self._named else number


ORDERS = ([4, 3, 2, 1, 0], [1, 0, 3, 2, 4], [2, 4, 1, 3, 0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_async_rewards_are_in_the_order_of_rows_not_of_completion(
    order: list[int], inside_a_loop: bool
) -> None:
    def rewards_of(fn: Any) -> Any:
        step = FunctionalRewardWrapper(fn).step
        rows = batch_of(*"01234")
        if not inside_a_loop:
            return step(*rows).rewards

        async def main() -> Any:
            return step(*rows).rewards

        return asyncio.run(main())

    def listed(column: torch.Tensor) -> list[float]:
        return column.nan_to_num(nan=-1.0).tolist()

    plain = InTurn(order, named=False)
    assert listed(rewards_of(plain)) == [0, 1, -1, 3, 4]
    assert plain.ended == order
    named = rewards_of(InTurn(order, named=True))
    assert listed(named["reward/number"]) == [0, 1, -1, 3, 4]
    assert listed(named["reward/half"]) == [0, 0.5, -1, 1.5, 2]
    # The functions of a list finish in different orders.
    several = rewards_of([(InTurn(each, named=False), 1.0) for each in ORDERS])
    assert len(several) == 3
    for column in several.values():
        assert listed(column) == [0, 1, -1, 3, 4]
    combined = combine_reward_functions(
        [(InTurn(order, named=False), 1.0), (lambda response: 10 * int(response), 1.0)]
    )
    assert listed(rewards_of(combined)) == [0, 5.5, 20, 16.5, 22]


def test_async_functions_work_inside_a_running_loop() -> None:
    async def main() -> Any:
        return score(slow_length, "a", "bb")

    assert asyncio.run(main()).tolist() == [1, 2]


async def failing(response: str) -> float:
    if response == "b":
        raise KeyError("no such thing")
    await asyncio.Event().wait()
    return 0.0


def test_an_async_failure_ends_the_others() -> None:
    with pytest.raises(RewardCallError, match=r"raised KeyError.*row 1"):
        score(failing, "a", "b")

    async def main() -> Any:
        return score(failing, "a", "b")

    with pytest.raises(RewardCallError, match=r"raised KeyError.*row 1"):
        asyncio.run(main())


def test_async_calls_have_a_deadline() -> None:
    wrapper = FunctionalRewardWrapper(failing, "judge", deadline_s=0.05)
    with pytest.raises(RewardCallError, match=r"'judge' did not finish within 0\.05 s"):
        wrapper.step(*batch_of("a"))


# The dry call


def test_a_dry_call_shows_mistakes_before_a_run() -> None:
    sample = {"prompt": "1+1=", "answer": "2"}
    assert check_reward_fn(lambda prompt, response: response == "2", sample) == 1.0
    assert check_reward_fn(lambda response, answer: answer == "2", sample) == 1.0
    assert (
        check_reward_fn(lambda responses, answer: [0.5] * len(responses), sample) == 0.5
    )
    assert check_reward_fn(slow_length, sample, response="four") == 4.0
    assert check_reward_fn(lambda response: None, sample) is None
    assert check_reward_fn(lambda response: {"a": 1}, sample) == {"a": 1.0}
    with pytest.raises(RewardError, match="asks for the column 'solution'"):
        check_reward_fn(lambda response, solution: 0, sample)
    with pytest.raises(RewardValueError, match="got 1 for 2 responses"):
        check_reward_fn(lambda prompts, responses: [1.0], sample)
    with pytest.raises(RewardCallError, match="ZeroDivisionError"):
        check_reward_fn(nameless, sample)
