"""Self-play in TextArena: the real package, and a policy behind an address."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from judge_server import JudgeServer, judge_server

from rl_distributed.errors import ConfigError
from rl_envs import create_env
from rl_envs.agents.tasks import AgentJob, AgentResult
from rl_envs.bridges.textarena import (
    SelfPlayConfig,
    TextArenaSelfPlay,
    TextArenaTasks as Tasks,
)
from rl_envs.bridges.textarena.self_play import OTHER_PLAYER

DEADLINE_S = 60.0
RULE = "Answer each observation with one action, as <move>...</move>."


def play(
    rows: list[dict[str, Any]],
    reply: Callable[[str], str],
    *,
    system: str | None = None,
    **settings: Any,
) -> tuple[list[AgentResult], JudgeServer]:
    """Play each row's game with a policy that answers its newest message."""
    rules = [] if system is None else [{"role": "system", "content": system}]
    environment = TextArenaSelfPlay(SelfPlayConfig(**settings))
    with judge_server(reply) as server:
        jobs = [
            AgentJob(
                number,
                [*rules, {"role": "user", "content": row["prompt"]}],
                row,
                server.address,
                f"key{number}",
            )
            for number, row in enumerate(rows)
        ]
        found: dict[int, AgentResult] = {}
        end_s = time.monotonic() + DEADLINE_S
        try:
            poll = environment.poll_agents(jobs, [], 0.0)
            while True:
                found |= {result.number: result for result in poll.results}
                if len(found) == len(rows) or time.monotonic() > end_s:
                    break
                poll = environment.poll_agents([], [], 0.1)
        finally:
            environment.shutdown()
    return [found[number] for number in range(len(rows))], server


def moves(*actions: str) -> Callable[[str], str]:
    given = iter(actions)
    return lambda question: f"I see.\n<move>{next(given)}</move>"


def first(game: str = "TicTacToe-v0", **settings: Any) -> dict[str, Any]:
    return Tasks(game, **settings).train(1)[0]


