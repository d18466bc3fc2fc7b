"""The bridge to TextArena, with the real package."""

from __future__ import annotations

import json
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nltk
import pytest
import textarena
from judge_server import judge_server

from rl_distributed.errors import ConfigError, MissingExtraError
from rl_envs import MessageLogError, TaskError
from rl_envs.bridges.textarena import (
    TextArenaConfig,
    TextArenaEnvironment,
    TextArenaTasks as Tasks,
)
from rl_envs.bridges.textarena.episodes import Match
from rl_envs.bridges.textarena.games import _JUDGED, GameSpec
from rl_envs.bridges.textarena.opponents import _KNOWN, ListedMoves, ServedPlayer
from rl_envs.errors import JudgeError
from rl_envs.testing import (
    Examination,
    assert_passed,
    examine_environment,
    examine_tasks,
)
from rl_envs.worlds.game import Playthrough, played


def play(row: dict[str, Any], *said: str, **config: Any) -> Playthrough:
    responses = iter(said)
    environment = TextArenaEnvironment(TextArenaConfig(**config))
    try:
        return played(environment, row, lambda _: next(responses, "?"))
    finally:
        environment.shutdown()


def first(game: str = "TicTacToe-v0", **settings: Any) -> dict[str, Any]:
    return Tasks(game, **settings).train(1)[0]


SCRIPT = {"opponent": "first", "opponent_moves": ("[0]", "[1]", "[3]", "[2]")}


def test_a_won_and_a_lost_game_against_a_script() -> None:
    row = first()
    assert row["prompt"].startswith("You are Player 0 in Tic Tac Toe.")
    won = play(row, "<move>[4]</move>", "I take\n8", "2", "6", "5", **SCRIPT)
    assert (won.reward, won.outcome) == (1.0, "solved")
    assert won.columns["game"]["actions"] == [
        "[4]", "[0]", "8", "[1]", "2", "[3]", "6",
    ]  # fmt: skip
    told = won.messages[2]["content"]
    assert told.startswith("Player 0 placed their symbol (O) in cell 4.")
    assert "[Player 1] [0]\nPlayer 1 placed their symbol (X) in cell 0." in told
    lost = play(row, "4", "8", "5", "7", **SCRIPT)
    assert (lost.reward, lost.outcome) == (-1.0, "lost")
    lost = play(row, "4", "8", "5", "7", credit="solved", **SCRIPT)
    assert (lost.reward, lost.outcome) == (0.0, "lost")


def test_a_won_game_may_count_as_unsolved() -> None:
    won = play(first(), "4", "8", "2", "6", "5", solved_reward=2.0, **SCRIPT)
    assert (won.reward, won.outcome) == (1.0, "lost")


def test_a_draw_earns_nothing() -> None:
    order = ("[0]", "[2]", "[7]", "[3]", "[8]")
    drawn = play(
        first(), "4", "1", "6", "5", "8", opponent="first", opponent_moves=order
    )
    assert (drawn.reward, drawn.outcome) == (0.0, "lost")


def test_illegal_actions_end_a_game_as_the_package_says() -> None:
    game = play(first(), "4", "4", "9", **SCRIPT)
    assert (game.reward, game.outcome) == (-1.0, "illegal")
    assert "cell 4 is already occupied" in game.messages[4]["content"]
    assert game.columns["game"]["illegal"] == 2
    ours = play(first(), "jump", max_illegal=1, **SCRIPT)
    assert (ours.reward, ours.outcome) == (0.0, "illegal")
    cut = play(first(), "4", "8", max_turns=2, **SCRIPT)
    assert (cut.outcome, cut.columns["game"]["turns"]) == ("out_of_turns", 2)


