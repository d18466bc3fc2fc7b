"""The world `retrieval`: corpora, search, answers, tasks and their split."""

from __future__ import annotations

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError, TaskError
from rl_envs.registry import create_env, create_task_source
from rl_envs.testing import assert_passed, examine_environment, examine_tasks
from rl_envs.worlds.game import played
from rl_envs.worlds.retrieval import (
    RetrievalConfig,
    RetrievalEnvironment,
    RetrievalTasks,
    read_corpus,
)
from rl_envs.worlds.retrieval.answer_matching import exact_match, f1_score
from rl_envs.worlds.retrieval.index import Bm25Index

ROWS = [
    {"title": "Otters", "text": "Otters live on rivers and eat fish."},
    {"title": "Owls", "text": "Owls hunt mice at night."},
    {"contents": "Herons\nHerons stand in rivers and wait for fish."},
]


def test_a_corpus_is_a_folder_a_file_or_rows(tmp_path: Path) -> None:
    of_rows = read_corpus(ROWS)
    assert [each.title for each in of_rows] == ["Otters", "Owls", "Herons"]
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    assert read_corpus(file) == read_corpus(str(file)) == of_rows
    folder = tmp_path / "animals"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "owls.md").write_text("Owls hunt mice.")
    (folder / "a.txt").write_text("Otters eat fish.")
    (folder / "picture.png").write_bytes(b"\xff")
    assert [(d.title, d.text) for d in read_corpus(folder)] == [
        ("a", "Otters eat fish."),
        ("b/owls", "Owls hunt mice."),
    ]


def test_texts_of_a_file_may_have_other_ends_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    row = {"title": "t", "text": "one\u2028two\x85three"}
    line = json.dumps(row, ensure_ascii=False)
    file.write_bytes(f"{line}\r\n{line}\n".encode())
    assert read_corpus(file) == read_corpus([row, row])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must hold at least one document"),
        ("no json", r"corpus.jsonl:1 must be JSON"),
        ('\n{"title": "x"}', r"corpus.jsonl:2 must have a column 'text'"),
        ('{"text": 3}', r"must have a column 'text'"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_corpus(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_corpus(tmp_path / "missing")


def test_search_ranks_by_shared_words_in_a_stable_order() -> None:
    index = Bm25Index(read_corpus(ROWS))
    assert index.search("fish in RIVERS", 3)[0].title == "Herons"
    assert [d.title for d in index.search("owls", 3)] == ["Owls"]
    assert index.search("zebra", 3) == index.search("?!", 3) == []
    same = Bm25Index(read_corpus([{"title": f"t{n}", "text": "w"} for n in range(50)]))
    assert [d.title for d in same.search("w", 4)] == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("response", "answers", "exact", "f1"),
    [
        ("The  Owl.", ["owl"], 1.0, 1.0),
        ("an owl of the night", ["Owl", "night owl"], 0.0, 0.8),
        ("owl owl owl owl", ["owl"], 0.0, 0.4),
        ("mouse", ["owl"], 0.0, 0.0),
        ("", ["owl"], 0.0, 0.0),
        ("the", ["a"], 0.0, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(
    response: str, answers: list[str], exact: float, f1: float
) -> None:
    assert exact_match(response, answers) == exact
    assert f1_score(response, answers) == pytest.approx(f1)


def answered(env: RetrievalEnvironment, response: str, row: dict[str, Any]) -> float:
    log = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": response},
    ]
    return float(env.step([log], [row]).rewards[0])


def test_answers_of_own_rows_over_an_own_corpus() -> None:
    env = RetrievalEnvironment({"corpus": ROWS, "credit": "f1"})
    row = {"golden_answers": ["mice", "small mice"]}
    assert answered(env, "<answer>Mice!</answer>", row) == 1.0
    assert answered(env, "Let me think.\nowls eat mice", row) == pytest.approx(0.5)
    with pytest.raises(MessageLogError, match="must have a column 'answer'"):
        answered(env, "x", {"answer": 3})
    assert set(env.unusable_rows([{"answer": "x"}, {"answers": []}, {}])) == {1, 2}


@pytest.mark.parametrize("call_format", ["tags", "json"])
def test_a_conversation_searches_and_answers(call_format: str) -> None:
    env = RetrievalEnvironment(
        {"corpus": ROWS, "num_results": 1, "max_document_chars": 12,
         "call_format": call_format, "max_turns": 2}
    )  # fmt: skip
    searches = {
        "tags": "I look. <search>owls",
        "json": '<tool_call>{"name": "search", "arguments": {"query": "owls"}}'
        "</tool_call>",
    }
    log = [{"role": "user", "content": "What do owls hunt?"}]
    row: Any = {"answer": "mice", "evidence": ["Owls", "Otters"]}
    log.append({"role": "assistant", "content": searches[call_format]})
    result = env.step([log], [row])
    assert result.observations[0] == [
        {"role": "tool", "content": "[1] Owls: Owls hunt mi..."}
    ]
    assert not result.terminateds[0]
    [row] = result.metadata
    nothing = searches[call_format].replace("owls", "zebras")
    log += [*result.observations[0], {"role": "assistant", "content": nothing}]
    result = env.step([log], [row])
    assert "No document" in result.observations[0][0]["content"]
    # Its two turns are used up: this one is an answer, whatever it requests.
    log += [*result.observations[0], {"role": "assistant", "content": nothing}]
    result = env.step([log], result.metadata)
    assert result.terminateds[0]
    assert result.rewards[0] == 0.0
    batch = {"rewards": result.rewards, "metadata": result.metadata}
    metrics = env.global_post_process_and_metrics(batch)[1]
    assert metrics["evidence_found"] == 0.5
    assert metrics["tool_calls_per_sample"] == 2.0


def test_who_knows_where_to_look_solves_every_task() -> None:
    env = RetrievalEnvironment()
    tasks = RetrievalTasks(1, 4, seed=3)
    for row in tasks.train(20) + tasks.held_out(10):
        game = played(env, row, tasks.searcher)
        assert game.reward == 1.0, row
        assert set(row["evidence"]) <= set(game.columns["found"])


def test_no_fact_is_asked_for_in_both_parts() -> None:
    tasks = RetrievalTasks(1, 3, num_people=20, held_out_fraction=0.3)
    train = {row["fact"] for row in tasks.train(300, unique=False)}
    held_out = {row["fact"] for row in tasks.held_out(100, unique=False)}
    assert len(train) > 30
    assert len(held_out) > 10
    assert not train & held_out


def test_environment_and_tasks_fulfil_their_contracts() -> None:
    assert_passed(examine_tasks(lambda seed: RetrievalTasks(seed=seed), 16))
    env = RetrievalEnvironment({"num_people": 20})
    rows = RetrievalTasks(num_people=20).held_out(8)
    assert_passed(examine_environment(env, rows))
    copy = pickle.loads(pickle.dumps(env))
    assert copy.config == RetrievalConfig(num_people=20)
    assert copy.tool_schemas()[0]["function"]["name"] == "search"


def test_it_is_found_by_name_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(create_env("retrieval"), RetrievalEnvironment)
    assert isinstance(
        create_task_source("retrieval", {"style": "tools"}), RetrievalTasks
    )
    with pytest.raises(TaskError, match="min_hops and max_hops must be 1 to 4"):
        RetrievalTasks(3, 2)
    with pytest.raises(TaskError, match="style must be"):
        RetrievalTasks(style="x")
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "bm25s":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"install rl-envs\[retrieval\]"):
        RetrievalEnvironment()
