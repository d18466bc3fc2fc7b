"""The world `mastermind`: feedback, consistent guesses, and rewards."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs import MessageLogError, TaskError
from rl_envs.worlds.game import Playthrough, played
from rl_envs.worlds.mastermind import (
    MastermindConfig,
    MastermindEnvironment,
    MastermindTasks,
)
from rl_envs.worlds.mastermind.solver import (
    Feedback,
    consistent_codes,
    feedback_of,
    next_guess,
)

codes = st.text("123", min_size=3, max_size=3)


def by_crossing_out(guess: str, secret: str) -> tuple[int, int]:
    """Compare as people do: cross out pairs, those in place first."""
    left = [(a, b) for a, b in zip(guess, secret, strict=True) if a != b]
    rest = [b for _, b in left]
    misplaced = 0
    for symbol, _ in left:
        if symbol in rest:
            rest.remove(symbol)
            misplaced += 1
    return len(guess) - len(left), misplaced


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(*[st.text("1234", min_size=n, max_size=n)] * 2)
    )
)
def test_feedback_is_what_crossing_out_finds(pair: tuple[str, str]) -> None:
    guess, secret = pair
    assert feedback_of(guess, secret) == by_crossing_out(guess, secret)
    assert feedback_of(guess, secret) == feedback_of(secret, guess)
    assert (feedback_of(guess, secret).exact == len(secret)) == (guess == secret)


def test_a_symbol_counts_once() -> None:
    assert feedback_of("1122", "1234") == Feedback(1, 1)
    assert feedback_of("1111", "1222") == Feedback(1, 0)
    assert feedback_of("4321", "1234") == Feedback(0, 4)


@given(codes, st.lists(codes, max_size=4))
@settings(deadline=None)
def test_guesses_are_consistent_and_leave_fewest_in_the_worst_case(
    secret: str, guesses: list[str]
) -> None:
    history = [(guess, feedback_of(guess, secret)) for guess in guesses]
    possible = [
        "".join(code)
        for code in product("123", repeat=3)
        if all(by_crossing_out(g, "".join(code)) == told for g, told in history)
    ]
    assert consistent_codes(history, 3, 3) == possible
    assert secret in possible

    def worst(guess: str) -> int:
        told = [by_crossing_out(guess, code) for code in possible]
        return max(told.count(kind) for kind in told)

    chosen = next_guess(history, 3, 3)
    assert chosen in possible
    assert worst(chosen) == min(worst(code) for code in possible)


def test_a_history_of_no_secret_is_an_error() -> None:
    history = [
        ("111", Feedback(0, 0)),
        ("222", Feedback(0, 0)),
        ("333", Feedback(0, 0)),
    ]
    with pytest.raises(ValueError, match="no code of 3 symbols"):
        next_guess(history, 3, 3)


def play(secret: str, *said: str, **config: Any) -> Playthrough:
    responses = iter(said)
    row = {"prompt": "?", "secret": secret, "num_symbols": 6, "style": "compact"}
    return played(
        MastermindEnvironment(MastermindConfig(**config)),
        row,
        lambda _: next(responses, "?"),
    )


def test_the_solver_finds_every_secret_of_the_classic_game_in_time() -> None:
    source = MastermindTasks()
    rows = source.train(60)
    turns = [played(MastermindEnvironment(), row, source.consistent) for row in rows]
    assert {game.outcome for game in turns} == {"solved"}
    assert max(game.columns["game"]["turns"] for game in turns) <= 7


def test_a_game() -> None:
    game = play("3152", "1122", "3 1 5 2")
    assert [m["content"] for m in game.messages[1:]] == ["1122", "2,0>", "3 1 5 2"]
    assert game.reward == 1.0
    assert game.columns["game"]["guesses"] == [["1122", 2, 0], ["3152", 4, 0]]


def test_early_solutions_are_worth_more() -> None:
    rewards = [
        play("3152", *["1111"] * wrong, "3152", credit="early", max_turns=5).reward
        for wrong in range(5)
    ]
    assert rewards == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_illegal_guesses_are_answered_and_tell_nothing() -> None:
    game = play("3152", "315", "3157", "31522")
    assert [m["content"] for m in game.messages[2::2]] == ["!>", "!>"]
    assert game.columns["game"]["guesses"] == []
    assert game.outcome == "illegal"
    assert play("3152", *["1111"] * 9, "3152").outcome == "solved"
    assert play("3152", *["1111"] * 10, "3152").outcome == "out_of_turns"


def test_words_say_what_is_wrong() -> None:
    source = MastermindTasks(style="words")
    (row,) = source.train(1)
    said = iter(["7777", "<move>" + row["secret"][::-1] + "</move>"])
    game = played(
        MastermindEnvironment(),
        row,
        lambda columns: next(said, None) or source.consistent(columns),
    )
    assert game.messages[2]["content"] == (
        "A guess has 4 digits from 1 to 6, such as 1111."
    )
    assert game.outcome == "solved"
    assert all(row["secret"] not in m["content"] for m in game.messages[::2])


def test_samples_hold_different_secrets_though_prompts_are_the_same() -> None:
    rows = MastermindTasks().train(50)
    assert len({row["secret"] for row in rows}) == 50
    assert len({row["prompt"] for row in rows}) == 1


def test_wrong_settings_and_rows_are_named() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"length": 1}, "at least 2"),
        ({"num_symbols": 10}, "2 to 9"),
        ({"length": 5, "num_symbols": 9}, r"9 \*\* 5; lower one"),
        ({"style": "long"}, "'compact' or 'words'"),
    )
    for settings_, message in wrong:
        with pytest.raises(TaskError, match=message):
            MastermindTasks(**settings_)
    for secret in ("7111", "1", "", "1" * 9, 1234):
        with pytest.raises(MessageLogError, match="must have the columns"):
            play(secret, "1111")  # type: ignore[arg-type]
