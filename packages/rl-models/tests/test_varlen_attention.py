from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rl_models.errors import UnsupportedModelError
from rl_models.ops.causal_lm import load_causal_lm, packing_obstacle
from rl_models.ops.packed_attention import VarlenLayout, packed_model_inputs
from rl_models.ops.varlen_attention import ATTENTION_NAME, varlen_attention_forward


def _pair(config_class, model_class, **extra):
    """Return the same model with torch's attention, row by row, and with packing."""
    models = []
    for attention in ("sdpa", ATTENTION_NAME):
        torch.manual_seed(0)
        config = config_class(
            vocab_size=23,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **extra,
        )
        config._attn_implementation = attention
        models.append(model_class(config))
    return models


@pytest.mark.parametrize(
    ("config_class", "model_class", "extra"),
    [
        (LlamaConfig, LlamaForCausalLM, {}),
        (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
    ],
)
@pytest.mark.parametrize("lengths", [[6, 6, 6], [1, 17, 3, 9, 16, 2]])
def test_packed_rows_equal_single_rows(config_class, model_class, extra, lengths):
    plain, packed = _pair(config_class, model_class, **extra)
    rows = [torch.randint(0, 23, (n,)) for n in lengths]
    expected = torch.cat([plain(row[None]).logits[0] for row in rows])
    inputs = packed_model_inputs(np.array(lengths))
    got = packed(input_ids=torch.cat(rows)[None], **inputs).logits[0]
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(plain.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_layout_places_every_token_once(lengths):
    layout = VarlenLayout.from_lengths(np.array(lengths), torch.device("cpu"))
    slots = sum(b.num_rows * b.width for b in layout.buckets)
    assert sum(b.num_rows for b in layout.buckets) == len(lengths)
    if layout.slot_of_token is None:
        assert slots == sum(lengths)
        return
    assert layout.slot_of_token.unique().numel() == sum(lengths)
    back = layout.token_of_slot[layout.slot_of_token]
    assert torch.equal(back, torch.arange(sum(lengths)))
    assert slots <= 1.25 * sum(lengths) + 2 * len(lengths)


def test_borders_alone_are_enough():
    plain, packed = _pair(LlamaConfig, LlamaForCausalLM)
    ids = torch.randint(0, 23, (1, 9))
    borders = torch.tensor([0, 4, 9], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    got = packed(
        ids,
        position_ids=positions,
        cu_seq_lens_q=borders,
        cu_seq_lens_k=borders,
        max_length_q=5,
        max_length_k=5,
    ).logits[0]
    expected = torch.cat([plain(ids[:, :4]).logits[0], plain(ids[:, 4:]).logits[0]])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_several_rows_with_borders_are_refused():
    x = torch.zeros(2, 1, 3, 4)
    borders = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(UnsupportedModelError, match="one row of tokens"):
        varlen_attention_forward(
            torch.nn.Identity(), x, x, x, None, cu_seq_lens_q=borders
        )
    with pytest.raises(UnsupportedModelError, match="softcap"):
        varlen_attention_forward(
            torch.nn.Identity(),
            x[:1],
            x[:1],
            x[:1],
            None,
            cu_seq_lens_q=borders,
            softcap=3.0,
        )


def test_attention_with_sinks_is_the_models_own(tmp_path):
    config = GptOssConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path)
    ids = torch.randint(0, 23, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)
    assert packing_obstacle(loaded) is not None
