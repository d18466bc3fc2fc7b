"""Behaviour shared by all games: limits, outcomes, and state in the row."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from rl_distributed.errors import ConfigError
from rl_envs import MessageLogError, RemoteEnvironment, TaskSource, check_environment
from rl_envs.registry import create_env, create_task_source, env_registry, task_registry
from rl_envs.worlds.game import GAME_KEY, GameEnvironment, played, said_move

Player = Callable[[Any], str]

WORLDS: dict[str, tuple[dict[str, Any], str]] = {
    "sliding_puzzle": ({"num_rows": 2, "num_columns": 3}, "shortest"),
    "mastermind": ({"length": 4, "num_symbols": 6}, "consistent"),
    "nim": ({"num_heaps": 3, "max_heap": 6}, "perfect"),
}
each_world = pytest.mark.parametrize("world", WORLDS)
each_style = pytest.mark.parametrize("style", ["compact", "words"])


def tasks_of(world: str, **settings: Any) -> tuple[TaskSource, Player]:
    arguments, player = WORLDS[world]
    source = create_task_source(world, {**arguments, **settings})
    return source, getattr(source, player)


def mean_reward(world: str, rows: list[dict[str, Any]], player: Player) -> float:
    environment = create_env(world, {"max_turns": 25})
    return sum(played(environment, row, player).reward for row in rows) / len(rows)


@each_world
@each_style
def test_the_solver_has_full_reward(world: str, style: str) -> None:
    source, player = tasks_of(world, style=style)
    for row in source.train(12):
        game = played(create_env(world, {"max_turns": 25}), row, player)
        assert game.reward == 1.0
        assert game.outcome == "solved"
        assert game.columns[GAME_KEY]["illegal"] == 0


@each_world
def test_a_random_player_does_not(world: str) -> None:
    source, _ = tasks_of(world)
    characters = sorted(set(source.alphabet))
    rng = random.Random(0)

    def at_random(columns: Any) -> str:
        return "".join(rng.choices(characters, k=rng.randint(1, 3)))

    assert mean_reward(world, source.train(40), at_random) < 0.1


@each_world
@each_style
@pytest.mark.parametrize("said", ["", "   ", "\n", "I do not know.", "\0\u2603" * 40])
def test_garbage_earns_nothing_and_ends_as_illegal(
    world: str, style: str, said: str
) -> None:
    source, _ = tasks_of(world, style=style)
    for row in source.train(4):
        game = played(create_env(world, {"max_illegal": 3}), row, lambda _: said)
        assert game.reward == 0.0
        assert game.outcome == "illegal"
        assert game.columns[GAME_KEY]["turns"] == 3


@each_world
@each_style
def test_copied_prompts_and_observations_earn_nothing(world: str, style: str) -> None:
    source, _ = tasks_of(world, style=style)
    environment = create_env(world)
    for row in source.train(10):
        log = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["prompt"]},
        ]
        first = environment.step([log], [row])
        log += [
            dict(first.observations[0]),
            {"role": "assistant", "content": first.observations[0]["content"]},
        ]
        second = environment.step([log], first.metadata)
        assert float(first.rewards[0]) == float(second.rewards[0]) == 0.0
        assert second.metadata[0][GAME_KEY]["illegal"] == 2


@each_world
def test_limits_end_a_game_with_their_outcome(world: str) -> None:
    source, _ = tasks_of(world)
    (row,) = source.train(1)
    environment = create_env(world, {"max_turns": 4, "max_illegal": None})
    game = played(environment, row, lambda _: "?")
    assert game.outcome == "out_of_turns"
    assert game.columns[GAME_KEY]["turns"] == 4
    with pytest.raises(ConfigError, match="max_turns"):
        create_env(world, {"max_turns": 0})


@each_world
def test_a_conversation_is_a_function_of_its_row(world: str) -> None:
    """Any order, any batch, through JSON, or replayed: the same answers."""
    source, player = tasks_of(world)
    rows = source.train(12)
    alone = [played(create_env(world), row, player) for row in rows]
    order = random.Random(3).sample(range(len(rows)), len(rows))
    environment = create_env(world)
    logs: dict[int, list[dict[str, str]]] = {
        i: [{"role": "user", "content": rows[i]["prompt"]}] for i in order
    }
    columns: dict[int, Any] = {i: rows[i] for i in order}
    active = order
    while active:
        for i in active:
            logs[i].append({"role": "assistant", "content": player(columns[i])})
        batch = [logs[i] for i in active], [columns[i] for i in active]
        environment.step(*batch)
        result = environment.step(*batch)
        for place, i in enumerate(active):
            columns[i] = json.loads(json.dumps(result.metadata[place]))
            if not result.terminateds[place]:
                logs[i].append(dict(result.observations[place]))
        ends = result.terminateds.tolist()
        active = [i for i, end in zip(active, ends, strict=True) if not end]
    assert [logs[i] for i in range(len(rows))] == [game.messages for game in alone]
    assert [columns[i] for i in range(len(rows))] == [game.columns for game in alone]


@each_world
def test_parts_share_no_canonical_form(world: str) -> None:
    source, _ = tasks_of(world)
    train = source.sample("train", 60, unique=False)
    held_out = source.sample("held_out", 20, unique=False)
    assert {source.key(t) for t in train}.isdisjoint(source.key(t) for t in held_out)
    assert source.train(5) == tasks_of(world)[0].train(5)
    for task in train:
        assert set(task.prompt) <= set(source.alphabet)


@each_world
def test_compact_conversations_use_the_alphabet_only(world: str) -> None:
    source, player = tasks_of(world)
    environment = create_env(world)
    for row in source.train(6):
        # The first response is empty, so that an error is shown too.
        game = played(environment, row, lambda c: player(c) if GAME_KEY in c else "")
        assert game.outcome == "solved"
        for message in game.messages:
            assert set(message["content"]) <= set(source.alphabet)


@each_world
@each_style
def test_they_fulfil_the_contract(world: str, style: str) -> None:
    assert issubclass(env_registry.get(world), GameEnvironment)
    assert task_registry.get(world) is type(tasks_of(world)[0])
    source, player = tasks_of(world, style=style)
    rows = source.train(4)
    said = [player(rows[0]), "", rows[2]["prompt"], player(rows[3])]
    logs = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": text},
        ]
        for row, text in zip(rows, said, strict=True)
    ]
    check_environment(create_env(world), logs, rows)


@each_world
def test_unusable_rows_and_foreign_columns_are_named(world: str) -> None:
    source, _ = tasks_of(world)
    (row,) = source.train(1)
    environment = create_env(world)
    assert list(environment.unusable_rows([row, {}, None])) == [1, 2]
    log = [{"role": "assistant", "content": "x"}]
    with pytest.raises(MessageLogError, match=r"metadata\[0\]\['game'\] must be the"):
        environment.step([log], [{**row, GAME_KEY: "chess"}])
    with pytest.raises(MessageLogError, match=r"metadata\[0\]"):
        environment.step([log], [{}])
    with pytest.raises(MessageLogError, match="'style'"):
        environment.step([log], [{**row, "style": "long"}])


@each_world
def test_metrics_count_outcomes(world: str) -> None:
    source, player = tasks_of(world)
    rows = source.train(4)
    environment = create_env(world)
    games = [played(environment, row, player) for row in rows[:3]]
    games.append(played(environment, rows[3], lambda _: "?"))
    batch = {
        "rewards": [game.reward for game in games],
        "metadata": [game.columns for game in games],
    }
    _, metrics = environment.global_post_process_and_metrics(batch)
    assert metrics["outcome/solved"] == metrics["accuracy"] == 0.75
    assert metrics["outcome/illegal"] == 0.25
    assert metrics["illegal_per_game"] == 0.75
    turns = [game.columns[GAME_KEY]["turns"] for game in games]
    assert metrics["turns_per_game"] == sum(turns) / 4
    assert "accuracy" not in environment.global_post_process_and_metrics({})[1]


def test_the_move_is_what_is_tagged_or_the_last_line() -> None:
    assert said_move("I try <move>U</move>, no: <move>L</move>.") == "L"
    assert said_move("<move> L") == "L"
    assert said_move("first U\n R \n\n") == "R"
    assert said_move("") == ""


@pytest.mark.slow
def test_processes_play_the_same_games() -> None:
    source, player = tasks_of("nim")
    rows = source.train(6)
    remote = RemoteEnvironment("nim", {"opponent": "random"}, num_workers=2)
    try:
        here = create_env("nim", {"opponent": "random"})
        logs = [[{"role": "assistant", "content": player(row)}] for row in rows]
        ours, theirs = here.step(logs, rows), remote.step(logs, rows)
        assert ours.metadata == theirs.metadata
        assert ours.observations == theirs.observations
        assert ours.rewards.tolist() == theirs.rewards.tolist()
    finally:
        remote.shutdown()
