from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rl_algorithms import DataConfig, DataModule
from rl_algorithms.data.contamination import NamedRows, find_overlaps
from rl_algorithms.errors import ColumnError, ContaminationError, EmptyDatasetError
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

WORDS = [f"word{n}" for n in range(15)]


def found(
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    ngram: int | None = None,
    **config: Any,
) -> list[tuple[int, int, bool]]:
    overlaps = find_overlaps(
        [NamedRows("train", train)],
        [NamedRows("held-out", held_out)],
        DataConfig(**config),
        ngram=ngram,
    )
    return [(o.train_row, o.held_out_row, o.is_exact) for o in overlaps]


def prompts(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "answer": str(n)} for n, text in enumerate(texts)]


def test_equal_prompts_are_found_whatever_their_answers() -> None:
    train = prompts("one", "two", "three", "two")
    assert found(train, prompts("zero", "two")) == [(1, 1, True), (3, 1, True)]


@pytest.mark.parametrize(
    "other", ["Two  words", " two\nwords ", "\uff54\uff57\uff4f words"]
)
def test_width_case_and_blanks_make_no_difference(other: str) -> None:
    assert found(prompts(other), prompts("two words")) == [(0, 0, True)]


@pytest.mark.parametrize("other", ["3-4=", "3+4", "34="])
def test_signs_make_a_difference(other: str) -> None:
    assert found(prompts(other), prompts("3+4=")) == []


def test_an_ngram_finds_a_task_inside_a_longer_text() -> None:
    task = "How many legs do seven spiders and two ants have?"
    train = [
        {"prompt": "Solve it.", "answer": f"First: {task.lower()} They have 68."},
        {"prompt": "How many legs do seven spiders have?", "answer": "56"},
    ]
    assert found(train, prompts(task)) == []
    assert found(train, prompts(task), ngram=8) == [(0, 0, False)]


@given(
    start=st.integers(0, len(WORDS) - 5),
    size=st.integers(5, 9),
    ngram=st.integers(5, 9),
)
def test_a_run_is_found_exactly_where_it_is_long_enough(
    start: int, size: int, ngram: int
) -> None:
    shared = WORDS[start : start + size]
    train = prompts(" ".join(["before", *shared, "after"]))
    held_out = prompts(" ".join(["other", *shared, "end"]))
    expected = [(0, 0, False)] if len(shared) >= ngram else []
    assert found(train, held_out, ngram=ngram) == expected


def test_conversations_are_compared_by_what_is_asked() -> None:
    def talk(system: str, question: str, answer: str) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }

    train = [talk("a", "why?", "so"), talk("a", "what?", "so")]
    held_out = [talk("b", "why?", "because")]
    assert found(train, held_out) == [(0, 0, True)]
    shared = {"from": "human", "value": "why?"}
    other = {"conversations": [shared, {"from": "gpt", "value": "oh"}]}
    assert found([other], held_out) == [(0, 0, True)]


def test_a_template_may_make_the_difference() -> None:
    train = [{"prompt": "Capital?", "land": "France"}]
    held_out = [{"prompt": "Capital?", "land": "Chile"}]
    assert found(train, held_out) == [(0, 0, True)]
    template = {"prompt_template": "{land}: {prompt}"}
    assert found(train, held_out, **template) == []
    assert found(train, train, **template) == [(0, 0, True)]
    with pytest.raises(ColumnError, match="prompt_template"):
        found(train, prompts("x"), **template)


def test_configured_columns_are_read() -> None:
    train = [{"prompt": "same", "task": "a"}, {"prompt": "same", "task": "b"}]
    held_out = [{"prompt": "same", "task": "b"}]
    assert found(train, held_out, input_key="task") == [(1, 0, True)]


def test_rows_that_say_nothing_are_not_equal() -> None:
    assert found([{"prompt": ""}], [{"prompt": " "}]) == []


# In a run ------------------------------------------------------------------------


def module(
    train: Any, validation: Any, *, parts: Any = None, **config: Any
) -> DataModule:
    return DataModule(
        DataConfig.from_dict({**config, "train": parts}),
        build_tokenizer(TokenizerBuildConfig()),
        kind="prompts",
        batch_size=2,
        train=train,
        validation=validation,
    )


def test_a_run_warns_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rl_algorithms").propagate = True
    with caplog.at_level(logging.WARNING):
        data = module(prompts("1+1=", "2+2=", "3+3="), prompts("2+2=", "9+9="))
    [message] = [r.getMessage() for r in caplog.records if "held-out" in r.getMessage()]
    assert "1 training rows leak 1 held-out rows" in message
    assert "'2+2='" in message
    assert data.counts()["num_train_contaminated"] == 1
    assert len(data.train_dataset) == 3


def test_a_run_without_overlap_says_nothing() -> None:
    data = module(prompts("1+1=", "2+2="), prompts("3+3="))
    assert "num_train_contaminated" not in data.counts()


def test_a_run_stops_drops_or_ignores() -> None:
    train, held_out = prompts("1+1=", "2+2=", "3+3="), prompts("2+2=")
    with pytest.raises(ContaminationError, match="row 1 of dataset"):
        module(train, held_out, contamination={"action": "error"})
    left = module(train, held_out, contamination={"action": "drop"})
    assert len(left.train_dataset) == 2
    ignored = module(train, held_out, contamination={"action": "ignore"})
    assert len(ignored.train_dataset) == 3
    assert "num_train_contaminated" not in ignored.counts()


def test_rows_are_dropped_from_their_own_part_of_a_mixture(tmp_path: Path) -> None:
    # Both parts are of one folder, so that messages have one name for them.
    for split, rows in (
        ("easy", prompts("1+1=", "2+2=", "3+3=")),
        ("hard", prompts("4+4=", "5+5=", "6+6=")),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    parts = [
        {"path": str(tmp_path), "split": split, "name": split}
        for split in ("easy", "hard")
    ]
    data = module(None, prompts("2+2="), parts=parts, contamination={"action": "drop"})
    left = [datum["extra_env_info"]["prompt"] for datum in data.train_dataset]
    assert left == ["1+1=", "3+3=", "4+4=", "5+5=", "6+6="]
    with pytest.raises(ContaminationError, match=r"row 1 of dataset '.*' \(easy\) is"):
        module(None, prompts("2+2="), parts=parts, contamination={"action": "error"})


def test_nothing_left_is_an_error() -> None:
    rows = prompts("1+1=", "2+2=")
    with pytest.raises(EmptyDatasetError, match="leaves no row"):
        module(rows, rows, contamination={"action": "drop"})


def test_an_ngram_of_the_config_is_used() -> None:
    task = "Add one and one and one and one"
    train, held_out = prompts(f"Please! {task}, now.", "2+2="), prompts(task)
    assert "num_train_contaminated" not in module(train, held_out).counts()
    found = module(train, held_out, contamination={"ngram": 6})
    assert found.counts()["num_train_contaminated"] == 1


def test_rows_of_a_split_are_not_the_same() -> None:
    rows = prompts(*(f"{n}+{n}=" for n in range(20)))
    data = module(
        rows, None, split_validation_size=5, contamination={"action": "error"}
    )
    assert data.counts()["num_validation_rows"] == 5


def test_a_stream_cannot_be_searched() -> None:
    with pytest.raises(ConfigError, match="needs all training rows"):
        DataConfig.from_dict({"streaming": True, "contamination": {"action": "drop"}})
