from __future__ import annotations

import pytest
import torch

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.errors import (
    ColumnError,
    DataError,
    DatasetNotFoundError,
    EmptyDatasetError,
    PromptTooLongError,
)
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 <>:?=\n"


@pytest.fixture(scope="module")
def plain():
    return build_tokenizer(TokenizerBuildConfig(characters=ALPHABET))


@pytest.fixture(scope="module")
def chat():
    return build_tokenizer(
        TokenizerBuildConfig(characters=ALPHABET, chat_template=TEMPLATE)
    )


def texts(dataset, tokenizer):
    return [tokenizer.decode(datum["token_ids"].tolist()) for datum in dataset]


def test_plain_prompts(plain):
    rows = [{"prompt": "1 2", "answer": 3, "level": 1}, {"prompt": "2", "answer": 2}]
    dataset = process_prompts(rows, plain)
    assert texts(dataset, plain) == ["1 2", "2"]
    first = dataset[0]
    assert first["idx"] == 0
    assert first["length"] == 3
    assert first["loss_multiplier"] == 1.0
    assert first["extra_env_info"] == rows[0]
    assert first["message_log"][0]["content"] == "1 2"


@pytest.mark.parametrize("column", ["question", "problem", "text"])
def test_usual_column_names_are_found(plain, column):
    assert texts(process_prompts([{column: "ab"}], plain), plain) == ["ab"]


def test_the_answer_reaches_the_environment_as_answer(plain):
    (datum,) = process_prompts(
        [{"q": "a", "gold": "b"}], plain, DataConfig(input_key="q", output_key="gold")
    )
    assert datum["extra_env_info"] == {"q": "a", "gold": "b", "answer": "b"}


def test_chat_template_system_prompt_and_prompt_template(chat):
    config = DataConfig(system_prompt="be kind", prompt_template="{level}: {prompt}=?")
    dataset = process_prompts([{"prompt": "a", "level": 3}], chat, config)
    assert texts(dataset, chat) == ["<s>be kind\n<u>3: a=?\n<a>"]
    assert [m["content"] for m in dataset[0]["message_log"]] == ["be kind", "3: a=?"]
    off = DataConfig(apply_chat_template=False)
    assert texts(process_prompts([{"prompt": "a"}], chat, off), chat) == ["a"]


def test_templates_in_files(chat, tmp_path):
    (tmp_path / "p").write_text("say {prompt}")
    config = DataConfig(prompt_file=str(tmp_path / "p"))
    assert texts(process_prompts([{"prompt": "a"}], chat, config), chat) == [
        "<u>say a\n<a>"
    ]
    (tmp_path / "p").write_text("\ufeffsay {prompt}", encoding="utf-8")
    assert texts(process_prompts([{"prompt": "a"}], chat, config), chat) == [
        "<u>say a\n<a>"
    ]
    missing = DataConfig(system_prompt_file=str(tmp_path / "none"))
    with pytest.raises(DatasetNotFoundError, match=r"data\.system_prompt_file"):
        process_prompts([{"prompt": "a"}], chat, missing)


def test_conversations_are_cut_before_the_answer(chat):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"from": "human", "value": "c"},
        {"from": "gpt", "value": "d"},
    ]
    (datum,) = process_prompts([{"messages": messages}], chat)
    assert texts([datum], chat) == ["<u>a\n<a>b\n<u>c\n<a>"]
    assert datum["extra_env_info"]["answer"] == "d"
    (by_prompt,) = process_prompts([{"prompt": messages[:1], "answer": "x"}], chat)
    assert texts([by_prompt], chat) == ["<u>a\n<a>"]


