"""`rl envs`: lists, checks, plays."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - first, as in a process that trains: batches are tensors

from rl_cli.main import _run
from rl_envs import CalculatorTasks, SortingTasks

Capture = pytest.CaptureFixture[str]

MY_ENV = '''
from rl_envs import EnvironmentInterface, EnvironmentReturn, Task, TaskSource

class Reverse(EnvironmentInterface):
    """Rewards the prompt backwards."""
    many_turns = False

    def __init__(self, strict=True):
        self.strict = strict

    def step(self, message_log_batch, metadata):
        said = [log[-1]["content"] for log in message_log_batch]
        right = [
            text == row["answer"]
            or not self.strict and len(text) == len(row["answer"]) > 0
            for text, row in zip(said, metadata)
        ]
        return EnvironmentReturn(
            [{"role": "environment", "content": ""} for _ in said], list(metadata),
            [None] * len(said), [float(r) for r in right], [True] * len(said), said,
        )

class Words(TaskSource):
    def __init__(self, length=4, seed=0):
        super().__init__("words", seed=seed)
        self.length = length

    def propose(self, rng):
        word = "".join(rng.choices("abcdefgh", k=self.length))
        return Task(word + "?", word[::-1])

def reward(prompt, response, answer):
    return float(response == answer)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(MY_ENV)
    rows = [{"prompt": f"{n}+{n}", "answer": f"is {2 * n}"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def called(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    """Return the output of `rl envs ... --json`."""
    done = _run(["envs", *arguments, "--json"], False)
    out, err = capsys.readouterr()
    assert done == code, err
    return json.loads(out)


def failed(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["check"]: c for c in report["checks"] if c["status"] == "fail"}


def test_the_list_says_what_there_is(capsys: Capture) -> None:
    listed = {row["name"]: row for row in called(capsys, "list")}
    assert listed["countdown"]["makes_tasks"] is True
    assert listed["countdown"]["sandbox"] == ""
    assert listed["code"]["sandbox"] in {"seccomp", "landlock", "namespaces"} or (
        listed["code"]["sandbox"].startswith("none: ")
    )
    assert _run(["envs", "list"], False) == 0
    text = " ".join(capsys.readouterr().out.split())
    for row in listed.values():
        assert row["name"] in text
        by_itself = row["builds_its_extra"]
        state = "(installed when first used)" if by_itself else "(missing)"
        assert row["extra_installed"] or f"{row['extra']} {state}" in text
    assert [n for n, row in listed.items() if row["builds_its_extra"]] == ["verifiers"]


def test_a_world_passes(capsys: Capture) -> None:
    report = called(capsys, "check", "sorting", "tasks.num_digits=4", "--tasks", "6")
    assert report["passed"] is True
    assert failed(report) == {}
    assert len(report["checks"]) == 17


def test_a_failure_is_shown_with_its_row(folder: Path, capsys: Capture) -> None:
    arguments = ["my_env.py:Reverse", "--world", "my_env.py:Words", "--tasks", "8"]
    assert failed(called(capsys, "check", *arguments)) == {}
    report = called(capsys, "check", *arguments, "strict=false", code=1)
    assert report["passed"] is False
    assert set(failed(report)) == {"one changed character earns less"}
    (finding,) = failed(report).values()
    assert _run(["envs", "check", *arguments, "strict=false"], False) == 1
    out = capsys.readouterr().out
    assert f"response: {finding['response']!r}" in out
    assert f"row {finding['row']}" in out
    assert "16 passed, 1 failed, 0 skipped" in out


def test_settings_come_from_a_file_and_the_command_line(
    folder: Path, capsys: Capture
) -> None:
    (folder / "loose.yaml").write_text("strict: false\ntasks: {length: 6}\n")
    arguments = ["my_env.py:Reverse", "--world", "my_env.py:Words", "--tasks", "8"]
    report = called(capsys, "check", *arguments, "--config", "loose.yaml", code=1)
    (finding,) = failed(report).values()
    assert len(finding["response"]) == 6
    fixed = called(capsys, "check", *arguments, "--config", "loose.yaml", "strict=true")
    assert fixed["passed"] is True
    loose = called(
        capsys, "check", *arguments, "--config", "loose.yaml", "--max-accepted", "1"
    )
    assert loose["passed"] is True


@pytest.mark.parametrize(
    "named", [["my_env.py"], ["reward", "file=my_env.py"]], ids=["file", "setting"]
)
def test_a_reward_file_is_checked_with_rows(
    named: list[str], folder: Path, capsys: Capture
) -> None:
    report = called(capsys, "check", *named, "--data", "rows.jsonl", "--tasks", "5")
    assert report["passed"] is True
    checks = {each["check"]: each for each in report["checks"]}
    assert checks["rows can be judged"]["reason"] == "5 rows"
    assert "same seed, same tasks" not in checks
    other = called(
        capsys, "check", *named, "--data", "rows.jsonl", "--gold", "prompt", code=1
    )
    assert "gold answers earn the full reward" in failed(other)


ROWS_OF_DATA_SETS = {
    "question and solution": [
        {"question": f"{n}+{n}", "solution": f"is {2 * n}"} for n in range(9)
    ],
    "a conversation": [
        {
            "conversations": [
                {"from": "human", "value": f"{n}+{n}"},
                {"from": "gpt", "value": f"is {2 * n}"},
            ]
        }
        for n in range(9)
    ],
    "numbers": [{"problem": n, "target": f"is {n}"} for n in range(10, 19)],
}


@pytest.mark.parametrize("name", ROWS_OF_DATA_SETS)
def test_rows_are_read_as_in_training(
    name: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = map(json.dumps, ROWS_OF_DATA_SETS[name])
    (folder / "own.jsonl").write_text("\n".join(lines))
    # The reward needs the column `answer`, which training can also derive from others.
    report = called(
        capsys, "check", "my_env.py", "--data", "own.jsonl", "--gold", "answer"
    )
    assert report["passed"] is True
    out = played(
        capsys,
        monkeypatch,
        "wrong\n",
        "my_env.py",
        "--data",
        "own.jsonl",
        "--tasks",
        "1",
    )
    asked = {"numbers": "10"}.get(name, "0+0")
    assert f"[user] {asked}\n" in out


def test_the_column_of_the_prompts_may_have_any_name(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"source": f"{n}+{n}", "answer": f"is {2 * n}"} for n in range(9)]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = ["my_env.py", "--data", "own.jsonl"]
    assert _run(["envs", "check", *named], False) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has no column for the prompt" in said
    assert "it has 'source', 'answer'" in said
    assert "--prompt COLUMN" in said
    assert called(capsys, "check", *named, "--prompt", "source")["passed"] is True
    out = played(
        capsys, monkeypatch, "is 0\n", *named, "--prompt", "source", "--tasks", "1"
    )
    assert "[user] 0+0\n" in out
    assert "score: 1 of 1" in out


def played(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str
) -> str:
    """Return the output of `rl envs play` with text piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert _run(["envs", "play", *arguments], False) == 0
    return capsys.readouterr().out