def test_each_player_is_told_its_own_and_earns_its_own() -> None:
    # Player 0 takes a column of the board, player 1 the squares beside it.
    [result], server = play([first()], moves("0", "1", "3", "4", "6"))
    reward = result.reward
    assert (result.ending, result.error) == ("done", "")
    assert reward is not None
    assert reward.reward == 1.0
    assert reward.conversations == {OTHER_PLAYER: -1.0}
    assert reward.parts == {
        "player_0": 1.0, "player_1": -1.0, "solved": 1.0, "illegal_end": 0.0,
        "out_of_turns": 0.0, "turns": 5.0, "illegal": 0.0,
    }  # fmt: skip
    named = [one.get("X-RL-Conversation") for one in server.headers]
    assert named == [None, OTHER_PLAYER, None, OTHER_PLAYER, None]
    mine, other = server.requests[4]["messages"], server.requests[3]["messages"]
    assert [message["role"] for message in mine] == ["user", "assistant"] * 2 + ["user"]
    assert mine[0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
    assert mine[0]["content"].endswith(RULE)
    assert other[0]["content"].startswith("You are Player 1 in Tic Tac Toe.")
    assert other[0]["content"].endswith(RULE)
    # Each sees the other's action, but not the reasoning behind it.
    assert "[Player 0]" in other[0]["content"]
    assert "[Player 1]" in mine[2]["content"]
    assert not any("I see" in m["content"] for m in mine + other if m["role"] == "user")
    # Conversations are only ever appended to, so that their tokens are one row.
    assert server.requests[2]["messages"] == mine[:3]
    assert set(server.keys) == {"Bearer key0"}


def test_the_row_may_be_for_the_second_player() -> None:
    row = first(begins="opponent")
    assert row["ta_player"] == 1
    opening = int(row["ta_opening"][0].strip("[]"))
    free = [str(cell) for cell in range(9) if cell != opening]
    taken = {opening}

    def reply(question: str) -> str:
        cell = next(int(c) for c in free if int(c) not in taken)
        taken.add(cell)
        return f"<move>{cell}</move>"

    [result], server = play([row], reply, system="Play fair.")
    reward = result.reward
    assert reward is not None
    assert reward.reward == reward.parts["player_1"]
    assert reward.conversations == {OTHER_PLAYER: reward.parts["player_0"]}
    # The policy did not make the opening move; player 0 is only reminded of it.
    assert "X-RL-Conversation" not in server.headers[0]
    for request in server.requests[:2]:
        system, told = request["messages"]
        assert system == {"role": "system", "content": "Play fair."}
        assert RULE in told["content"]
    assert server.requests[1]["messages"][1]["content"].startswith("You are Player 0")


def test_illegal_moves_count_against_the_one_that_makes_them() -> None:
    [result], _ = play([first()], moves("0", "0", "0"))
    reward = result.reward
    assert reward is not None
    assert (reward.reward, reward.conversations) == (1.0, {OTHER_PLAYER: -1.0})
    assert (reward.parts["illegal"], reward.parts["illegal_end"]) == (2.0, 1.0)
    # A limit of its own ends the game without a reward for either.
    [result], _ = play([first()], moves("0", "0"), max_illegal=1)
    reward = result.reward
    assert reward is not None
    assert (reward.reward, reward.conversations) == (0.0, {OTHER_PLAYER: 0.0})
    assert (reward.parts["illegal"], reward.parts["illegal_end"]) == (1.0, 1.0)


def test_a_player_that_has_not_moved_earns_nothing() -> None:
    [result], _ = play([first()], moves("99", "99"))
    reward = result.reward
    assert reward is not None
    assert (reward.reward, reward.conversations) == (-1.0, {})


def test_a_game_without_end_has_a_limit() -> None:
    game = first("IteratedPrisonersDilemma-v0")
    [result], server = play([game], lambda question: "[cooperate]", max_turns=2)
    reward = result.reward
    assert reward is not None
    assert (reward.reward, reward.conversations) == (0.0, {OTHER_PLAYER: 0.0})
    assert (reward.parts["out_of_turns"], len(server.requests)) == (1.0, 4)


def test_credit_for_solved_games_alone() -> None:
    script = ("0", "1", "3", "4", "6")
    [result], _ = play([first()], moves(*script), credit="solved")
    reward = result.reward
    assert reward is not None
    assert (reward.reward, reward.conversations) == (1.0, {OTHER_PLAYER: 0.0})
    [result], _ = play([first()], moves(*script), credit="solved", solved_reward=2)
    assert result.reward is not None
    assert (result.reward.reward, result.reward.parts["solved"]) == (0.0, 0.0)


def test_many_games_at_once() -> None:
    rows = Tasks("Nim-v0", settings={"piles": [2, 3]}, begins="drawn").train(12)
    calls, together = itertools.count(), threading.Barrier(4, timeout=DEADLINE_S)

    def reply(question: str) -> str:
        if next(calls) < 4:
            together.wait()
        piles = dict(
            line.strip().removeprefix("pile ").split(": ")
            for line in question.splitlines()
            if line.strip().startswith("pile ")
        )
        return next(f"<move>[{p} 1]</move>" for p, left in piles.items() if left != "0")

    results, server = play(rows, reply, max_at_once=4)
    assert {result.ending for result in results} == {"done"}
    for row, result in zip(rows, results, strict=True):
        assert result.reward is not None
        # One match per remaining move after the opening: the last one wins.
        opening = [int(move.strip("[]").split()[1]) for move in row["ta_opening"]]
        wins = (5 - sum(opening)) % 2 == 1
        assert result.reward.reward == (1.0 if wins else -1.0)
        other = {OTHER_PLAYER: -result.reward.reward}
        assert result.reward.conversations == other
    assert {row["ta_player"] for row in rows} == {0, 1}
    assert server.most_at_once == 4


def test_wrong_rows_and_settings() -> None:
    environment = create_env("textarena_self_play", {"max_turns": 9})
    assert isinstance(environment, TextArenaSelfPlay)
    copied = pickle.loads(pickle.dumps(environment))
    assert copied.agent_limits == replace(environment.agent_limits)
    good, alone = first(), first("Sudoku-v0")
    unusable = environment.unusable_rows([good, alone, {}, {**good, "ta_start": "x"}])
    assert sorted(unusable) == [1, 2, 3]
    assert "needs a game for two: 'Sudoku-v0' is for 1" in unusable[1]
    assert "must have the columns ta_game" in unusable[2]
    assert "starts otherwise with the seed" in unusable[3]
    with pytest.raises(ConfigError, match="at least twice max_turns"):
        create_env("textarena_self_play", {"max_turns": 65})
