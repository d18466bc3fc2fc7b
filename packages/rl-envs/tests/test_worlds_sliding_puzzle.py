"""The world `sliding_puzzle`: exact distances, moves, and rewards."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs import MessageLogError, Task, TaskError
from rl_envs.worlds.game import Playthrough, played
from rl_envs.worlds.sliding_puzzle import (
    SlidingPuzzleConfig,
    SlidingPuzzleEnvironment,
    SlidingPuzzleTasks,
)
from rl_envs.worlds.sliding_puzzle.solver import (
    MOVES,
    Board,
    BoardError,
    distances,
    goal_of,
    mirrored,
    moved,
    read_board,
    solution,
)

# Farthest board of each size and the number of solvable boards: half of all orders.
FARTHEST = {(2, 2): (6, 12), (2, 3): (21, 360), (3, 2): (21, 360), (2, 4): (36, 20160)}


def brute_force(board: Board) -> int | None:
    """Search forward from the board, on lists, independently of the solver's moves."""
    width = board.num_columns
    start, goal = tuple(board.cells), tuple(sorted(board.cells.replace(".", "~")))
    goal = tuple("." if cell == "~" else cell for cell in goal)
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        cells, depth = queue.popleft()
        if cells == goal:
            return depth
        gap = cells.index(".")
        for other in range(len(cells)):
            rows = abs(other // width - gap // width)
            if rows + abs(other % width - gap % width) == 1:
                after = list(cells)
                after[gap], after[other] = after[other], after[gap]
                if tuple(after) not in seen:
                    seen.add(tuple(after))
                    queue.append((tuple(after), depth + 1))
    return None


def play(board: str, *said: str, **config: Any) -> Playthrough:
    """Play the given responses, then nonsense until the conversation ends."""
    responses = iter(said)
    environment = SlidingPuzzleEnvironment(SlidingPuzzleConfig(**config))
    row = {"prompt": "?", "board": board, "style": "compact"}
    return played(environment, row, lambda _: next(responses, "?"))


@given(st.permutations("12345."), st.sampled_from([2, 3]))
@settings(max_examples=60, deadline=None)
def test_solutions_are_as_short_as_a_search_finds(cells: list[str], width: int) -> None:
    board = Board("".join(cells), width)
    shortest = brute_force(board)
    if shortest is None:
        assert board.cells not in distances(board.num_rows, width)
        with pytest.raises(BoardError, match="odd permutation"):
            solution(board)
        return
    moves = solution(board)
    assert len(moves) == shortest == distances(board.num_rows, width)[board.cells]
    for move in moves:
        after = moved(board, move)
        assert after is not None
        board = after
    assert board == goal_of(board.num_rows, width)


@pytest.mark.parametrize("size", FARTHEST)
def test_known_numbers_of_boards_and_moves(size: tuple[int, int]) -> None:
    known = distances(*size)
    assert (max(known.values()), len(known)) == FARTHEST[size]


def test_the_hardest_boards_of_nine_cells_need_31_moves() -> None:
    known = distances(3, 3)
    assert len(known) == 181440
    assert sorted(known[b] for b in ("86725431.", "64785.321")) == [30, 31]


@given(st.integers(0, 359), st.booleans())
def test_a_mirror_image_is_as_far(place: int, tall: bool) -> None:
    size = (3, 2) if tall else (2, 3)
    cells, distance = sorted(distances(*size).items())[place]
    board = Board(cells, size[1])
    image = mirrored(board)
    assert distances(*size[::-1])[image.cells] == distance
    assert mirrored(image) == board


def test_a_mirror_image_is_in_the_same_part() -> None:
    source = SlidingPuzzleTasks(2, 3)
    tall = SlidingPuzzleTasks(3, 2)
    for task in source.sample("held_out", 12):
        image = mirrored(read_board(task.metadata["board"])).text
        twin = Task("?", "?", {"board": image})
        assert image != task.metadata["board"]
        assert source.key(twin) == source.key(task)
        assert tall.split_of(twin) == "held_out"


def test_a_tile_moves_into_the_gap_in_the_named_direction() -> None:
    board = read_board("123/4.5/786")
    assert {move: moved(board, move).text for move in MOVES} == {
        "U": "123/485/7.6",
        "D": "1.3/425/786",
        "L": "123/45./786",
        "R": "123/.45/786",
    }
    assert moved(read_board("123/456/78."), "U") is None
    assert moved(read_board("123/456/78."), "L") is None


def test_every_way_to_write_a_move() -> None:
    for said in ("U", "u", "up", "UP", " U ", "<move>up</move>", "so:\nU"):
        assert play("12/.3", said).columns["game"]["board"] == "12/.3"
    for said in ("L", "left", "<move>LEFT</move>"):
        assert play("12/.3", said).reward == 1.0
    several = play("1.3/425/786", "U L,  up", max_moves_per_response=3)
    assert several.reward == 1.0


def test_illegal_moves_are_answered_counted_and_change_nothing() -> None:
    game = play("12/.3", "R", "LL", "L")
    assert [m["content"] for m in game.messages[2::2]] == ["!12/.3>", "!12/.3>"]
    assert game.columns["game"] == {
        "board": "12/3.",
        "moves": 3,
        "optimal": 1,
        "turns": 3,
        "illegal": 2,
    }
    assert game.outcome == "solved"
    # Of several moves, those before the illegal one count.
    game = play("1.3/425/786", "UUU", "LU", max_moves_per_response=3)
    assert game.messages[2]["content"] == "!123/485/7.6>"


def test_moves_after_the_goal_are_not_made() -> None:
    game = play("12/.3", "LR", max_moves_per_response=2, credit="efficient")
    assert game.outcome == "solved"
    assert game.reward == 1.0


def test_words_say_what_is_wrong() -> None:
    (row,) = SlidingPuzzleTasks(2, 2, style="words").train(1)
    board = {**row, "board": "12/.3"}
    said = iter(["R", "what?", "LR", "L"])
    game = played(SlidingPuzzleEnvironment(), board, lambda _: next(said))
    shown = [m["content"] for m in game.messages[2::2]]
    assert shown == [
        "No tile can move R on this board.\n1 2\n. 3",
        "That is no move: answer U, D, L or R.\n1 2\n. 3",
    ]
    assert game.outcome == "illegal"


def test_efficiency_is_optimal_by_used() -> None:
    straight = play("1.3/425/786", "U", "L", "U", credit="efficient")
    assert straight.reward == 1.0
    detour = play("1.3/425/786", "U", "D", "U", "L", "U", credit="efficient")
    assert detour.reward == pytest.approx(3 / 5)
    idle = play("1.3/425/786", "U", "?", "L", "U", credit="efficient")
    assert idle.reward == pytest.approx(3 / 4)


@given(st.lists(st.sampled_from("UDLR"), min_size=1, max_size=40))
@settings(deadline=None)
def test_graded_reward_is_that_of_the_last_board_whatever_the_way(
    way: list[str],
) -> None:
    optimal = 5
    cells = next(cells for cells, far in distances(2, 3).items() if far == optimal)
    board = Board(cells, 3)
    game = play(board.text, *way, credit="graded", max_turns=40, max_illegal=None)
    last = read_board(game.columns["game"]["board"])
    if game.outcome == "solved":
        assert game.reward == pytest.approx(1.0)
    else:
        expected = 0.5 * max(0.0, 1 - distances(2, 3)[last.cells] / optimal)
        assert game.reward == pytest.approx(expected, abs=1e-5)
        assert game.reward < 0.5


def test_going_back_and_forth_earns_nothing() -> None:
    near = "1.3/425/786"
    once = play(near, "U", credit="graded", max_turns=2)
    often = play(near, *["U", "D"] * 20, credit="graded", max_turns=40)
    assert once.reward == pytest.approx(0.5 / 3)
    assert often.reward == pytest.approx(0.0, abs=1e-5)


@given(st.integers(0, 99), st.integers(1, 10), st.integers(0, 8))
@settings(max_examples=20, deadline=None)
def test_tasks_are_as_hard_as_asked(seed: int, least: int, more: int) -> None:
    source = SlidingPuzzleTasks(
        2, 3, min_distance=least, max_distance=least + more, seed=seed
    )
    for row in source.train(6, unique=False):
        board = read_board(row["board"])
        assert row["distance"] == len(row["answer"]) == brute_force(board)
        assert least <= row["distance"] <= least + more


def test_demonstrations_are_shortest_conversations() -> None:
    source = SlidingPuzzleTasks(2, 3, max_moves_per_response=2)
    for row in source.demonstrations(10):
        said = [m["content"] for m in row["answer"] if m["role"] == "assistant"]
        assert "".join(said) == solution(read_board(row["board"]))
        assert all(1 <= len(text) <= 2 for text in said)
        assert row["answer"][-1]["role"] == "assistant"


def test_wrong_settings_and_rows_are_named() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_rows": 1}, "at least 2 rows"),
        ({"num_rows": 4}, "at most 9 cells: got 4 x 3"),
        ({"num_rows": 2, "max_distance": 22}, "<= 21, the farthest on 2 x 3"),
        ({"num_rows": 2, "min_distance": 0}, "1 <= min_distance"),
        ({"num_rows": 2, "style": "long"}, "'compact' or 'words'"),
        ({"num_rows": 2, "max_moves_per_response": 0}, "at least 1: got 0"),
    )
    for settings_, message in wrong:
        with pytest.raises(TaskError, match=message):
            SlidingPuzzleTasks(**settings_)
    for board, message in (
        ("123/54.", "odd permutation"),
        ("123/45.", "already solved"),
        ("123/45", "equally long"),
        ("113/45.", "each once"),
        ("", "at least 2 rows"),
        (7, "a text such as"),
    ):
        with pytest.raises(MessageLogError, match=message):
            play(board, "U")  # type: ignore[arg-type]
