"""The bridge to Reasoning Gym, with the real package."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl_distributed.errors import ConfigError
from rl_envs import TaskError
from rl_envs.bridges.reasoning_gym import (
    ReasoningGymConfig,
    ReasoningGymEnvironment,
    ReasoningGymTasks,
    family_process,
)
from rl_envs.testing import (
    Examination,
    assert_passed,
    examine_environment,
    examine_tasks,
)

SAMPLED = ["chain_sum", "spell_backward", "number_sorting", "n_queens", "puzzle24"]

# They draw from sets of texts.
UNORDERED = ["isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"]


@pytest.fixture(scope="module")
def judge() -> Iterator[ReasoningGymEnvironment]:
    # On a busy machine, the slowest families exceed the default limit.
    environment = ReasoningGymEnvironment(ReasoningGymConfig(timeout_s=120.0))
    yield environment
    environment.shutdown()


@pytest.fixture(scope="module")
def tasks() -> ReasoningGymTasks:
    return ReasoningGymTasks(SAMPLED, seed=3)


def rewards(judge: Any, rows: list[dict[str, Any]], said: list[str]) -> list[float]:
    logs = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": s},
        ]
        for row, s in zip(rows, said, strict=True)
    ]
    return list(judge.step(logs, rows).rewards.tolist())


def test_every_family_makes_a_task_and_scores_its_own_answer(
    judge: ReasoningGymEnvironment, tasks: ReasoningGymTasks
) -> None:
    families = tasks.families()
    assert len(families) >= 105
    assert sum(families.values()) >= 101
    # Sokoban searches until a level is solvable: 11 s with seed 11, where most seeds
    # take a hundredth of a second.
    rows = [
        tasks._task_of(name, 3 if name == "sokoban" else 11).to_row()
        for name in families
    ]
    # Hash randomization affects several families: another process gives the same.
    again = ReasoningGymTasks(seed=3)
    for row in rows:
        if row["family"] in UNORDERED:
            assert again._task_of(row["family"], 11).to_row() == row
    with_gold = [row for row in rows if row["answer"]]
    assert len(with_gold) >= 100
    found = rewards(judge, with_gold, [row["answer"] for row in with_gold])
    wrong = [r["family"] for r, f in zip(with_gold, found, strict=True) if f < 1.0]
    assert wrong == []
    tagged = [f"I think.\n<answer>{row['answer']}</answer>" for row in with_gold]
    assert rewards(judge, with_gold, tagged) == found
    assert sum(rewards(judge, rows, [""] * len(rows))) == 0.0


def test_checks_of_the_contract(tasks: ReasoningGymTasks) -> None:
    rows = ReasoningGymTasks("chain_sum").train(6)
    assert_passed(
        examine_environment(
            "reasoning_gym", rows, Examination(process_deadline_s=120, max_row_s=5)
        )
    )
    assert_passed(examine_tasks(lambda seed: ReasoningGymTasks("lcm", seed=seed), 8))


@pytest.mark.parametrize(
    ("family", "attack"),
    [
        ("n_queens", "__import__('pathlib').Path({path!r}).write_text('x')"),
        ("spiral_matrix", "[__import__('pathlib').Path({path!r}).write_text('x')]"),
        ("binary_matrix", "[__import__('pathlib').Path({path!r}).write_text('x')]"),
        ("string_insertion", "[__import__('pathlib').Path({path!r}).write_text('x')]"),
        ("puzzle24", "__import__('pathlib').Path({path!r}).write_text('x')"),
        ("countdown", "open({path!r},'w')"),
        ("simple_integration", "exec(chr(49))"),
        ("polynomial_multiplication", "().__class__.__base__.__subclasses__()"),
    ],
)
def test_what_a_model_wrote_is_not_run(
    judge: ReasoningGymEnvironment,
    tasks: ReasoningGymTasks,
    tmp_path: Path,
    family: str,
    attack: str,
) -> None:
    mark = tmp_path / "mark"
    row = tasks._task_of(family, 5).to_row()
    assert rewards(judge, [row], [attack.format(path=str(mark))]) == [0.0]
    assert not mark.exists()


def test_an_endless_answer_costs_its_own_limit(tasks: ReasoningGymTasks) -> None:
    quick = ReasoningGymEnvironment(ReasoningGymConfig(timeout_s=2.0))
    row = tasks._task_of("puzzle24", 5).to_row()
    try:
        said = ["<answer>9**9**9**9</answer>", row["answer"]]
        assert rewards(quick, [row, row], said) == [0.0, 1.0]
    finally:
        quick.shutdown()


def test_scorers_that_evaluate_are_the_known_ones() -> None:
    """A new one in a later release must not go unnoticed."""
    spec = find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    call = re.compile(r"(?<![\w.])eval\(")
    found = {
        str(path.relative_to(folder).with_suffix("")).replace("/", ".")
        for path in folder.rglob("*.py")
        if call.search(path.read_text())
    }
    # These evaluate expressions that they generated themselves.
    own = {
        "arithmetic.basic_arithmetic",
        "arithmetic.bitwise_arithmetic",
        "arithmetic.gsm_symbolic.generators_00_49",
        "arithmetic.gsm_symbolic.generators_50_99",
    }
    assert found == own | set(family_process._EVALUATING)


@pytest.mark.parametrize(
    ("text", "is_formula"),
    [
        ("(3+5)*2 - 8/4", True),
        ("x**2/2 + log(x) + C", True),
        ("1.5*x", True),
        ("x.n", False),
        ("x.diff", False),
        ("(1).real", False),
        ("open(1)", False),
        ("'a'", False),
        ("x[0]", False),
        ("lambda: 1", False),
    ],
)
def test_formulas(text: str, is_formula: bool) -> None:
    if is_formula:
        assert family_process._checked_formula(text) == text
    else:
        with pytest.raises(ValueError, match="no formula"):
            family_process._checked_formula(text)


def test_levels_make_tasks_harder() -> None:
    tasks = ReasoningGymTasks("chain_sum", level=0)
    assert tasks.curriculum("chain_sum")["num_terms"][:4] == ["2", "3", "4", "5"]
    assert tasks.max_level == len(tasks.curriculum("chain_sum")["num_terms"]) - 1
    harder = tasks.raised()
    assert harder.level == 1
    assert tasks.raised(99).level == tasks.max_level
    patient = ReasoningGymTasks("chain_sum", make_deadline_s=77.0)
    copies = patient.raised(), pickle.loads(pickle.dumps(patient))
    assert [copy._calls._processes[0]._limit_s for copy in copies] == [77.0, 77.0]

    def terms(source: ReasoningGymTasks) -> int:
        return max(len(re.findall(r"\d+", row["prompt"])) for row in source.train(30))

    assert terms(tasks) < terms(ReasoningGymTasks("chain_sum", level=3))
    only = ReasoningGymTasks("chain_sum", levels={"num_terms": 3})
    assert terms(only) == 5
    fixed = ReasoningGymTasks(
        "chain_sum", level=3, settings={"min_terms": 2, "max_terms": 2}
    )
    assert terms(fixed) == 2


def test_parts_do_not_overlap_between_families_and_levels() -> None:
    easy, hard = ReasoningGymTasks("count_bits", level=0), ReasoningGymTasks("all")
    task = easy.sample("held_out", 1)[0]
    assert hard.split_of(task) == easy.split_of(task)


def test_graded_credit_is_what_the_scorer_gives() -> None:
    graded = ReasoningGymEnvironment(ReasoningGymConfig(credit="graded"))
    row = ReasoningGymTasks("lcm").train(1)[0]
    near = f"{row['answer']} or so"
    try:
        [share] = rewards(graded, [row], [near])
        assert share == pytest.approx(len(row["answer"]) / len(near))
    finally:
        graded.shutdown()


def test_rows_of_another_version_or_without_columns_are_named(
    judge: ReasoningGymEnvironment,
) -> None:
    row = ReasoningGymTasks("lcm").train(1)[0]
    found = judge.unusable_rows([row, {**row, "question_digest": "0"}, {"answer": "1"}])
    assert set(found) == {1, 2}
    assert "makes another task of its seed; make the rows again" in found[1]
    assert "metadata[2] must have the columns family, family_seed" in found[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "chain_sums"}, r"unknown family 'chain_sums'.*mean 'chain_sum'"),
        ({"family": []}, "at least one family"),
        ({"family": {"lcm": 0}}, "weight of family 'lcm' must be positive: got 0"),
        ({"level": -1}, "level must be a whole number from 0: got -1"),
        ({"style": "x"}, "style must be 'words' or 'bare': got 'x'"),
        (
            {"levels": {"terms": 1}},
            r"no attribute 'terms' \(it has num_digits, num_terms\)",
        ),
        ({"settings": {"min_terms": 9}}, "cannot make the task: AssertionError"),
        ({"settings": {"colour": 9}}, "unexpected keyword argument 'colour'"),
        ({"family": "acre", "level": 1}, "it has no curriculum"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        ReasoningGymTasks(**settings).train(1)


def test_a_copy_makes_the_same_tasks() -> None:
    source = ReasoningGymTasks({"lcm": 3, "gcd": 1}, level=1, style="bare", seed=4)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.train(4) == source.train(4)
    assert {row["family"] for row in source.train(30)} == {"lcm", "gcd"}


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('not here')\n")
    code = (
        "import json\n"
        "from rl_envs.bridges.reasoning_gym import ReasoningGymTasks\n"
        "try: ReasoningGymTasks()\n"
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
    assert kind == ConfigError.__name__
    assert "pip install 'rl-envs[reasoning-gym]'" in text
