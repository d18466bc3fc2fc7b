from __future__ import annotations

import logging

import pytest
import torch

from rl_algorithms.data import DataConfig, DataModule
from rl_algorithms.data.preferences import PreferenceCollator, process_preferences
from rl_algorithms.errors import (
    ColumnError,
    DataError,
    EmptyDatasetError,
    PromptTooLongError,
)
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 <>:?=\n"
ROW = {"prompt": "ab=", "chosen": "12", "rejected": "3"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def make(template=None):
    return build_tokenizer(
        TokenizerBuildConfig(characters=ALPHABET, chat_template=template)
    )


@pytest.fixture(scope="module")
def plain():
    return make()


@pytest.fixture(scope="module")
def chat():
    return make(TEMPLATE)


def texts(tokenizer, pair):
    """Return the text of each row of a pair, and the part that is learned."""
    found = []
    for side in ("chosen", "rejected"):
        ids, mask = pair[f"token_ids_{side}"], pair[f"token_mask_{side}"]
        assert len(ids) == len(mask) == pair[f"length_{side}"]
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[mask == 1])))
    return found


def test_plain_texts_end_with_eos_and_learn_the_answer(plain):
    (pair,) = process_preferences([ROW], plain)
    eos = plain.eos_token
    assert texts(plain, pair) == [
        (f"ab=12{eos}", f"12{eos}"),
        (f"ab=3{eos}", f"3{eos}"),
    ]
    assert (pair["length"], pair["idx"]) == (6, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [user("q")], "chosen": "yes", "rejected": "no"},
        {
            "prompt": "q",
            "chosen": [assistant("yes")],
            "rejected": [assistant("no")],
        },
        {
            "prompt": [user("q")],
            "chosen": [user("q"), assistant("yes")],
            "rejected": [user("q"), assistant("no")],
        },
        {
            "chosen": [user("q"), assistant("yes")],
            "rejected": [user("q"), assistant("no")],
        },
        {
            "context": [user("q")],
            "completions": [
                {"rank": 2, "completion": [assistant("no")]},
                {"rank": 1, "completion": "hm"},
                {"rank": 0, "completion": "yes"},
            ],
        },
    ],
)
def test_every_form_of_a_row_says_the_same(chat, row):
    (pair,) = process_preferences([row], chat)
    assert texts(chat, pair) == [
        ("<u>q\n<a>yes\n", "yes\n"),
        ("<u>q\n<a>no\n", "no\n"),
    ]


def test_earlier_answers_belong_to_the_prompt(chat):
    talk = [user("a"), assistant("bb"), user("c")]
    row = {"chosen": [*talk, assistant("dd")], "rejected": [*talk, assistant("e")]}
    (pair,) = process_preferences([row], chat)
    assert [learned for _, learned in texts(chat, pair)] == ["dd\n", "e\n"]


def test_texts_without_prompt_are_learned_whole(plain):
    (pair,) = process_preferences([{"chosen": "ab", "rejected": "cd"}], plain)
    assert texts(plain, pair)[0][1].startswith("ab")


def test_columns_by_name_template_and_system_prompt(chat):
    config = DataConfig(
        input_key="q",
        chosen_key="good",
        rejected_key="bad",
        prompt_template="{prompt}?",
        system_prompt="s",
    )
    (pair,) = process_preferences([{"q": "a", "good": "b", "bad": 7}], chat, config)
    assert [whole for whole, _ in texts(chat, pair)] == [
        "<s>s\n<u>a?\n<a>b\n",
        "<s>s\n<u>a?\n<a>7\n",
    ]


def test_a_prompt_that_answers_repeat_is_there_once_with_a_template(chat):
    row = {
        "prompt": "q",
        "chosen": [user("q"), assistant("yes")],
        "rejected": [user("q"), assistant("no")],
    }
    config = DataConfig(prompt_template="{prompt}?")
    (pair,) = process_preferences([row], chat, config)
    assert texts(chat, pair) == [
        ("<u>q?\n<a>yes\n", "yes\n"),
        ("<u>q?\n<a>no\n", "no\n"),
    ]