def test_a_game_for_one_has_the_rewards_of_the_package() -> None:
    """Compared with the package itself, with its own seed and draws."""
    row = first("GuessTheNumber-v0")
    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=row["ta_seed"])
    number = game.state.game_state["game_number"]
    won = play(row, str(number))
    assert (won.reward, won.outcome) == (1.0, "solved")
    wrong = str(number % 20 + 1)
    guesses = [wrong, str((number + 1) % 20 + 1), str((number + 2) % 20 + 1)]
    for guess in guesses:
        game.step(f"[{guess}]")
    messages = play(row, *guesses, max_turns=3).messages
    hints = [text for _, text, _ in game.state.observations[0] if "number is" in text]
    assert len(hints) == 3
    assert hints[:2] == [messages[at]["content"].splitlines()[-1] for at in (2, 4)]


def test_the_other_player_may_begin() -> None:
    row = first(begins="opponent")
    assert row["ta_player"] == 1
    assert f"[Player 0] {row['ta_opening'][0]}" in row["prompt"]
    rows = Tasks(begins="drawn", seed=3).train(12)
    assert {each["ta_player"] for each in rows} == {0, 1}
    game = play(row, row["ta_opening"][0], max_turns=1)
    assert "already occupied" not in game.messages[0]["content"]
    assert game.columns["game"]["illegal"] == 1


def test_chance_is_that_of_the_package_with_its_own_seed() -> None:
    row = first("PigDice-v0")
    actions = play(row, *["[roll]"] * 12, max_turns=12).columns["game"]["actions"]
    game = textarena.make("PigDice-v0-raw")
    game.reset(num_players=2, seed=row["ta_seed"])
    match = Match(GameSpec("PigDice-v0", row["ta_seed"]))
    for number, action in enumerate(actions):
        game.step(action)
        # Other code draws from the global generator in between.
        state = random.getstate()
        random.seed(number)
        match.take(action)
        random.setstate(state)
        assert match._base.state.game_state == game.state.game_state
    assert len(actions) >= 12


@pytest.mark.parametrize("most", [1, 256])
def test_games_side_by_side_do_not_share_their_chance(most: int) -> None:
    """Each is as if played alone, kept or not, and calls can be repeated."""
    rows = Tasks("PigDice-v0", seed=4).train(3)
    said = ["[roll]", "[roll]", "[hold]"] * 4
    alone = [play(row, *said, max_turns=12).messages for row in rows]
    world = TextArenaEnvironment(TextArenaConfig(max_kept=most, max_turns=12))
    columns: list[Any] = list(rows)
    seen: list[list[str]] = [[], [], []]
    before = random.getstate()
    for word in said[:-1]:
        logs = [[{"role": "assistant", "content": word}]] * 3
        result = world.step(logs, columns)
        assert world.step(logs, columns).observations == result.observations
        columns = list(result.metadata)
        for texts, told in zip(seen, result.observations, strict=True):
            texts.append(told["content"])  # type: ignore[index,call-overload]
    assert random.getstate() == before
    assert seen == [
        [m["content"] for m in messages if m["role"] == "environment"]
        for messages in alone
    ]
    assert len({tuple(texts) for texts in seen}) == 3
    world.shutdown()


def test_a_served_model_plays_the_other_side() -> None:
    def reply(question: str) -> str:
        assert "As Player 1, you will be 'X'" in question
        free = re.findall(r"'\[(\d)\]'", question.rpartition("Available Moves")[2])
        return f"<think>[4]</think> I take <move>[{free[0]}]</move>"

    rows = Tasks().train(3)
    with judge_server(reply) as server:
        world = TextArenaEnvironment(
            TextArenaConfig(
                opponent="model",
                server={"address": server.address, "model": "m"},  # type: ignore[arg-type]
            )
        )
        logs = [[{"role": "assistant", "content": text}] for text in ("4", "0", "x")]
        result = world.step(logs, rows)
        assert [each["game"]["actions"] for each in result.metadata] == [
            ["4", "[0]"], ["0", "[1]"], ["x"],
        ]  # fmt: skip
        assert "[Player 1] [1]" in str(result.observations[1])
        copy = pickle.loads(pickle.dumps(world))
        assert copy.step(logs, rows).observations == result.observations
        for each in (world, copy):
            each.shutdown()
    dead = TextArenaConfig(
        opponent="model",
        server={"address": server.address, "model": "m", "num_attempts": 1},  # type: ignore[arg-type]
    )
    world = TextArenaEnvironment(dead)
    with pytest.raises(JudgeError, match=r"the served player at http.*must answer"):
        world.step(logs[:1], rows[:1])
    world.shutdown()


