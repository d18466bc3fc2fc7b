from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_envs import (
    FunctionalRewardWrapper,
    GroupRewardWrapper,
    RewardError,
    RewardList,
    as_environment,
    check_environment,
    check_reward_fn,
    exact_match,
)
from rl_envs.errors import RewardCallError, RewardValueError


def short(responses: list[str]) -> list[float]:
    return [1.0 / len(response) for response in responses]


async def even(response: str) -> float | None:
    return float(int(response) % 2 == 0) if response.isdigit() else None


def several(completions: Any, **kwargs: Any) -> dict[str, list[float | None]]:
    return {
        "a": [1.0 for _ in completions],
        "b": [None if i else 2.0 for i, _ in enumerate(completions)],
    }


def logs_of(*responses: str) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": response},
        ]
        for response in responses
    ]


def rewards_of(given: Any, *responses: str) -> dict[str, list[float]]:
    environment = FunctionalRewardWrapper(given)
    rows = [{"answer": "2"}] * len(responses)
    rewards = environment.step(logs_of(*responses), rows).rewards
    assert isinstance(rewards, dict)
    return {name: column.tolist() for name, column in rewards.items()}


def test_each_function_gives_a_reward_by_its_name() -> None:
    rewards = rewards_of([exact_match, (short, 0.5), (even, -1.0)], "2", "four")
    assert rewards["reward/exact_match"] == [1.0, 0.0]
    assert rewards["reward/short"] == [0.5, 0.125]
    assert rewards["reward/even"][0] == -1.0
    assert math.isnan(rewards["reward/even"][1])
    assert rewards_of({exact_match: 2.0}, "2") == {"reward/exact_match": [2.0]}


def test_functions_of_one_name_and_of_several_rewards() -> None:
    rewards = rewards_of([short, (short, 2.0), several], "22", "2")
    assert list(rewards) == [
        "reward/short",
        "reward/short_2",
        "reward/several.a",
        "reward/several.b",
    ]
    assert rewards["reward/short_2"] == [1.0, 2.0]
    assert rewards["reward/several.b"][0] == 2.0
    assert math.isnan(rewards["reward/several.b"][1])
    weighted = rewards_of([(several, 0.5), short], "2")
    assert weighted["reward/several.a"] == [0.5]
    assert weighted["reward/several.b"] == [1.0]


def test_a_row_that_nothing_scores_is_not_scored() -> None:
    environment = FunctionalRewardWrapper([even])
    logs = logs_of("x", "y")
    logs[1][0]["content"] = "another prompt"
    with pytest.raises(RewardValueError, match="returned None for all 2"):
        environment.step(logs, [None] * 2)
    check_environment(
        as_environment([even]), logs_of("2", "x"), [{}, {}], allow_unscored=True
    )


def test_mistakes_are_named() -> None:
    for given, message in (
        ([], "at least one: got an empty list"),
        ([(short, math.nan)], "weight of reward function 'short' must be a finite"),
        ([(short, "much")], "must be a finite number: got 'much'"),
        ([3], "must be callable: got int"),
    ):
        with pytest.raises(RewardError, match=message):
            RewardList(given)  # type: ignore[arg-type]

    def mixed(responses: list[str]) -> list[Any]:
        return [1.0, {"a": 1.0}]

    with pytest.raises(RewardValueError, match="numbers for some rows and mappings"):
        rewards_of([mixed], "1", "2")


def test_the_dry_call_takes_lists() -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    assert check_reward_fn([exact_match, (short, 0.5)], row) == {
        "exact_match": 1.0,
        "short": 0.5,
    }

    def broken(response: str) -> float:
        raise KeyError("oh")

    with pytest.raises(RewardCallError, match="'broken' raised KeyError: 'oh'"):
        check_reward_fn([short, broken], row)


