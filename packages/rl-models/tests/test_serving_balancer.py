"""What a request costs, and which replica gets it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_models.serving.balancer import Balancer, Endpoint, estimated_tokens

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (TEXT, {"prompt": [1, 2, 3], "max_tokens": 10}, 13),
        (TEXT, {"prompt": [[1, 2], [3]], "max_tokens": 10}, 23),
        (TEXT, {"prompt": [[1, 2], [3]], "max_tokens": 10, "n": 2}, 43),
        (TEXT, {"prompt": "x" * 8}, 3 + 16),
        (TEXT, {"prompt": ["x" * 8, ""]}, 4 + 32),
        (CHAT, {"messages": [{"content": "x" * 8}], "max_tokens": 1}, 4),
        (CHAT, {"messages": [{"content": [{"text": "x" * 8}]}]}, 3 + 256),
        (CHAT, {"messages": [], "max_completion_tokens": 7, "max_tokens": 1}, 7),
        (TEXT, {"prompt": None, "max_tokens": "many", "n": -1}, 16),
        ("/tokenize", {}, 257),
    ],
)
def test_requests_count_by_prompt_and_longest_answer(
    path: str, body: dict[str, Any], tokens: int
) -> None:
    assert estimated_tokens(path, body) == tokens


def test_load_spreads_and_comes_to_nothing() -> None:
    async def test() -> None:
        balancer = Balancer()
        ends = [Endpoint(number, "") for number in range(3)]
        for end in ends:
            await balancer.put(end)
        with balancer.load(ends[0], 5), balancer.load(ends[2], 5):
            assert balancer.choose() is ends[1]
            with balancer.load(ends[1], 9):
                # Equal loads: the one given less so far, then the lower number.
                assert balancer.choose() is ends[0]
                assert balancer.choose([ends[0]]) is ends[2]
                assert balancer.num_requests == 3
        assert [end.num_tokens for end in ends] == [0, 0, 0]
        # All have served one request.
        assert balancer.choose() is ends[0]
        assert balancer.choose(ends) is ends[0]

    asyncio.run(test())


def test_a_replica_that_was_replaced_is_not_taken_out_again() -> None:
    async def test() -> None:
        balancer = Balancer()
        old, new = Endpoint(0, "old"), Endpoint(0, "new")
        await balancer.put(old)
        assert balancer.take_out(old)
        await balancer.put(new)
        assert not balancer.take_out(old)
        assert balancer.endpoints == [new]

    asyncio.run(test())
