"""The bridge to Gymnasium, with the real package."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_distributed.errors import MissingExtraError
from rl_envs import MessageLogError, TaskError
from rl_envs.bridges.gymnasium import (
    GymnasiumConfig,
    GymnasiumEnvironment,
    GymnasiumTasks,
)
from rl_envs.bridges.gymnasium.actions import ActionReader
from rl_envs.testing import (
    Examination,
    assert_passed,
    examine_environment,
    examine_tasks,
)
from rl_envs.worlds.game import Playthrough, played

FIXED = {"is_slippery": False}


class Echo(gymnasium.Env[str, str]):
    """A text environment: say the word of the seed in capitals."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(8, charset="ABCDEFGHIJ\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abcdefghij"), 4))
        return self.word, {}

    def step(self, action: str) -> Any:
        return "?", float(action == self.word.upper()), True, False, {}


@pytest.fixture(scope="module", autouse=True)
def echo() -> Iterator[None]:
    gymnasium.register("EchoOfTests-v0", Echo)
    yield
    del gymnasium.registry["EchoOfTests-v0"]


def play(row: dict[str, Any], *said: str, **config: Any) -> Playthrough:
    responses = iter(said)
    environment = GymnasiumEnvironment(GymnasiumConfig(**config))
    try:
        return played(environment, row, lambda _: next(responses, "?"))
    finally:
        environment.shutdown()


def lake() -> dict[str, Any]:
    return GymnasiumTasks(settings=FIXED).train(1)[0]


def test_a_solved_and_a_lost_episode() -> None:
    row = lake()
    assert row["prompt"].endswith("\n[red S]FFF\nFHFH\nFFFH\nHFFG")
    assert "Actions: left, down, right, up." in row["prompt"]
    way = ["down", "Down.", "2", "<move>right</move>", "<move>down", "right"]
    game = play(row, *way)
    assert (game.reward, game.outcome) == (1.0, "solved")
    assert game.messages[2]["content"] == "  (Down)\nSFFF\n[red F]HFH\nFFFH\nHFFG"
    assert game.columns["game"]["actions"] == [
        "down", "down", "right", "right", "down", "right",
    ]  # fmt: skip
    fallen = play(row, "right", "down")
    assert (fallen.reward, fallen.outcome) == (0.0, "lost")


def test_illegal_actions_are_answered_and_change_nothing() -> None:
    game = play(lake(), "jump", "7", "", max_illegal=3)
    assert game.outcome == "illegal"
    assert game.messages[2]["content"].startswith(
        "That is no action. Actions: left, down, right, up.\n[red S]FFF"
    )
    assert game.columns["game"]["actions"] == []
    cut = play(lake(), *["left"] * 9, max_turns=4)
    assert (cut.outcome, cut.columns["game"]["turns"]) == ("out_of_turns", 4)


def test_a_mask_of_the_environment_makes_actions_illegal() -> None:
    row = GymnasiumTasks("Taxi-v4").train(1)[0]
    said = play(row, "dropoff", max_illegal=2).messages[2]["content"]
    assert said.startswith("dropoff is not possible now. Actions: south, north")


@pytest.mark.parametrize("most", [1, 256])
def test_episodes_are_those_of_the_package_kept_or_not(most: int) -> None:
    """Several slippery episodes at a time, compared with the package itself."""
    rows = GymnasiumTasks("FrozenLake-v1", seed=4).train(3)
    world = GymnasiumEnvironment(GymnasiumConfig(max_kept=most, max_turns=99))
    rng = np.random.default_rng(0)
    envs = [gymnasium.make("FrozenLake-v1") for _ in rows]
    for env, row in zip(envs, rows, strict=True):
        env.reset(seed=row["gym_seed"])
    columns: list[Any] = list(rows)
    live = list(range(3))
    for _ in range(40):
        actions = {at: int(rng.integers(4)) for at in live}
        logs = [[{"role": "assistant", "content": str(actions[at])}] for at in live]
        result = world.step(logs, [columns[at] for at in live])
        # A repeated call returns the same.
        again = world.step(logs, [columns[at] for at in live])
        assert again.observations == result.observations
        ended = []
        for place, at in enumerate(live):
            _, reward, done, cut, _ = envs[at].step(actions[at])
            assert result.rewards.tolist()[place] == float(reward)
            assert bool(result.terminateds[place]) == (done or cut)
            columns[at] = result.metadata[place]
            ended += [at] if done or cut else []
        live = [at for at in live if at not in ended]
    assert not live
    world.shutdown()


def test_what_a_limit_ended_is_released() -> None:
    [row] = GymnasiumTasks("FrozenLake-v1", seed=4).train(1)
    world = GymnasiumEnvironment()
    log = [{"role": "assistant", "content": "0"}]
    first = world.step([log], [row])
    assert len(world._episodes._kept) == 1
    for _ in range(2):
        world.close(first.metadata)
        assert not world._episodes._kept
    # Nothing is lost: the episode is rebuilt.
    second = world.step([log], first.metadata)
    assert second.observations == world.step([log], first.metadata).observations
    world.close([row])
    world.shutdown()


def test_text_actions_and_text_observations() -> None:
    row = GymnasiumTasks("EchoOfTests-v0", seed=2).train(1)[0]
    assert "An action is text of at most 8 characters." in row["prompt"]
    word = row["prompt"].splitlines()[-1]
    assert play(row, f"<move>{word.upper()}</move>").reward == 1.0
    assert play(row, "ABCD").outcome == "lost"
    wrong = play(row, word, "A" * 9, max_illegal=2)
    assert wrong.outcome == "illegal"


