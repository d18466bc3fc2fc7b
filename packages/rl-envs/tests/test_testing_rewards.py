"""`examine_environment`: each check passes correct input and finds one defect."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rl_envs import (
    CalculatorEnvironment,
    CalculatorTasks,
    EnvironmentContractError,
    EnvironmentInterface,
    EnvironmentReturn,
    SortingEnvironment,
    SortingTasks,
    TaskError,
)
from rl_envs.python_file import load_from_file
from rl_envs.testing import Examination, Finding, assert_passed, examine_environment
from rl_envs.testing.responses import gold_of, prompt_messages, trials
from rl_envs.worlds.countdown import CountdownEnvironment, CountdownTasks

ROWS = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(10, 22)]

Change = Callable[["Judge", list[Any], list[Any], list[float]], None]


class Judge(EnvironmentInterface[Any]):
    """Rewards the row's answer, with one change."""

    many_turns = False
    change: Change | None = None
    calls = 0

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        self.calls += 1
        said = [log[-1]["content"] for log in message_log_batch]
        rewards = [
            float(text == row["answer"])
            for text, row in zip(said, metadata, strict=True)
        ]
        if self.change is not None:
            self.change(message_log_batch, metadata, rewards)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in said],
            metadata=list(metadata),
            next_stop_strings=[None] * len(said),
            rewards=rewards,
            terminateds=[True] * len(said),
            answers=said,
        )


def judged(
    change: Any = None,
    *,
    base: type[Judge] = Judge,
    many_turns: bool | None = False,
    **limits: Any,
) -> dict[str, Finding]:
    """Return findings by name; the class cannot be pickled, as no module has it."""
    fields = {"change": change, "many_turns": many_turns, "__module__": __name__}
    cls = type("Local", (base,), fields)
    found = examine_environment(cls(), ROWS, Examination(**limits))
    return {finding.check: finding for finding in found}


def failed(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.status == "fail"}


@pytest.mark.parametrize(
    ("env", "rows"),
    [
        (SortingEnvironment, SortingTasks(num_digits=5).held_out(12)),
        (CountdownEnvironment, CountdownTasks().held_out(12)),
        (CalculatorEnvironment, CalculatorTasks(3).held_out(12)),
    ],
    ids=["sorting", "countdown", "calculator"],
)
def test_worlds_pass_every_check(env: Any, rows: list[dict[str, Any]]) -> None:
    found = examine_environment(env, rows)
    assert_passed(found)
    assert [finding.check for finding in found if finding.status == "skip"] == []
    assert len(found) == 12


def test_a_right_judge_only_cannot_be_pickled() -> None:
    found = judged()
    assert failed(found) == set()
    skipped = found["the same in another process"]
    assert skipped.status == "skip"
    assert "cannot be pickled" in skipped.reason


def full_where(kind: Callable[[str, Any], bool]) -> Change:
    def change(env: Any, logs: Any, metadata: Any, rewards: list[float]) -> None:
        for row, (log, columns) in enumerate(zip(logs, metadata, strict=True)):
            if kind(log[-1]["content"], columns):
                rewards[row] = 1.0

    return change


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (lambda text, row: text == "", "empty responses earn less"),
        (lambda text, row: len(text) == 24, "garbage earns less"),
        (lambda text, row: text == row["prompt"], "the copied prompt earns less"),
        (
            lambda text, row: text.isdigit() and len(text) == len(row["answer"]),
            "one changed character earns less",
        ),
    ],
)
def test_a_wrong_response_with_the_full_reward_is_found(kind: Any, check: str) -> None:
    found = judged(full_where(kind))
    assert failed(found) == {check}
    finding = found[check]
    assert finding.row is not None
    assert finding.response is not None
    assert kind(finding.response, ROWS[finding.row])
    assert finding.response != ROWS[finding.row]["answer"]


