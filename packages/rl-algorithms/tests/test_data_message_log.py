from __future__ import annotations

import pytest
import torch

from rl_algorithms.data.message_log import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_to_flat_messages,
)
from rl_algorithms.errors import ColumnError
from rl_models.modelbuild import TokenizerBuildConfig, build_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def log(*lengths):
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": "x" * n, "token_ids": torch.full((n,), i + 1)}
        for i, n in enumerate(lengths)
    ]


def test_flat_messages_and_keys():
    flat = message_log_to_flat_messages(log(2, 1))
    assert flat["token_ids"].tolist() == [1, 1, 2]
    assert flat["role"] == ["user", "assistant"]
    assert message_log_to_flat_messages([]) == {}
    assert get_keys_from_message_log(log(1), ["role", "none"]) == [{"role": "user"}]


def test_batches_are_padded():
    logs = [log(2, 1), log(1)]
    add_loss_mask_to_message_log(logs)
    batch, lengths = batched_message_log_to_flat_message(logs, {"token_ids": 9}, 4)
    assert batch["token_ids"].tolist() == [[1, 1, 2, 9], [1, 9, 9, 9]]
    assert batch["token_loss_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert lengths.tolist() == [3, 1]
    assert lengths.dtype == torch.int32
    empty, none = batched_message_log_to_flat_message([])
    assert not empty
    assert len(none) == 0


def test_only_the_final_message():
    logs = [log(1, 1, 1, 2)]
    add_loss_mask_to_message_log(logs, only_unmask_final=True)
    flat = message_log_to_flat_messages(logs[0])
    assert flat["token_loss_mask"].tolist() == [0, 0, 0, 1, 1]


def test_bad_logs():
    missing = log(1, 1)
    del missing[1]["token_ids"]
    with pytest.raises(ColumnError, match=r"'token_ids' is missing in message\(s\)"):
        message_log_to_flat_messages(missing)
    mixed = log(1, 1)
    mixed[1]["token_ids"] = torch.ones(1)
    with pytest.raises(ColumnError, match="one dtype and device"):
        message_log_to_flat_messages(mixed)
    with pytest.raises(ColumnError, match="1-D tensor in each"):
        batched_message_log_to_flat_message([log(1), [{"role": "user", "content": ""}]])


def test_formatting_shares_out_the_tokens_of_the_whole():
    tokenizer = build_tokenizer(
        TokenizerBuildConfig(characters="abcdu<>\n", chat_template=TEMPLATE)
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bb"},
        {"role": "user", "content": "c"},
    ]
    formatted = get_formatted_message_log(messages, tokenizer)
    texts = [tokenizer.decode(m["token_ids"].tolist()) for m in formatted]
    assert texts == ["<u>a\n", "<a>bb\n", "<u>c\n"]
    learned = [
        tokenizer.decode(m["token_ids"][m["token_loss_mask"].bool()].tolist())
        for m in formatted
    ]
    assert learned == ["", "bb\n", ""]