def test_a_served_model_is_asked_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAYER_KEY", "k3y")
    settings = {
        "model": "m",
        "api_key_variable": "PLAYER_KEY",
        "temperature": 0.25,
        "max_tokens": 77,
        "max_requests": 1,
        "request_deadline_s": 5.0,
        "num_attempts": 2,
    }
    rows = Tasks().train(3)
    logs = [[{"role": "assistant", "content": text}] for text in ("4", "0", "8")]
    failed: list[str] = []

    def reply(question: str) -> str | int:
        free = re.findall(r"'\[(\d)\]'", question.rpartition("Available Moves")[2])
        if not failed:
            failed.append(question)
            return 500
        return f"<move>[{free[0]}]</move>"

    with judge_server(reply) as server:
        player = ServedPlayer.from_dict({"address": server.address, **settings})
        world = TextArenaEnvironment(TextArenaConfig(opponent="model", server=player))
        world.step(logs, rows)
        world.shutdown()
    assert len(server.questions) == 4  # one of them failed
    assert set(server.keys) == {"Bearer k3y"}
    assert server.most_at_once == 1
    asked = server.requests[0]
    assert (asked["temperature"], asked["max_tokens"]) == (0.25, 77)


@pytest.mark.parametrize(
    "game",
    [
        "Breakthrough-v0-tiny",
        "ConnectFour-v0",
        "IteratedMatchingPennies-v0",
        "IteratedPrisonersDilemma-v0",
        "IteratedRockPaperScissors-v0",
        "KuhnPoker-v0",
        "Nim-v0",
        "Othello-v0-tiny",
        "PigDice-v0-short",
        "SimpleTak-v0",
        "TicTacToe-v0",
        "UltimateTicTacToe-v0",
        "WildTicTacToe-v0",
    ],
)
def test_known_moves_play_a_game_to_its_end(game: str) -> None:
    match = Match(GameSpec(game, 7))
    for turn in range(300):
        if match.has_ended:
            break
        assert match.take(ListedMoves().move(match, game, str(turn)))
    assert match.has_ended
    assert match.reason
    assert not any(match.broke_rules(player) for player in (0, 1))


def test_all_known_moves_are_tested() -> None:
    marks = test_known_moves_play_a_game_to_its_end.pytestmark  # type: ignore[attr-defined]
    assert {game.partition("-")[0] for game in marks[0].args[1]} == set(_KNOWN)


def test_games_that_ask_hosted_models_are_those_that_are_refused() -> None:
    folder = Path(textarena.__file__).parent / "envs"
    hosted = {
        path.parent.name
        for path in folder.glob("*/env.py")
        if re.search(r"OpenRouter|openai|Jury\(", path.read_text())
    }
    assert hosted == set(_JUDGED)


def test_checks_of_the_contract() -> None:
    rows = Tasks("TicTacToe-v0", begins="drawn").train(3)
    assert_passed(
        examine_environment("textarena", rows, Examination(process_deadline_s=60))
    )
    assert_passed(examine_tasks(lambda seed: Tasks("Sudoku-v0", seed=seed), 6))