def test_false_accepts_are_counted_limited_and_excused() -> None:
    name = "one changed character earns less"
    change = full_where(lambda text, row: text[1:] == row["answer"][1:] != "")
    strict = judged(change, max_accepted_changes=0.0)[name]
    count, _, rest = strict.reason.partition(" of ")
    share = int(count) / int(rest.split()[0])
    assert 0.0 < share < 1.0
    assert strict.status == "fail"
    assert judged(change, max_accepted_changes=share)[name].status == "pass"
    cls = type("Local", (Judge,), {"change": change, "__module__": __name__})
    excused: list[str] = []

    def excuse(row: Any, text: str) -> bool:
        excused.append(text)
        return text[1:] == row["answer"][1:]

    found = examine_environment(cls(), ROWS, excuse=excuse)
    assert len(excused) == int(count)
    assert_passed(found)


def halve(env: Any, logs: Any, metadata: Any, rewards: list[float]) -> None:
    rewards[:] = [reward / 2 for reward in rewards]


def test_a_gold_answer_that_earns_less_is_found() -> None:
    found = judged(halve)
    assert failed(found) == {"gold answers earn the full reward"}
    assert found["gold answers earn the full reward"].response == ROWS[0]["answer"]
    assert failed(judged(halve, full_reward=0.5)) == set()


def count_calls(env: Any, logs: Any, metadata: Any, rewards: list[float]) -> None:
    rewards[:] = [reward - 0.001 * env.calls for reward in rewards]


def look_at_neighbours(env: Any, logs: Any, metadata: Any, rewards: Any) -> None:
    rewards[:] = [r - 0.1 * (place % 2) for place, r in enumerate(rewards)]


def look_at_size(env: Any, logs: Any, metadata: Any, rewards: Any) -> None:
    rewards[:] = [r - 0.001 * len(rewards) for r in rewards]


@pytest.mark.parametrize("change", [count_calls, look_at_neighbours, look_at_size])
def test_a_reward_that_depends_on_more_than_the_row_is_found(change: Any) -> None:
    found = judged(change, full_reward=0.5)
    assert failed(found) == {"the same in any order and batch", "interface"}
    meant = judged(change, full_reward=0.5, deterministic=False)
    assert failed(meant) == set()


def mutate(env: Any, logs: Any, metadata: Any, rewards: Any) -> None:
    for columns in metadata:
        columns["seen"] = True


def test_a_changed_argument_is_found() -> None:
    found = judged(mutate)
    assert failed(found) == {"arguments are left alone", "interface"}
    assert "metadata" in found["arguments are left alone"].reason


def refuse_blanks(env: Any, logs: Any, metadata: Any, rewards: Any) -> None:
    for log in logs:
        if not log[-1]["content"]:
            raise IndexError("string index out of range")


def test_the_response_that_step_cannot_stand_is_named() -> None:
    found = judged(refuse_blanks)
    (name,) = failed(found)
    assert name == "step judges any response"
    assert found[name].response == ""
    assert "IndexError" in found[name].reason


def wait(env: Any, logs: Any, metadata: Any, rewards: Any) -> None:
    end = time.perf_counter() + 0.002 * len(logs)
    while time.perf_counter() < end:
        pass


def test_a_slow_judge_is_found() -> None:
    assert failed(judged(wait, max_row_s=0.001)) == {"time per row"}


class GoesOn(Judge):
    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        result = super().step(message_log_batch, metadata)
        ends = [log[-1]["content"] != "" for log in message_log_batch]
        return result._replace(terminateds=ends)


def test_turns_are_as_declared() -> None:
    name = "conversations end as declared"
    found = judged(base=GoesOn)
    assert failed(found) == {name}
    assert found[name].response == ""
    assert failed(judged(base=GoesOn, many_turns=True)) == set()
    assert judged(base=GoesOn, many_turns=None)[name].status == "skip"


class SaysItPickles(Judge):
    def __getstate__(self) -> Any:
        return {"lock": itertools.count, "fn": lambda: None}


class OfThisProcess(Judge):
    """Rewards nothing once unpickled in another process."""

    def __getstate__(self) -> Any:
        return {"moved": True}

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        result = super().step(message_log_batch, metadata)
        if getattr(self, "moved", False):
            return result._replace(rewards=[0.0] * len(metadata))
        return result


