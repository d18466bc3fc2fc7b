from __future__ import annotations

import pytest

from rl_algorithms.data.collate import SFTCollator
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.demonstrations import process_demonstrations
from rl_algorithms.data.prompts import process_prompts
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
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'][0] }}>"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 <>:?=\n"
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bb"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "dd"},
]


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


def shown(datum, tokenizer):
    """Return the whole text, and the part that is learned."""
    ids, mask = datum["token_ids"], datum["token_mask"].bool()
    return tokenizer.decode(ids.tolist()), tokenizer.decode(ids[mask].tolist())


def test_prompt_answer_and_end(plain):
    (datum,) = process_demonstrations([{"prompt": "1 2:", "answer": "21"}], plain)
    assert shown(datum, plain) == ("1 2:21<eos>", "21<eos>")
    (open_end,) = process_demonstrations(
        [{"prompt": "1 2:", "answer": 21}], plain, DataConfig(add_eos=False)
    )
    assert shown(open_end, plain) == ("1 2:21", "21")


def test_the_prompt_part_is_what_is_sampled_from(plain):
    rows = [{"prompt": "1 2:", "answer": "21"}]
    (demonstration,) = process_demonstrations(rows, plain)
    (prompt,) = process_prompts(rows, plain)
    head = demonstration["token_ids"][: prompt["length"]]
    assert head.tolist() == prompt["token_ids"].tolist()
    assert not demonstration["token_mask"][: prompt["length"]].any()


def test_texts_are_learned_whole(plain):
    (datum,) = process_demonstrations([{"text": "abc"}], plain)
    assert shown(datum, plain) == ("abc<eos>", "abc<eos>")


def test_chat_template_learns_what_the_model_writes(chat):
    (datum,) = process_demonstrations([{"messages": TALK}], chat)
    assert shown(datum, chat) == ("<u>a\n<a>bb\n<u>c\n<a>dd\n", "bb\ndd\n")
    (last,) = process_demonstrations(
        [{"messages": TALK}], chat, DataConfig(only_unmask_final=True)
    )
    assert shown(last, chat)[1] == "dd\n"
    (users,) = process_demonstrations(
        [{"messages": TALK}], chat, DataConfig(roles_to_train_on=["user"])
    )
    assert shown(users, chat)[1] == "<u>a\n<u>c\n"
    everyone = DataConfig.from_dict({"roles_to_train_on": "all"})
    (whole,) = process_demonstrations([{"messages": TALK}], chat, everyone)
    assert shown(whole, chat)[1] == "<u>a\nbb\n<u>c\ndd\n"
    (pair,) = process_demonstrations([{"prompt": "x", "answer": "y"}], chat)
    assert shown(pair, chat) == ("<u>x\n<a>y\n", "y\n")


def test_conversations_without_a_template(plain):
    (datum,) = process_demonstrations([{"messages": TALK}], plain)
    assert shown(datum, plain) == ("abb<eos>\ncdd<eos>", "bb<eos>dd<eos>")


@pytest.mark.parametrize("role", ["environment", "tool"])
def test_what_an_environment_says_is_tokenised_as_in_a_rollout(plain, role):
    answer = [
        {"role": "assistant", "content": "bb"},
        {"role": role, "content": "c"},
        {"role": "assistant", "content": "dd"},
    ]
    (datum,) = process_demonstrations([{"prompt": "a", "answer": answer}], plain)
    assert shown(datum, plain) == ("abb<eos>cdd<eos>", "bb<eos>dd<eos>")


def test_templates_that_change_earlier_turns():
    forgetful = make(FORGETFUL)
    with pytest.raises(DataError, match=r"data\.only_unmask_final=true"):
        process_demonstrations([{"messages": TALK}], forgetful)
    (datum,) = process_demonstrations(
        [{"messages": TALK}], forgetful, DataConfig(only_unmask_final=True)
    )
    assert shown(datum, forgetful) == ("<u>a\n<a>\n<u>c\n<a>dd\n", "dd\n")


def test_long_demonstrations(plain):
    rows = [{"prompt": "ab", "answer": "cdef"}, {"prompt": "abcdef", "answer": "g"}]
    with pytest.raises(PromptTooLongError, match="2 of 2 demonstrations"):
        process_demonstrations(rows, plain, max_length=4)
    dataset = process_demonstrations(
        rows, plain, DataConfig(on_overlong="truncate"), max_length=4
    )
    assert shown(dataset[0], plain) == ("abcd", "cd")
    assert [datum["loss_multiplier"] for datum in dataset] == [1.0, 0.0]
    assert dataset.num_overlong == 2


def test_rows_that_are_cut_before_every_answer_are_an_error(plain):
    cut = DataConfig(on_overlong="truncate")
    rows = [{"prompt": "abcdef", "answer": "g"}, {"prompt": "abcd", "answer": "h"}]
    with pytest.raises(EmptyDatasetError, match=r"2 of 2 .*nothing to learn is left"):
        process_demonstrations(rows, plain, cut, max_length=4)
    # Of a text, the first token is learned from nothing.
    with pytest.raises(EmptyDatasetError, match="nothing to learn is left"):
        process_demonstrations([{"text": "abc"}], plain, cut, max_length=1)


def test_bad_rows(plain, chat):
    with pytest.raises(ColumnError, match=r"no column for the answer.*output_key"):
        process_demonstrations([{"prompt": "a"}], plain)
    with pytest.raises(ColumnError, match="row 0: column 'answer' must be text"):
        process_demonstrations([{"prompt": "a", "answer": None}], plain)
    with pytest.raises(DataError, match="row 0: no token would be learned"):
        process_demonstrations([{"messages": TALK[:1]}], chat)


def test_collating(plain):
    rows = [{"prompt": "ab", "answer": "c"}, {"prompt": "a", "answer": "b"}]
    batch = SFTCollator(9, 8)(process_demonstrations(rows, plain)[:])
    assert set(batch) == {"input_ids", "input_lengths", "token_mask", "sample_mask"}
    assert batch["input_ids"].shape == (2, 8)
    assert batch["input_lengths"].tolist() == [4, 3]
    assert batch["input_ids"][1, 3:].tolist() == [9] * 5
    assert batch["token_mask"].tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0, 0],
    ]
    assert batch["sample_mask"].tolist() == [1, 1]
    cut = DataConfig(on_overlong="truncate")
    long = [*rows, {"prompt": "abcdef", "answer": "g"}]
    batch = SFTCollator(9)(process_demonstrations(long, plain, cut, max_length=4)[:])
    assert batch["sample_mask"].tolist() == [1, 1, 0]