def test_a_person_plays(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = SortingTasks(4, seed=3).held_out(3, unique=False)
    answers = [tasks[0]["answer"], "wrong", tasks[2]["answer"]]
    arguments = ["sorting", "tasks.num_digits=4", "--seed", "3", "--tasks", "3"]
    out = played(capsys, monkeypatch, "\n".join(answers) + "\n", *arguments)
    for task in tasks:
        assert f"[user] {task['prompt']}" in out
    assert "answer:" not in out
    assert "reward 0 (1 of 2 with the full reward, mean reward 0.5)" in out
    last = "2 of 3 with the full reward, mean reward 0.667"
    assert out.endswith(f"reward 1 ({last})\nscore: {last}\n")
    shown = played(capsys, monkeypatch, "1\n", *arguments, "--show-answer")
    assert f"answer: {tasks[0]['answer']}" in shown
    assert "the input has ended" in shown
    assert "score: 0 of 1" in shown


def test_a_person_plays_many_turns(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = CalculatorTasks(seed=5).held_out(1, unique=False)
    arguments = ["calculator", "call_format=brackets", "--seed", "5", "--tasks", "1"]
    text = f"[6*7]\n{task['answer']}\n"
    out = played(capsys, monkeypatch, text, *arguments)
    assert out.index(task["prompt"]) < out.index("42") < out.index("reward 1")
    assert "score: 1 of 1 with the full reward" in out
    cut = played(capsys, monkeypatch, text, *arguments, "--max-turns", "1")
    assert "score: 0 of 1 with the full reward" in cut


@pytest.mark.parametrize("end", ["\n", "", "\n\n"])
def test_an_answer_of_several_lines_ends_with_an_empty_line(
    end: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "poem.jsonl").write_text('{"prompt": "Write.", "answer": "a\\nb"}\n')
    arguments = ["my_env.py", "--data", "poem.jsonl"]
    assert "score: 1 of 1" in played(capsys, monkeypatch, f"a\nb{end}", *arguments)
    one = played(capsys, monkeypatch, f"a\nb{end}", *arguments, "--one-line")
    assert "score: 0 of 1" in one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sortng"], "did you mean 'sorting'"),
        (["none.py:Thing"], "there is no file none.py"),
        (["my_env.py:Revers"], "did you mean 'Reverse'"),
        (["my_env.py:Reverse"], "--data FILE, or a task source with --world"),
        (["my_env.py:Reverse", "--world", "my_env.py:reward"], "rejects ['seed']"),
        (["my_env.py:Reverse", "--world", "countdwn"], "did you mean 'countdown'"),
        (["my_env.py:Reverse", "tasks.length=3"], "tasks.length has no effect"),
        (["countdown", "--world", "countdown", "--data", "x"], "mutually exclusive"),
        (["countdown", "--prompt", "question"], "--prompt names a column of --data"),
        (["my_env.py", "--data", "rows.jsonl", "--prompt", "pormpt"], "'prompt'"),
        (["countdown", "tasks=3"], "write tasks.KEY=VALUE"),
        (["countdown", "tasks.num_numbrs=3"], "tasks.KEY=VALUE"),
        (
            ["my_env.py:Reverse", "streng=1", "--data", "rows.jsonl"],
            "cannot be created",
        ),
        (["countdown", "--data", "none.jsonl"], "does not exist"),
        (["countdown", "--config", "none.yaml"], "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named(
    arguments: list[str], message: str, folder: Path, capsys: Capture
) -> None:
    assert _run(["envs", "check", *arguments], False) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


GUESS = '''
async def agent(task, client):
    """Asks for a digit, says whether it is too small, and asks again."""
    asked = [{"role": "user", "content": task.prompt}]
    for guesses in (1, 2):
        answer = await client.chat.completions.create(
            model=task.model, messages=asked
        )
        text = answer.choices[0].message.content
        if text == "stop":
            raise RuntimeError("asked to stop")
        if text == task["answer"]:
            return {"guessed": 1 / guesses}
        asked += [{"role": "assistant", "content": text},
                  {"role": "user", "content": f"not {text or 'that'}"}]
    return 0.0
'''


@pytest.fixture
def guess(folder: Path) -> list[str]:
    (folder / "guess.py").write_text(GUESS)
    rows = [{"prompt": "digit?", "answer": str(n)} for n in (3, 7)]
    (folder / "digits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["agent", "file=guess.py", "--data", "digits.jsonl"]


def test_a_person_answers_an_agent(
    guess: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = played(capsys, monkeypatch, "4\n3\n7\n", *guess)
    assert out.count("[user] digit?") == 2
    turns = ["[assistant] 4", "[user] not 4", "[assistant] 3", "reward/guessed: 0.5"]
    places = [out.index(text) for text in turns]
    assert places == sorted(places)
    assert out.endswith("score: 1 of 2 with the full reward, mean reward 0.75\n")
    out = played(capsys, monkeypatch, "4\n", *guess)
    assert out.count("[user] digit?") == 1
    assert "the input has ended" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("stop\n"))
    assert _run(["envs", "play", *guess], False) == 1
    assert "task 1: RuntimeError: asked to stop" in capsys.readouterr().err


def test_an_agent_is_checked(guess: list[str], folder: Path, capsys: Capture) -> None:
    report = called(capsys, "check", *guess)
    found = {check["check"]: check for check in report["checks"]}
    assert failed(report) == {}
    assert found["gold answers earn the full reward"]["status"] == "pass"
    assert found["the same a second time"]["status"] == "pass"
    # One that accepts anything, and one that never asks.
    text = (folder / "guess.py").read_text()
    (folder / "guess.py").write_text(text.replace('text == task["answer"]', "text"))
    report = called(capsys, "check", *guess, code=1)
    assert set(failed(report)) == {
        "garbage earns less",
        "the copied prompt earns less",
        "one changed character earns less",
    }
    (folder / "guess.py").write_text("async def agent(task, client):\n    return 1.0\n")
    assert "the policy is asked" in failed(called(capsys, "check", *guess, code=1))
    (folder / "guess.py").write_text("async def agent(task, client):\n    1 / 0\n")
    report = called(capsys, "check", *guess, code=1)
    assert set(failed(report)) == {"tasks end with a reward"}
    (problem,) = failed(report).values()
    assert problem["reason"].startswith("error: ZeroDivisionError: division by zero")
