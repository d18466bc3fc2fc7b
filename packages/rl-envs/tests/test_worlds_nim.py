"""The world `nim`: winners, and the opponent's moves."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs import MessageLogError, TaskError
from rl_envs.worlds.game import Playthrough, played
from rl_envs.worlds.nim import NimConfig, NimEnvironment, NimTasks
from rl_envs.worlds.nim.solver import (
    after_move,
    best_move,
    is_won,
    legal_moves,
    random_move,
)

heaps_of = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@cache
def minimax(heaps: tuple[int, ...], misere: bool) -> bool:
    """Return whether the player to move wins, by exhaustive search."""
    if not any(heaps):
        return misere
    return any(
        not minimax(tuple(sorted(after)), misere)
        for place, size in enumerate(heaps)
        for after in (
            (*heaps[:place], left, *heaps[place + 1 :]) for left in range(size)
        )
    )


@given(heaps_of, st.booleans())
@settings(deadline=None)
def test_the_winner_is_the_one_that_minimax_finds(
    heaps: list[int], misere: bool
) -> None:
    won = minimax(tuple(sorted(heaps)), misere)
    assert is_won(heaps, misere=misere) == won
    if not any(heaps):
        return
    after = after_move(heaps, best_move(heaps, misere=misere))
    assert sum(after) < sum(heaps)
    assert min(after) >= 0
    # A winning position is never given away.
    assert minimax(tuple(sorted(after)), misere) == (not won)


@given(heaps_of.filter(any), st.integers(0, 2**31))
def test_random_moves_are_legal_and_repeat(heaps: list[int], seed: int) -> None:
    move = random_move(heaps, seed=seed)
    assert move in legal_moves(heaps)
    assert move == random_move(list(heaps), seed=seed)


def test_random_moves_are_all_possible_ones() -> None:
    heaps = [2, 1]
    drawn = [random_move(heaps, seed=seed) for seed in range(600)]
    for move in legal_moves(heaps):
        assert drawn.count(move) == pytest.approx(200, abs=50)


def play(row: dict[str, Any], *said: str, **config: Any) -> Playthrough:
    responses = iter(said)
    return played(
        NimEnvironment(NimConfig(**config)),
        {"prompt": "?", "style": "compact", **row},
        lambda _: next(responses, "?"),
    )


@given(st.integers(0, 999), st.booleans(), st.sampled_from(["perfect", "random"]))
@settings(max_examples=30, deadline=None)
def test_the_perfect_player_beats_any_opponent(
    seed: int, misere: bool, opponent: str
) -> None:
    source = NimTasks(misere=misere, seed=seed)
    environment = NimEnvironment(NimConfig.from_dict({"opponent": opponent}))
    for row in source.train(3):
        game = played(environment, row, source.perfect)
        assert (game.reward, game.outcome) == (1.0, "solved")
        assert row["answer"] == game.messages[1]["content"]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_perfect_opponent_wins_what_can_be_won(
    heaps: list[int], misere: bool
) -> None:
    if is_won(heaps, misere=misere):
        heaps = after_move(heaps, best_move(heaps, misere=misere))
    if not any(heaps):
        return
    row = {"heaps": heaps, "misere": misere}
    game = played(
        NimEnvironment(),
        {"prompt": "?", **row},
        lambda columns: random_move(columns.get("game", columns)["heaps"], seed=5).text,
    )
    assert (game.reward, game.outcome) == (0.0, "lost")


def test_the_last_to_take_wins_or_loses() -> None:
    assert play({"heaps": [2]}, "A2").outcome == "solved"
    assert play({"heaps": [2], "misere": True}, "A2").outcome == "lost"
    game = play({"heaps": [2], "misere": True}, "A1")
    assert game.outcome == "solved"
    assert game.columns["game"]["heaps"] == [0]
    assert play({"heaps": [2]}, "a 1").outcome == "lost"


def test_illegal_moves_are_answered_and_change_nothing() -> None:
    game = play({"heaps": [3, 1]}, "A4", "C1", "B0", max_illegal=3)
    assert [m["content"] for m in game.messages[2::2]] == ["!3,1>", "!3,1>"]
    assert game.outcome == "illegal"
    assert game.columns["game"]["heaps"] == [3, 1]
    words = play({"heaps": [3, 1], "style": "words"}, "A9", "take it", "A2", "A1")
    assert [m["content"] for m in words.messages[2::2]] == [
        "A9 is not possible.\nA: 3, B: 1",
        "That is no move: name a heap and a number, such as A1.\nA: 3, B: 1",
        "I take 1 from A.\nA: 0, B: 1",
    ]


def test_the_seed_decides_how_a_random_opponent_plays() -> None:
    def replies(seed: int) -> str:
        row = {"heaps": [9, 9, 9], "opponent_seed": seed}
        game = play(row, "A1", "B1", opponent="random", max_illegal=1)
        return game.messages[2]["content"]

    assert replies(1) == replies(1)
    assert len({replies(seed) for seed in range(12)}) > 4


def test_wrong_settings_and_rows_are_named() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_heaps": 9}, "must be 1 to 8"),
        ({"max_heap": 0}, "must be 1 to 999"),
        ({"style": "long"}, "'compact' or 'words'"),
    )
    for settings_, message in wrong:
        with pytest.raises(TaskError, match=message):
            NimTasks(**settings_)
    with pytest.raises(TaskError, match="raise max_heap"):
        NimTasks(2, max_heap=1).train(1)
    for row, message in (
        ({"heaps": []}, "'heaps', a list of one to 8"),
        ({"heaps": [0, 0]}, "not all 0"),
        ({"heaps": [True]}, "whole numbers"),
        ({"heaps": [3], "misere": 1}, "'misere' must be true or false"),
        ({"heaps": [3], "opponent_seed": "x"}, "'opponent_seed' a whole number"),
    ):
        with pytest.raises(MessageLogError, match=message):
            play(row, "A1")
