"""Published schemas: small files of each, read as the real data would be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_algorithms import DataConfig, DataModule
from rl_algorithms.data.config import SourceConfig
from rl_algorithms.data.formats import DataFormat, data_formats
from rl_algorithms.data.sources import load_configured
from rl_algorithms.errors import ColumnError, EmptyDatasetError
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

Row = dict[str, Any]
# Captured before any test runs: others may register formats of their own.
BUILT_IN = data_formats.names()
USER = [{"role": "user", "content": "Name a bird."}]
HELPSTEER3: Row = {
    "domain": "general",
    "language": "english",
    "context": USER,
    "response1": "A wren.",
    "response2": "A stone.",
    "overall_preference": -2,
    "individual_preference": [{"score": -2, "reasoning": "a stone is no bird"}],
}
TWO_SUM = "def total(a, b):\n    return a + b\n"
CASES: dict[str, tuple[Row, Row]] = {
    "gsm8k": (
        {
            "question": "4 bags of 300?",
            "answer": "4*300=<<4*300=1200>>1200\n#### 1,200",
        },
        {"prompt": "4 bags of 300?", "ground_truth": "1200"},
    ),
    "math": (
        {
            "problem": "Half of x?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"First $\boxed{x}$, halved: $\boxed{\frac{x}{2}}$.",
        },
        {"prompt": "Half of x?", "ground_truth": r"\frac{x}{2}"},
    ),
    "dapo_math": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "17 + 17?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule"},
            "extra_info": {"index": "9a9b"},
        },
        {"ground_truth": "34", "answer": "34"},
    ),
    "deepscaler": (
        {"problem": "2 + 2?", "answer": "4", "solution": ""},
        {"prompt": "2 + 2?", "answer": "4", "ground_truth": "4"},
    ),
    "openmathinstruct2": (
        {
            "problem": "3 * 3?",
            "generated_solution": r"It is \boxed{9}.",
            "expected_answer": "9",
            "problem_source": "augmented_gsm8k",
        },
        {"prompt": "3 * 3?", "answer": r"It is \boxed{9}.", "ground_truth": "9"},
    ),
    "helpsteer3": (
        HELPSTEER3,
        {"prompt": USER, "chosen": "A wren.", "rejected": "A stone."},
    ),
    "tulu3": (
        {
            "id": "a_1",
            "messages": [*USER, {"role": "assistant", "content": "A wren."}],
            "source": "made/here",
        },
        {"source": "made/here"},
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def total(a, b):\n",
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "entry_point": "total",
        },
        {"answer": "    return a + b\n", "entry_point": "total"},
    ),
    "mbpp": (
        {
            "task_id": 1,
            "text": "Add two numbers.",
            "code": TWO_SUM,
            "test_list": ["assert total(1, 2) == 3"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        {
            "prompt": "Add two numbers.\nYour code should pass these tests:\n"
            "assert total(1, 2) == 3",
            "answer": TWO_SUM,
        },
    ),
    "ifeval": (
        {
            "key": 1000,
            "prompt": "Write without commas.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        },
        {"prompt": "Write without commas."},
    ),
}


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def loaded(folder: Path, name: str, *rows: Mapping[str, Any]) -> list[Row]:
    write(folder, rows)
    config = SourceConfig.from_dict({"format": name, "path": str(folder)})
    return [dict(row) for row in load_configured(config)[0]]


def test_every_format_has_a_case() -> None:
    assert sorted(CASES) == sorted(BUILT_IN)


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_read_and_keeps_its_other_columns(tmp_path: Path, name: str) -> None:
    row, expected = CASES[name]
    (found,) = loaded(tmp_path, name, row)
    assert {key: found[key] for key in expected} == expected
    assert set(row) <= set(found)


@pytest.mark.parametrize("name", CASES)
def test_alone_a_format_names_its_data_set(name: str) -> None:
    config = DataConfig.from_dict({"train": {"format": name}})
    assert config.train is not None
    form = data_formats.get(name)
    assert (config.train.path, config.train.subset) == (form.hub_name, form.subset)
    assert form.licence
    # A saved format means the same when it is read back.
    assert DataConfig.from_dict(config.to_dict()) == config


def test_equal_answers_are_left_out_and_the_sign_decides(tmp_path: Path) -> None:
    rows = [{**HELPSTEER3, "overall_preference": score} for score in (-1, 0, 3)]
    first, last = loaded(tmp_path, "helpsteer3", *rows)
    assert (first["chosen"], last["chosen"]) == ("A wren.", "A stone.")
    with pytest.raises(EmptyDatasetError, match="drops all 1 rows"):
        loaded(tmp_path, "helpsteer3", rows[1])


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gsm8k", {"answer": "1200"}, "must end with '#### NUMBER'"),
        ("gsm8k", {"answer": "so ####  "}, "must end with '#### NUMBER'"),
        ("math", {"solution": "it is 3"}, "must hold"),
        ("math", {"solution": r"\boxed{3"}, "stays open"),
        ("dapo_math", {"reward_model": {}}, "reward_model.ground_truth or solution"),
        ("dapo_math", {"prompt": [{"role": "user"}]}, "a list of messages"),
        ("deepscaler", {"answer": None}, "answer must be a text"),
        ("helpsteer3", {"overall_preference": 4}, "from -3 to 3"),
        ("helpsteer3", {"overall_preference": True}, "from -3 to 3"),
        ("helpsteer3", {"context": []}, "a list of messages"),
        ("tulu3", {"messages": "hello"}, "a list of messages"),
        ("mbpp", {"test_list": []}, "test_list must be"),
        ("ifeval", {"kwargs": []}, "one entry for each"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(
    tmp_path: Path, name: str, changes: Row, said: str
) -> None:
    good = CASES[name][0]
    with pytest.raises(ColumnError, match=said) as caught:
        loaded(tmp_path, name, good, {**good, **changes})
    assert f"row 1 cannot be read by the format {name}" in str(caught.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ColumnError, match="row 0 has no 'question'"):
        loaded(tmp_path, "gsm8k", {"query": "2?", "answer": "#### 2"})


def test_math_takes_the_final_answer_that_stands_apart(tmp_path: Path) -> None:
    row = {"problem": "?", "solution": "see above", "answer": "(3, 4)"}
    assert loaded(tmp_path, "math", row)[0]["ground_truth"] == "(3, 4)"


def test_dapo_math_reads_its_processed_form_too(tmp_path: Path) -> None:
    row = {"prompt": "17 + 17?", "solution": "34", "source_prompt": []}
    (found,) = loaded(tmp_path, "dapo_math", row)
    assert (found["prompt"], found["ground_truth"]) == ("17 + 17?", "34")


@pytest.mark.parametrize(
    ("train", "more", "said"),
    [
        ({"format": "gsm8"}, {}, "did you mean 'gsm8k'"),
        ({"format": "gsm8k", "mixture": ["a.jsonl"]}, {}, "format belongs to path"),
        (
            {"format": "gsm8k", "tasks": {"world": "sorting", "part": "train",
                                          "num_rows": 1}},
            {},
            "format belongs to path",
        ),
        ({"format": "helpsteer3"}, {"streaming": True}, "a stream cannot count"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(
    train: Row, more: Row, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        DataConfig.from_dict({"train": train, **more})


@pytest.mark.parametrize("streaming", [False, True])
def test_training_rows_are_read_by_their_format(
    tmp_path: Path, streaming: bool
) -> None:
    rows = [{"question": f"{n}?", "answer": f"so\n#### {n}"} for n in range(4)]
    config = DataConfig.from_dict(
        {
            "train": {"format": "gsm8k", "path": str(write(tmp_path, rows))},
            "streaming": streaming,
        }
    )
    tokenizer = build_tokenizer(TokenizerBuildConfig())
    data = DataModule(config, tokenizer, kind="prompts", batch_size=4)
    batch = next(iter(data.train_loader))
    truths = {info["ground_truth"] for info in batch["extra_env_info"]}
    assert truths == {"0", "1", "2", "3"}


def test_a_format_of_ones_own() -> None:
    own = DataFormat(
        "rebuses", "me/rebuses", "CC0-1.0", ("ask",), lambda row: {"prompt": row["ask"]}
    )
    data_formats.register("rebuses")(own)
    try:
        source = SourceConfig.from_dict({"format": "rebuses"})
        assert source.path == "me/rebuses"
    finally:
        del data_formats._registered["rebuses"]


def test_the_guide_lists_every_format() -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "data.md"
    forms = [data_formats.get(name) for name in BUILT_IN]
    rows = [
        f"| `{form.name}` | {form.hub_name} | {form.licence} | "
        f"{', '.join(f'`{column}`' for column in form.columns)} |"
        for form in forms
    ]
    lines = page.read_text().splitlines()
    start = lines.index(rows[0])
    assert lines[start : start + len(rows)] == rows
    assert not lines[start + len(rows)]