def test_names_that_differ_say_what_to_do() -> None:
    def fn(responses: list[str]) -> list[dict[str, float]]:
        return [{"a": 1.0}, {"b": 1.0}]

    with pytest.raises(RewardValueError, match="give None for a reward that does not"):
        FunctionalRewardWrapper(fn).step(logs_of("1", "2"), [None] * 2)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1="},
]


def trl(prompts, completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    assert prompts[0] == CHAT
    return [
        float(messages[0]["content"] == right)
        for messages, right in zip(completions, answer, strict=True)
    ]


def annotated(completions: list[list[dict[str, str]]]) -> list[float]:
    return [float(len(messages[-1]["content"])) for messages in completions]


def one_row(prompt: str, completion: list[dict[str, str]]) -> float:
    return float(completion[-1]["role"] == "assistant" and prompt.endswith("1+1="))


def test_messages_where_the_prompts_are_messages() -> None:
    row = {"prompt": CHAT, "answer": "2"}
    assert check_reward_fn(trl, row) == 1.0
    log = [*CHAT, {"role": "assistant", "content": "2"}]
    environment = FunctionalRewardWrapper(trl)
    rewards = environment.step([log, log], [row, row]).rewards
    assert isinstance(rewards, torch.Tensor)
    assert rewards.tolist() == [1.0, 1.0]


def test_text_where_the_prompts_are_text() -> None:
    def plain(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
        assert prompts[0] == "1+1="
        return [float(text == "2") for text in completions]

    assert check_reward_fn(plain, {"prompt": "1+1=", "answer": "2"}) == 1.0


def test_an_annotation_decides() -> None:
    assert check_reward_fn(annotated, {"prompt": "1+1=", "answer": "22"}) == 2.0
    assert check_reward_fn(one_row, {"prompt": "1+1=", "answer": "2"}) == 1.0

    def text(completions: list[str]) -> list[float]:
        return [float(completion == "2") for completion in completions]

    assert check_reward_fn(text, {"prompt": CHAT, "answer": "2"}) == 1.0


def test_completions_of_several_turns_begin_after_the_prompt() -> None:
    turns = [
        *CHAT,
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]

    def roles(completions, **kwargs):  # type: ignore[no-untyped-def]
        return [float(len(messages)) for messages in completions]

    row = {"prompt": CHAT, "num_prompt_messages": 2}
    rewards = FunctionalRewardWrapper(roles).step([turns], [row]).rewards
    assert float(rewards[0]) == 3.0  # type: ignore[index]


def test_what_only_trl_passes() -> None:
    def fn(completions: list[str], completion_ids: list[int]) -> list[float]:
        return []

    with pytest.raises(RewardError, match="passed by TRL only: give the parameter a"):
        check_reward_fn(fn, {"prompt": "1+1="})


def best_of(responses: list[str], answer: list[str]) -> list[float | None]:
    assert len(set(answer)) == 1
    longest = max(responses, key=len)
    return [None if r == "?" else float(r == longest) for r in responses]


def test_groups_are_scored_together() -> None:
    environment = GroupRewardWrapper(best_of)
    result = environment.step(logs_of("1", "22"), [{"answer": "2"}] * 2)
    assert float(result.rewards.sum()) == 0.0  # type: ignore[union-attr]
    assert result.terminateds.tolist() == [True, True]
    scores = environment.score_groups(
        [logs_of("1", "22"), logs_of("333", "?")],
        [[{"answer": "2"}] * 2, [{"answer": "3"}] * 2],
    )
    assert scores is not None
    first, second = scores
    assert isinstance(first, torch.Tensor)
    assert first.tolist() == [0.0, 1.0]
    assert isinstance(second, torch.Tensor)
    assert second.isnan().tolist() == [False, True]
    check_environment(environment)
    both = GroupRewardWrapper(best_of, exact_match)
    plain = both.step(logs_of("2"), [{"answer": "2"}])
    assert float(plain.rewards[0]) == 1.0  # type: ignore[index]
    assert both.tool_schemas() == []
    both.shutdown()