def test_long_prompts_are_an_error_or_dropped_and_counted(plain):
    rows = [{"prompt": "ab"}, {"prompt": "abcdef"}, {"prompt": "abcd"}]
    with pytest.raises(
        PromptTooLongError,
        match=r"2 of 3 prompts of dataset x are longer than 3 tokens \(the longest: "
        r"row 1 with 6\): leave them out with data.on_overlong=drop",
    ):
        process_prompts(rows, plain, max_length=3, name="x")
    drop = DataConfig(on_overlong="drop")
    dataset = process_prompts(rows, plain, drop, max_length=3)
    assert (len(dataset), dataset.num_overlong, dataset.num_source_rows) == (1, 2, 3)
    # A prompt of exactly the maximum length is kept.
    dataset = process_prompts(rows, plain, drop, max_length=4)
    assert [datum["length"] for datum in dataset] == [2, 4]
    with pytest.raises(EmptyDatasetError, match="none is left"):
        process_prompts(rows, plain, drop, max_length=1)
    cut = DataConfig(on_overlong="truncate")
    with pytest.raises(PromptTooLongError, match="cannot be truncated"):
        process_prompts(rows, plain, cut, max_length=3)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"x": "a"}], {}, "no column for the prompt.*it has 'x'; set data.input_key"),
        ([{"prompt": "a"}], {"input_key": "promt"}, "data.input_key='promt'.*prompt"),
        ([{"prompt": None}], {}, "row 0: column 'prompt' must be text: got nothing"),
        ([{"prompt": float("nan")}], {}, "row 0: column 'prompt' .*got nothing"),
        ([{"prompt": "a\ud83d"}], {}, "row 0: column 'prompt' .* at character 1, half"),
        (
            [{"messages": [{"role": "user", "content": "\ude00"}]}],
            {},
            "row 0: column 'messages' .* at character 0, half",
        ),
        ([{"prompt": "a", "stop_strings": ["b", 3]}], {}, "row 0: column 'stop_str"),
        ([{"prompt": "a", "stop_strings": [""]}], {}, r"not empty: got \[''\]"),
        ([{"prompt": "a"}, {}], {}, "row 1: column 'prompt' must be text"),
        ([{"prompt": ""}], {}, "row 0: the prompt is empty"),
        ([{"prompt": []}], {}, "must be a list of messages"),
        ([{"messages": [{"role": "user"}]}], {}, "message 0 of column 'messages'"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            {},
            "no message before the answer",
        ),
        ([{"prompt": "a"}], {"prompt_template": "{levl}"}, "names {levl}.*'prompt'"),
    ],
)
def test_bad_columns(plain, rows, settings, message):
    with pytest.raises(ColumnError, match=message):
        process_prompts(rows, plain, DataConfig(**settings))


def test_bad_templates_and_settings(plain):
    with pytest.raises(DataError, match="cannot be filled"):
        process_prompts([{"prompt": "a"}], plain, DataConfig(prompt_template="{"))
    for template in ("{topic[name]} {prompt}", "{level:>3} {prompt}"):
        row = {"prompt": "a", "topic": "b", "level": None}
        with pytest.raises(DataError, match="cannot be filled"):
            process_prompts([row], plain, DataConfig(prompt_template=template))
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        process_prompts([{"prompt": "a"}], plain, DataConfig(apply_chat_template=True))
    with pytest.raises(DataError, match="no BOS token"):
        process_prompts([{"prompt": "a"}], plain, DataConfig(add_bos=True))
    for bad, message in (
        ({"prompt_template": "a", "prompt_file": "b"}, "exclude each other"),
        ({"validation": "a", "split_validation_size": 3}, "exclude each other"),
        ({"split_validation_size": 2.5}, "whole number"),
        ({"roles_to_train_on": []}, "at least one role"),
        ({"on_overlong": "cut"}, "on_overlong"),
        ({"trian": "x"}, "train"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataConfig.from_dict(bad)
    assert DataConfig.from_dict({"train": "rows.jsonl"}).train.path == "rows.jsonl"


def test_stop_strings_of_a_row_are_a_text_or_several(plain):
    rows = [
        {"prompt": "a", "stop_strings": "end"},
        {"prompt": "a", "stop_strings": ["x", "end"]},
        {"prompt": "a", "stop_strings": None},
    ]
    found = [datum.get("stop_strings") for datum in process_prompts(rows, plain)]
    assert found == [["end"], ["x", "end"], None]


def test_collating(plain):
    rows = [
        {"prompt": "abc", "stop_strings": ["\n"], "task_name": "sort"},
        {"prompt": "a"},
    ]
    batch = rl_collate_fn(process_prompts(rows, plain)[:], pad_token_id=7)
    assert batch["input_lengths"].tolist() == [3, 1]
    assert batch["input_ids"].shape == (2, 3)
    assert batch["input_ids"][1, 1:].tolist() == [7, 7]
    assert batch["stop_strings"] == [["\n"], None]
    assert batch["task_name"] == ["sort", None]
    assert batch["idx"] == [0, 1]
    assert batch["input_ids"].dtype == torch.int64