def test_splits_follow_the_start_where_starts_differ() -> None:
    assert Tasks("Sudoku-v0").split_by == "start"
    assert Tasks("TicTacToe-v0").split_by == "seed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"game": "TicTacTo-v0"}, "did you mean 'TicTacToe-v0'"),
        ({"game": "TwentyQuestions-v0"}, "a hosted model decides it"),
        (
            {"game": "Wordle-v0"},
            "needs the data 'words' of NLTK.*nltk.downloader words",
        ),
        ({"game": "UsedCarNegotiation-v0"}, "the package lacks its data"),
        ({"game": "SecretMafia-v0"}, "must be for one or two players"),
        ({"game": "GuessTheNumber-v0", "settings": {"x": 1}}, "cannot be made.*'x'"),
        ({"settings": {"size": {1}}}, "settings must be a mapping of JSON values"),
        ({"game": "Sudoku-v0", "begins": "opponent"}, "is for one player"),
        ({"begins": "x"}, "begins must be 'policy', 'opponent' or 'drawn': got 'x'"),
        ({"split_by": "x"}, "split_by must be 'start' or 'seed': got 'x'"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Tasks(**given)


@pytest.mark.parametrize("game", ["Wordle-v0", "WordChains-v0"])
def test_missing_word_lists_are_named_and_not_fetched(
    game: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr(nltk, "download", lambda *names, **_: fetched.append(names))
    # Even where they are installed.
    monkeypatch.setattr(nltk.data, "path", [])
    message = r"needs the data 'words' of NLTK.*python -m nltk.downloader words"
    with pytest.raises(TaskError, match=message):
        Tasks(game)
    assert not fetched


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its code runs there")
def test_a_game_for_a_newer_python_is_refused() -> None:
    with pytest.raises(TaskError, match=r"its code needs a newer Python than 3\."):
        Tasks("Chess-v0")


def test_moves_and_servers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="server must be given with"):
        TextArenaConfig(opponent="model")
    with pytest.raises(ConfigError, match="opponent=first needs opponent_moves"):
        TextArenaConfig(opponent="first")
    with pytest.raises(TaskError, match="moves of 'MemoryGame-v0' must be listed"):
        play(first("MemoryGame-v0"), "[0 0 0 1]")
    with pytest.raises(TaskError, match="must be legal: none of 1 is"):
        play(first(), "[4]", opponent_moves=("[4]",))


def test_rows_that_cannot_be_played_are_named() -> None:
    row = first()
    world = TextArenaEnvironment()
    found = world.unusable_rows(
        [
            row,
            {"ta_game": 3},
            {**row, "ta_start": "0"},
            {**row, "ta_game": "Nope-v0"},
            {**row, "ta_opening": ["[1]"]},
        ]
    )
    assert set(found) == {1, 2, 3, 4}
    assert "must have the columns ta_game, ta_seed" in found[1]
    assert "starts otherwise with the seed" in found[2]
    assert "must be a game of TextArena" in found[3]
    assert "must be the player that moves after" in found[4]
    with pytest.raises(MessageLogError, match="must have the columns"):
        play({"prompt": "?"}, "4")
    world.shutdown()


def test_an_action_on_which_a_game_fails_is_illegal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from textarena.envs.TicTacToe.env import TicTacToeEnv  # noqa: PLC0415

    step = TicTacToeEnv.step

    def fragile(self: Any, action: str) -> Any:
        done = step(self, action)
        if "8" in action:
            raise KeyError(action)
        return done

    monkeypatch.setattr(TicTacToeEnv, "step", fragile)
    game = play(first(), "4", "8", "7", "6", "2", **SCRIPT)
    assert game.columns["game"]["actions"][2] == ""
    assert game.columns["game"]["illegal"] == 1
    assert "\n 6 | 7 | 8 " in game.messages[4]["content"]


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "textarena.py").write_text("raise ImportError('not here')\n")
    code = (
        "import json\n"
        "from rl_envs.bridges.textarena import TextArenaTasks\n"
        "try: TextArenaTasks()\n"
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
    assert "pip install 'rl-envs[textarena]'" in text