def test_a_copy_must_judge_alike(tmp_path: Path) -> None:
    name = "the same in another process"
    found = {f.check: f for f in examine_environment(SaysItPickles(), ROWS)}
    assert found[name].status == "fail"
    assert "cannot be pickled" in found[name].reason
    file = tmp_path / "moved.py"
    source = Path(__file__).read_text()
    start, end = source.index("class Judge("), source.index("def judged(")
    first, last = source.index("class OfThisProcess"), source.index("def test_a_copy")
    file.write_text(
        "from __future__ import annotations\n"
        "from rl_envs import EnvironmentInterface, EnvironmentReturn\n"
        "from typing import Any\n" + source[start:end] + source[first:last]
    )
    for wanted, status in (("Judge", "pass"), ("OfThisProcess", "fail")):
        cls = load_from_file(file, wanted, kind="environment", thing="class")
        found = {f.check: f for f in examine_environment(cls(), ROWS)}
        assert found[name].status == status, found[name].reason


def test_rows_without_gold_and_rows_that_cannot_be_judged() -> None:
    def reward(prompt: str, response: str) -> float:
        return float(response == prompt[::-1])

    found = {f.check: f for f in examine_environment(reward, [{"prompt": "ab"}])}
    assert found["gold answers earn the full reward"].status == "skip"
    assert found["one changed character earns less"].status == "skip"
    unusable = examine_environment("countdown", [{"prompt": "1 2>3=", "answer": "1+2"}])
    assert unusable[0].status == "fail"
    assert "'numbers'" in unusable[0].reason
    with pytest.raises(EnvironmentContractError, match="checks failed"):
        assert_passed(unusable)
    with pytest.raises(TaskError, match="at least one row"):
        examine_environment("sorting", [])
    with pytest.raises(TaskError, match="row 0 must have a column 'prompt'"):
        examine_environment("sorting", [{"answer": "1"}])
    with pytest.raises(TaskError, match="one entry per row: got 0 for 1"):
        examine_environment("sorting", [{"answer": "1"}], prompts=[])


def test_prompts_may_be_given_apart_from_the_columns() -> None:
    seen: list[list[str]] = []

    def reward(prompt: str, response: str, **columns: Any) -> float:
        seen.append([prompt, *sorted(columns)])
        return float(response == columns["answer"])

    rows = [{"source": f"{n}", "answer": f"is {n}"} for n in range(10, 14)]
    prompts = [[{"role": "user", "content": f"Say {n}."}] for n in range(10, 14)]
    assert_passed(examine_environment(reward, rows, prompts=prompts))
    assert {prompt for prompt, *_ in seen} == {f"Say {n}." for n in range(10, 14)}
    # The environment's columns are the row's: no prompt is added to them.
    assert {tuple(columns) for _, *columns in seen} == {("answer", "source")}


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 9))
def test_trials_are_a_function_of_rows_and_seed(golds: list[str], seed: int) -> None:
    rows = [{"prompt": f"q{n}", "answer": gold} for n, gold in enumerate(golds)]
    config = Examination(seed=seed)
    prompts = [prompt_messages(row, n) for n, row in enumerate(rows)]
    found = trials(rows, prompts, config)
    assert found == trials(rows, prompts, config)
    for trial in found:
        gold = golds[trial.row]
        if trial.kind == "gold":
            assert trial.response == gold
            continue
        assert trial.response != gold
        if trial.kind == "change":
            assert len(trial.response) == len(gold)
            different = [a != b for a, b in zip(trial.response, gold, strict=True)]
            assert sum(different) == 1


def test_gold_and_prompts_of_rows() -> None:
    assert gold_of({"answer": " ", "ground_truth": 3}) == "3"
    assert gold_of({"answer": True}) is None
    assert gold_of({"answer": "1", "solution": "2"}, "solution") == "2"
    log = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt_messages({"messages": log}, 0) == log[:1]
    assert prompt_messages({"prompt": log[:1]}, 0) == log[:1]


def test_an_examination_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from rl_distributed.extras import leave_torch_out\n"
        "leave_torch_out()\n"
        "from rl_envs.testing import assert_passed, examine_environment\n"
        "rows = [{'prompt': '21=', 'answer': '12'}]\n"
        "assert_passed(examine_environment('sorting', rows))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
