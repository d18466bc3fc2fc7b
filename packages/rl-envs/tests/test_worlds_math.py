from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_envs import (
    MathConfig,
    MathEnvironment,
    MessageLogError,
    RemoteEnvironment,
    SolutionError,
    check_environment,
    create_env,
)
from rl_envs.limited_server import answer_request

TOWER = "9^{9^{9^{9^9}}}"


def log_of(response: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": response},
    ]


@pytest.fixture(scope="module")
def environment() -> Iterator[MathEnvironment]:
    environment = MathEnvironment(MathConfig(num_workers=1, timeout_s=20.0))
    yield environment
    environment.shutdown()


def judges() -> list[psutil.Process]:
    """Return this process's children that compare answers."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any("judge_process" in part for part in child.cmdline()):
                found.append(child)
    return found


def test_answers_count_by_what_they_mean(environment: MathEnvironment) -> None:
    cases = [
        ("It is $\\frac{1}{2}$.", "0.5", True),
        ("so \\boxed{0.5}", r"\frac{1}{2}", True),
        ("first 3, then \\boxed{4}", "4", True),
        ("\\boxed{4}, or rather 5", "4", True),
        ("x = 42", "42", True),
        ("72 clips", "She sold 48/2 = 24.\n#### 72", True),
        ("1,000", "#### 1000", True),
        ("50%", "0.5", True),
        ("$\\boxed{(1,2]}$", "(1,2]", True),
        ("\\boxed{\\{1,2,3\\}}", r"\{3,2,1\}", True),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("\\boxed{3\\sqrt{2}}", r"\sqrt{18}", True),
        ("\\boxed{5\\text{ cm}}", "5", True),
        ("Tuesday", "Tuesday", True),
        ("5", "-5", False),
        ("10", "10^{-1}", False),
        ("$[1,2]$", "(1,2]", False),
        ("I do not know", "5", False),
        ("", "5", False),
        ("\\boxed{", "5", False),
    ]
    result = environment.step(
        [log_of(response) for response, _, _ in cases],
        [{"ground_truth": truth} for _, truth, _ in cases],
    )
    assert isinstance(result.rewards, torch.Tensor)
    for (response, truth, right), reward in zip(
        cases, result.rewards.tolist(), strict=True
    ):
        assert reward == float(right), (response, truth)
    assert result.terminateds.all()
    assert result.answers is not None
    assert result.answers[4] == "42"


def test_it_keeps_the_contract(environment: MathEnvironment) -> None:
    check_environment(
        environment, [log_of("4"), log_of("5")], [{"answer": 4}, {"answer": "4"}]
    )


def test_a_killed_judge_is_replaced(environment: MathEnvironment) -> None:
    environment.step([log_of("4")], [{"answer": "4.0"}])
    judge = judges()[0]
    os.kill(judge.pid, signal.SIGKILL)
    judge.wait(60)
    result = environment.step([log_of("4")], [{"answer": "4.0"}])
    assert result.rewards.tolist() == [1.0]  # type: ignore[union-attr]


def test_what_takes_too_long_counts_as_wrong_and_holds_nothing_up() -> None:
    others = set(judges())
    environment = MathEnvironment({"timeout_s": 3.0, "num_workers": 2})
    rows = ["4", f"${TOWER}$", "5"]
    other = TOWER.replace("9}}}", "8}}}")
    truths = [{"answer": "4.0"}, {"answer": other}, {"answer": "5.0"}]
    result = environment.step([log_of(row) for row in rows], truths)
    assert result.rewards.tolist() == [1.0, 0.0, 1.0]  # type: ignore[union-attr]
    _, metrics = environment.global_post_process_and_metrics(
        {
            "rewards": result.rewards,
            "metadata": result.metadata,
            "group_index": torch.tensor([0, 0, 1]),
            "truncated": torch.tensor([False, True, False]),
        }
    )
    assert metrics["unverified_fraction"] == pytest.approx(1 / 3)
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["pass@samples_per_prompt"] == 1.0
    assert metrics["fraction_of_samples_properly_ended"] == pytest.approx(2 / 3)
    started = set(judges()) - others
    environment.shutdown()
    assert started
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_letters_of_multiple_choice() -> None:
    environment = create_env("math", {"verifier_type": "english_multichoice"})
    responses = {
        "Answer: B": "B",
        "The answer is (C).": "C",
        "answer: $\\boxed{D}$": "D",
        "\\boxed{\\text{A}}": "A",
        "Answer: A. No, wait. Answer: B": "B",
        "**Answer: b**": "B",
        "The answer is unknown": None,
        "Because": None,
    }
    result = environment.step(
        [log_of(text) for text in responses], [{"answer": "(B)"}] * len(responses)
    )
    assert result.answers == list(responses.values())
    assert [reward == 1.0 for reward in result.rewards.tolist()] == [  # type: ignore[union-attr]
        letter == "B" for letter in responses.values()
    ]


def test_a_copy_has_processes_of_its_own(environment: MathEnvironment) -> None:
    copy = pickle.loads(pickle.dumps(environment))
    assert copy.config == environment.config
    assert copy.step([log_of("1")], [{"answer": "1.0"}]).rewards.tolist() == [1.0]
    copy.shutdown()
    result = environment.step([log_of("1")], [{"answer": "1.0"}])
    assert result.rewards.tolist() == [1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [([{}], "ground_truth"), ([], "one entry per"), ([{"answer": None}], "answer")],
)
def test_rows_without_a_solution(
    environment: MathEnvironment, metadata: list[dict[str, None]], said: str
) -> None:
    with pytest.raises(MessageLogError, match=said):
        environment.step([log_of("1")], metadata)


@pytest.mark.parametrize(
    "error",
    [MemoryError, RecursionError, ZeroDivisionError, ValueError, AssertionError],
)
def test_a_judge_that_raises_pays_nothing(error: type[Exception]) -> None:
    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        raise error("on purpose")

    request = {"response": "\\boxed{5}", "solution": "5", "limit_s": 60.0}
    assert answer_request(request, answer) == {"failed": error.__name__}
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("error", ["MemoryError", "RecursionError", "KeyError"])
def test_an_environment_whose_judge_raises(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the comparing process, parsing the answer "666" raises.
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins\n"
        "from rl_envs.mathematics import judging\n"
        "read = judging.read_answer\n"
        "def raising(text):\n"
        "    if text == '666':\n"
        f"        raise builtins.{error}('on purpose')\n"
        "    return read(text)\n"
        "judging.read_answer = raising\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = MathEnvironment({"timeout_s": 60.0})
    responses = ["\\boxed{5}", "\\boxed{666}", "\\boxed{5.0}"]
    result = environment.step(
        [log_of(text) for text in responses],
        [{"answer": "5"}, {"answer": "666.0"}, {"answer": "5"}],
    )
    environment.shutdown()
    assert result.rewards.tolist() == [1.0, 0.0, 1.0]  # type: ignore[union-attr]
    assert [row["verified"] for row in result.metadata] == [True, False, True]
    _, metrics = environment.global_post_process_and_metrics(
        {"rewards": result.rewards, "metadata": result.metadata}
    )
    assert metrics["unverified_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "answer",
    [TOWER, "(10^9)!", "(" * 1900 + "5" + ")" * 1900, "5" + "^5" * 1900],
    ids=["tower", "factorial", "brackets", "powers"],
)
def test_an_answer_that_ends_its_judge_pays_nothing(answer: str) -> None:
    environment = MathEnvironment({"timeout_s": 3.0})
    responses = [f"\\boxed{{{answer}}}", "\\boxed{5}"]
    result = environment.step(
        [log_of(text) for text in responses], [{"answer": "5"}, {"answer": "5.0"}]
    )
    environment.shutdown()
    assert result.rewards.tolist() == [0.0, 1.0]  # type: ignore[union-attr]
    assert [row["verified"] for row in result.metadata] == [False, True]


def test_solutions_without_a_meaning_are_named(environment: MathEnvironment) -> None:
    rows = [{"answer": "5"}, {"answer": "\\frac{1}{"}, {"ground_truth": "x +* 3"}]
    with pytest.raises(SolutionError) as caught:
        environment.step([log_of("\\boxed{1}")] * len(rows), rows)
    said = str(caught.value)
    assert "2 of 3 solutions" in said
    assert "metadata[1]: '\\\\frac{1}{'" in said
    assert "metadata[2]: 'x +* 3'" in said
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), SolutionError)


def test_unusable_rows_are_found_before_training(environment: MathEnvironment) -> None:
    rows: list[dict[str, Any]] = [
        {"answer": 5},
        {"question": "?"},
        {"answer": "x +* 3"},
        {"answer": "#### 72"},
        {"answer": TOWER},
    ]
    short = MathEnvironment({"timeout_s": 3.0})
    found = short.unusable_rows(rows)
    short.shutdown()
    assert list(found) == [1, 2, 4]
    assert "must have the column 'ground_truth' or 'answer'" in found[1]
    assert "'x +* 3' cannot be read" in found[2]
    assert "too long or too much memory" in found[4]
    letters = MathEnvironment({"verifier_type": "english_multichoice"})
    assert list(letters.unusable_rows([{"answer": "(B)"}, {"answer": "Paris"}])) == [1]
    with pytest.raises(SolutionError, match="one letter"):
        letters.step([log_of("Answer: B")], [{"answer": "Paris"}])


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        create_env("math", {"timeout": 1.0})
    with pytest.raises(ConfigError, match="num_workers"):
        MathEnvironment({"num_workers": 0})


def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sympy.py").write_text("raise ImportError('not there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = MathEnvironment()
    with pytest.raises(ConfigError, match=r"install rl-envs\[math\]"):
        environment.step([log_of("1")], [{"answer": "2"}])


def test_a_judge_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    environment = MathEnvironment()
    with pytest.raises(DeadlineExceededError, match="did not start"):
        environment.step([log_of("1")], [{"answer": "2"}])


@pytest.mark.usefixtures("ray_cluster")
def test_it_runs_in_a_worker() -> None:
    environment = RemoteEnvironment("math", num_workers=1)
    result = environment.step([log_of("4")], [{"answer": "4.0"}])
    assert result.rewards.tolist() == [1.0]  # type: ignore[union-attr]
    assert environment.unusable_rows([{"answer": "4"}, {}]).keys() == {1}
    environment.shutdown()
