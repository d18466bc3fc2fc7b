from __future__ import annotations

import pytest
import torch

from rl_algorithms.data.compat import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_to_flat_messages,
)
from rl_algorithms.errors import ColumnError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

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


def message(**tensors):
    return {"role": "user", "content": "x", **tensors}


def of(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([of(2), of(2, 2)], r"float32 on cpu of shape \[n\] in message 0, .*\[n, 2\]"),
        ([of(2, 2), of(2, 3)], r"shape \[n, 2\] in message 0, .*\[n, 3\] in message 1"),
        ([of(), of(2)], "one entry per token: message 0 has a single number"),
        ([of(2), of(2, device="meta")], "on meta of shape"),
        ([of(2), [1.0]], r"missing in message\(s\) \[1\], or no tensor there"),
        ([[1.0], of(2)], r"missing in message\(s\) \[0\], or no tensor there"),
    ],
)
def test_tensors_that_cannot_be_joined_are_named(messages, error):
    with pytest.raises(ColumnError, match=f"message log: 'a' .*{error}"):
        message_log_to_flat_messages([message(a=value) for value in messages])


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (
            [of(2, dtype=torch.int64), of(3)],
            "int64 on cpu .* in conversation 0, torch.float32 .* in conversation 1",
        ),
        ([of(2), of(2, device="meta")], "on meta .* in conversation 1"),
        ([of(2, 2), of(2, 2)], r"1-D tensor in each .* shape \[2, 2\] in conv"),
    ],
)
def test_conversations_keep_their_dtype_and_device(rows, error):
    with pytest.raises(ColumnError, match=f"message logs: 'a' must .*{error}"):
        batched_message_log_to_flat_message([[message(a=value)] for value in rows])


def test_nothing_is_cut_or_rounded_in_silence():
    with pytest.raises(ColumnError, match=r"message log 1: .* a has 2, b has 3"):
        batched_message_log_to_flat_message(
            [[message(a=of(1), b=of(1))], [message(a=of(2), b=of(3))]]
        )
    whole = [[message(a=of(1, dtype=torch.int64))]]
    with pytest.raises(ColumnError, match=r"int64 and cannot be padded with 0\.5"):
        batched_message_log_to_flat_message(whole, {"a": 0.5})
    with pytest.raises(ColumnError, match="must be at least 1: got 0"):
        batched_message_log_to_flat_message(whole, None, 0)
    with pytest.raises(ColumnError, match="message log 0: message 1 needs token_ids"):
        add_loss_mask_to_message_log([[*log(1), {"role": "user"}]])


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
