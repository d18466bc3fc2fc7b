"""Answers to mathematical problems: a table, generated ones, and hostile ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import sympy
from hypothesis import HealthCheck, given, settings, strategies as st

from rl_envs.mathematics.judging import judge_answer, read_solution
from rl_envs.mathematics.reader import read_answer
from rl_envs.mathematics.values import Unreadable

TABLE = Path(__file__).parent / "data" / "math_answers.tsv"
MIN_PAIRS = 300


def is_right(solution: str, answer: str) -> bool:
    return judge_answer(f"So it is \\boxed{{{answer}}}.", solution).correct


def pairs() -> list[tuple[str, str, str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [(verdict, solution, answer) for verdict, solution, answer in rows]


def test_the_table_of_answers() -> None:
    rows = pairs()
    assert len(rows) >= MIN_PAIRS
    assert {verdict for verdict, _, _ in rows} == {"same", "other"}
    wrong = [row for row in rows if is_right(*row[1:]) != (row[0] == "same")]
    assert wrong == []


@pytest.mark.parametrize(
    ("response", "solution", "right"),
    [
        ("the answer is 1", "Eq(x**2/4 + y**2/3, 1)", False),
        ("It is $\\frac{1}{2}$.", "0.5", True),
        ("first 3, then \\boxed{4}", "4", True),
        ("\\boxed{4}, or rather 5", "4", True),
        ("\\boxed{4} and \\boxed{5}", "4, 5", True),
        ("\\boxed{4} and \\boxed{5}", "5", False),
        ("\\boxed{4}. Then, after a long while, \\boxed{5}", "5", True),
        ("72 clips", "She sold 48/2 = 24.\n#### 72", True),
        ("48/2 = 24, so 24 + 48 = 72.\n#### 72", "72", True),
        ("The answer is **5**.", "5", True),
        ("The answer is 5 because 3 + 2 = 5.", "5", True),
        ("The answer is 5, since 6 is too much", "6", False),
        ("The answer is 5. It is not $6$.", "5", True),
        ("The answer is 5. It is not $6$.", "6", False),
        ("Answer: $x = 5$", "5", True),
        ("The solutions are $2$ and $3$.", "2, 3", True),
        ("The solutions are $2$ and $3$.", "3", False),
        ("He pays $5 and gets $6 back, so $11", "11", True),
        ("I think that it is 5.", "5", True),
        ("It may be 5 or 6", "5", False),
        ("It is on Tuesday", "Tuesday", False),
        ("The answer is Tuesday.", "Tuesday", True),
        ("I do not know", "5", False),
        ("", "5", False),
        ("\\boxed{", "5", False),
        ("\\boxed{5", "5", False),
        ("\\boxed{}", "5", False),
    ],
)
def test_where_the_answer_stands(response: str, solution: str, right: bool) -> None:
    assert judge_answer(response, solution).correct is right


@pytest.mark.parametrize(
    "solution",
    [
        "",
        "\\frac{1}{",
        "Eq(x**2/4 + y**2/3",
        "x +* 3",
        "She sold 48/2 = 24 clips in May, so 72.",
        "Matrix([[1, 2], [3]])",
        "\\unknown{3}",
        "3 ? 4",
        "\\frac{1}{0}",
        "5 #### ",
        "1, 2, ...",
        "$x$ $+$",
    ],
)
def test_a_solution_without_a_meaning_is_no_number(solution: str) -> None:
    with pytest.raises(Unreadable):
        read_solution(solution)
    with pytest.raises(Unreadable):
        judge_answer("\\boxed{1}", solution)


# Generated answers --------------------------------------------------------------------

X, Y = sympy.symbols("x y")
numbers = st.integers(-30, 30).filter(bool).map(sympy.Integer)
leaves = st.one_of(numbers, st.sampled_from([X, Y, sympy.pi]))
CHANGES = 4
MIN_GENERATED = 2000
MAX_MISSED = 0.02


def _grown(parts: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
    two = st.tuples(parts, parts)
    return st.one_of(
        two.map(lambda pair: pair[0] + pair[1]),
        two.map(lambda pair: pair[0] - pair[1]),
        two.map(lambda pair: pair[0] * pair[1]),
        st.tuples(parts, numbers).map(lambda pair: pair[0] / pair[1]),
        st.tuples(parts, st.integers(2, 3)).map(lambda pair: pair[0] ** pair[1]),
        parts.map(lambda part: sympy.sqrt(part**2 + 1)),
        parts.map(sympy.sin),
    )


expressions = st.recursive(leaves, _grown, max_leaves=5).filter(
    lambda e: e.is_finite is not False and e != 0
)
writers = st.sampled_from([sympy.latex, str])
rewriters = st.sampled_from(
    [
        lambda e: e,
        sympy.expand,
        sympy.factor,
        sympy.together,
        lambda e: sympy.Add(e, 3, -X, evaluate=False) + X - 3,
        lambda e: sympy.Mul(2, e / 2, evaluate=False),
    ]
)


# Around a generated expression `#`: the solution, the same answer, a different one.
FRAMES = (
    ("#", "#", "#, #"),
    ("#", r"\left(#\right)", "q = # + 1"),
    ("w = #", "#", "q = #"),
    (r"\{#, 99\}", "99, #", r"\{#, 98\}"),
    ("(#, 99)", r"\left(#, 99\right)", "(99, #)"),
    ("(#, 99]", "#<q<=99", "[#, 99]"),
    (r"(-\infty, #)\cup(#, \infty)", r"(#, \infty)\cup(-\infty, #)", r"(-\infty, #)"),
    (
        "Matrix([[#, 1], [2, 3]])",
        r"\begin{pmatrix}#&1\\2&3\end{pmatrix}",
        "[[#, 1], [2, 4]]",
    ),
    ("Eq(w**2, #)", "w^2 - (#) = 0", "w^3 = #"),
    ("w < #", "# > w", r"w \le #"),
    (r"(#)\text{ cm}", "(#) cm", r"(#)\text{ m}"),
)


def changed(expression: sympy.Expr, choice: int, place: int) -> sympy.Expr:
    """Return an expression with a sign, number, variable or operation changed."""
    atoms = sorted(expression.atoms(sympy.Integer, sympy.Symbol), key=str)
    atom = atoms[place % len(atoms)] if atoms else None
    if choice == 0 or atom is None:
        return -expression
    if choice == 1:
        return expression + 1
    if choice == 2 and atom.is_Symbol:
        return expression.xreplace({atom: sympy.Symbol("z")})
    return expression.xreplace({atom: atom + 1})


def differ(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Return whether two expressions differ in value somewhere, by plain floats."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for shift in range(3):
        point = {s: 0.37 + 1.61 * i - 0.9 * shift for i, s in enumerate(symbols)}
        first, second = complex(a.subs(point)), complex(b.subs(point))
        if abs(first - second) > 1e-6 * max(1.0, abs(first), abs(second)):
            return True
    return False


def _is_within_floats(expression: sympy.Expr) -> bool:
    value = complex(expression.subs({X: 1.3, Y: -0.7}))
    return 1e-3 < abs(value) < 1e9


def test_generated_answers() -> None:
    """Another form is equal, a changed one is not."""
    missed: list[tuple[str, str]] = []
    num_same = num_other = 0

    @settings(
        max_examples=1000,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        expressions.filter(_is_within_floats),
        rewriters,
        st.tuples(writers, writers),
        st.sampled_from(FRAMES),
        st.integers(0, CHANGES - 1),
        st.integers(0, 5),
    )
    def check(
        expression: sympy.Expr,
        rewrite: Callable[[sympy.Expr], sympy.Expr],
        write: tuple[Callable[[sympy.Expr], str], Callable[[sympy.Expr], str]],
        frames: tuple[str, str, str],
        choice: int,
        place: int,
    ) -> None:
        nonlocal num_same, num_other
        solution = frames[0].replace("#", write[0](expression))
        rewritten = write[1](rewrite(expression))
        same, unlike = (frame.replace("#", rewritten) for frame in frames[1:])
        num_same += 1
        if not is_right(solution, same):
            missed.append((solution, same))
        num_other += 1
        assert not is_right(solution, unlike), (solution, unlike)
        other = changed(expression, choice, place)
        if other.is_finite is not False and differ(expression, other):
            num_other += 1
            answer = frames[1].replace("#", write[1](other))
            assert not is_right(solution, answer), (solution, answer)

    check()
    assert num_same + num_other >= MIN_GENERATED
    assert len(missed) <= MAX_MISSED * num_same, missed[:20]


PIECES = r"""
\frac \sqrt \binom \log \sin \lfloor \pm \cup \in \left \text{a} \begin{pmatrix}
\end{pmatrix} \\ & \{ \} { } ( ) [ ] | 1 x i , ; : ^ _ ' ! = < % - / Eq Matrix Interval
"""


@settings(max_examples=400, derandomize=True, database=None, deadline=None)
@given(
    st.text("(){}[]|^_+-*/=<>!,;:.%$&\\ 0123xyepi", max_size=30)
    | st.lists(
        st.sampled_from(PIECES.split()),
        max_size=12,
    ).map(" ".join)
)
def test_whatever_is_written_has_a_meaning_or_none(text: str) -> None:
    with suppress(Unreadable):
        read_answer(text)
    assert judge_answer(f"\\boxed{{{text}}}", "987654").correct is False


def test_no_answer_runs_as_a_program() -> None:
    for text in (
        "__import__('os').getpid()",
        "().__class__",
        "exec('1')",
        "1 if 1 else 2",
    ):
        with pytest.raises(Unreadable):
            read_answer(text)