def test_collate_interleaves_and_masks_both_rows_of_a_pair(plain):
    pairs = list(process_preferences([ROW, {**ROW, "chosen": "4567"}], plain))
    pairs[1]["loss_multiplier"] = 0.0
    batch = PreferenceCollator(0, 4)(pairs)
    assert batch["input_ids"].shape == (4, 8)
    assert batch["input_lengths"].tolist() == [6, 5, 8, 5]
    assert batch["sample_mask"].tolist() == [1, 1, 0, 0]
    assert batch["token_mask"].dtype == torch.float32
    assert batch["token_mask"].sum(1).tolist() == [3, 2, 5, 2]
    for row, pair in enumerate(pairs):
        length = pair["length_rejected"]
        ids = batch["input_ids"][2 * row + 1, :length]
        assert torch.equal(ids, pair["token_ids_rejected"])


def test_equal_answers_are_left_out_and_counted(plain, caplog):
    caplog.set_level(logging.WARNING)
    data = process_preferences([ROW, {**ROW, "rejected": "12"}], plain)
    assert (len(data), data.num_source_rows) == (1, 2)
    assert "1 of 2 pairs" in caplog.text
    with pytest.raises(EmptyDatasetError, match=r"1 of 1 pairs.*chosen_key"):
        process_preferences([{**ROW, "rejected": "12"}], plain)


LONG = [ROW, {"prompt": "abc=", "chosen": "1", "rejected": "1234567"}]


class TestOverlong:
    def test_is_an_error_that_names_the_row(self, plain):
        with pytest.raises(PromptTooLongError, match=r"1 of 2 pairs.*row 1 with 12"):
            process_preferences(LONG, plain, max_length=8)

    def test_is_dropped_whole(self, plain):
        config = DataConfig(on_overlong="drop")
        data = process_preferences(LONG, plain, config, max_length=8)
        assert [pair["idx"] for pair in data] == [0]
        assert (data.num_overlong, data.num_source_rows) == (1, 2)

    def test_is_cut_at_the_end(self, plain):
        config = DataConfig(on_overlong="truncate")
        data = process_preferences(LONG, plain, config, max_length=8)
        assert data.num_overlong == 1
        assert texts(plain, data[1])[1] == ("abc=1234", "1234")
        assert data[1]["loss_multiplier"] == 1.0

    def test_what_the_cut_makes_equal_does_not_count(self, plain):
        config = DataConfig(on_overlong="truncate")
        rows = [ROW, {"prompt": "abc=", "chosen": "1234", "rejected": "1235"}]
        data = process_preferences(rows, plain, config, max_length=7)
        assert [pair["loss_multiplier"] for pair in data] == [1.0, 0.0]
        with pytest.raises(EmptyDatasetError, match="cut to 3 tokens"):
            process_preferences(rows, plain, config, max_length=3)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], {}, "no pairs"),
        ([{"prompt": "a", "text": "b"}], {}, "chosen or"),
        ([ROW], {"chosen_key": "choosen"}, "did you mean 'chosen'"),
        ([ROW], {"chosen_key": "rejected"}, "both name 'rejected'"),
        ([{**ROW, "rejected": None}], {}, "row 0: column 'rejected'"),
        ([{**ROW, "chosen": ""}], {}, "'chosen' must hold an answer"),
        ([{**ROW, "chosen": [user("a")]}], {}, "'chosen' must hold an answer"),
        ([{"completions": [1]}], {}, "no prompt"),
        ([{"prompt": "a", "completions": ["b", "c"]}], {}, "'rank'"),
        (
            [
                {
                    "prompt": "a",
                    "completions": [
                        {"rank": 1, "completion": "b"},
                        {"rank": 1, "completion": "c"},
                    ],
                }
            ],
            {},
            "different ranks",
        ),
    ],
)
def test_bad_rows_are_named(plain, rows, settings, message):
    with pytest.raises(ColumnError, match=message):
        process_preferences(rows, plain, DataConfig(**settings))


def test_data_module_gives_batches_of_pairs(plain):
    rows = [{**ROW, "chosen": str(index)} for index in range(4, 10)]
    data = DataModule(
        DataConfig(split_validation_size=2),
        plain,
        kind="preferences",
        batch_size=2,
        max_length=16,
        train=rows,
    )
    sizes = [batch.size for batch in data.train_loader]
    assert sizes == [4, 4]
    assert data.counts()["num_validation_rows"] == 2
    with pytest.raises(DataError, match=r"no rows|empty"):
        DataModule(DataConfig(), plain, kind="preferences", batch_size=1, train=[])