def test_observations_of_numbers_and_a_return_that_solves() -> None:
    row = GymnasiumTasks("CartPole-v1").train(1)[0]
    values = json.loads(row["prompt"].splitlines()[-1])
    assert len(values) == 4
    lost = play(row, *["left"] * 20, solved_return=30)
    assert lost.outcome == "lost"
    assert lost.reward == lost.columns["game"]["turns"] > 5
    won = play(row, *["left"] * 20, solved_return=5, credit="solved")
    assert (won.reward, won.outcome) == (1.0, "solved")


@pytest.mark.parametrize(
    ("space", "said", "found"),
    [
        (gymnasium.spaces.MultiDiscrete([3, 4]), "[2, 3]", [2, 3]),
        (gymnasium.spaces.MultiDiscrete([3, 4]), "3 1", None),
        (gymnasium.spaces.MultiDiscrete([3, 4]), "1.5 1", None),
        (gymnasium.spaces.MultiBinary(2), "257 0", None),
        (gymnasium.spaces.Box(-2, 2, (1,)), "-1.5", [-1.5]),
        (gymnasium.spaces.Box(-2, 2, (1,)), "nan", None),
        (gymnasium.spaces.Box(-2, 2, (1,)), "1 1", None),
        (gymnasium.spaces.Discrete(2, start=5), "6", 6),
        (gymnasium.spaces.Discrete(2, start=5), "0", None),
    ],
)
def test_actions_are_read_or_refused(space: Any, said: str, found: Any) -> None:
    reader = ActionReader(space, "x")
    if found is None:
        with pytest.raises(ValueError, match="That is no action"):
            reader.read(said)
    else:
        action, name = reader.read(said)
        assert space.contains(action)
        assert np.array(action).tolist() == found
        assert np.array_equal(reader.read(name)[0], action)


def test_names_that_are_numbers_come_before_numbers() -> None:
    reader = ActionReader(gymnasium.spaces.Discrete(3), "x", ("-1", "0", "1"))
    assert [reader.read(name) for name in ("-1", "0", "1")] == [
        (0, "-1"),
        (1, "0"),
        (2, "1"),
    ]
    assert reader.read("2") == (2, "1")


def test_checks_of_the_contract() -> None:
    rows = GymnasiumTasks("Blackjack-v1").train(6)
    assert_passed(
        examine_environment("gymnasium", rows, Examination(process_deadline_s=60))
    )
    assert_passed(examine_tasks(lambda seed: GymnasiumTasks("Taxi-v4", seed=seed), 8))
    assert_passed(examine_tasks(lambda seed: GymnasiumTasks(seed=seed), 8))


def test_splits_follow_the_start_where_starts_differ() -> None:
    assert GymnasiumTasks("Taxi-v4").split_by == "start"
    assert GymnasiumTasks("FrozenLake-v1").split_by == "seed"
    alike = GymnasiumTasks("FrozenLake-v1", split_by="start")
    rng = random.Random(1)
    assert len({alike.key(alike.propose(rng)) for _ in range(8)}) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env_id": "FrozenLak-v1"}, "cannot be made.*Did you mean: `FrozenLake`"),
        ({"env_id": "no_module_xy:E-v0"}, "cannot be made.*ModuleNotFoundError"),
        ({"settings": {"size": 3}}, "cannot be made with the settings.*size"),
        ({"settings": {"size": {1}}}, "settings must be a mapping of JSON values"),
        ({"action_names": ["a", "b"]}, "must be 4 different names"),
        ({"action_names": list("aabc")}, "must be 4 different names"),
        ({"env_id": "Pendulum-v1", "action_names": ["a"]}, "are for discrete actions"),
        ({"env_id": "Blackjack-v1", "show": "drawing"}, "no render mode 'ansi'"),
        ({"show": "x"}, "show must be 'auto', 'drawing' or 'values': got 'x'"),
        ({"split_by": "x"}, "split_by must be 'start' or 'seed': got 'x'"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        GymnasiumTasks(**given)


def test_rows_that_cannot_be_played_are_named() -> None:
    row = lake()
    world = GymnasiumEnvironment()
    found = world.unusable_rows(
        [row, {"gym_id": 3}, {**row, "gym_start": "0"}, {**row, "gym_id": "Nope-v0"}]
    )
    assert set(found) == {1, 2, 3}
    assert "must have the columns gym_id, gym_seed" in found[1]
    assert "starts otherwise with the seed" in found[2]
    assert "'Nope-v0' of Gymnasium cannot be made" in found[3]
    with pytest.raises(MessageLogError, match="must have the columns"):
        play({"prompt": "?"}, "left")
    world.shutdown()


def test_a_copy_plays_the_same() -> None:
    environment = pickle.loads(pickle.dumps(GymnasiumEnvironment()))
    game = played(environment, lake(), lambda _: "right")
    assert game.outcome in ("lost", "out_of_turns")


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "gymnasium.py").write_text("raise ImportError('not here')\n")
    code = (
        "import json\n"
        "from rl_envs.bridges.gymnasium import GymnasiumTasks\n"
        "try: GymnasiumTasks()\n"
        "except Exception as e: print(json.dumps([type(e).__name__, str(e)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    kind, text = json.loads(done.stdout)
    assert kind == MissingExtraError.__name__
    assert "pip install 'rl-envs[gymnasium]'" in text
