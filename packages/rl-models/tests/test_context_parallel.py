"""Context-parallel attention, without other ranks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_models.training.dtensor.context_parallel import (
    ContextTokens,
    share_attention,
)


class _Alone:
    """A group of one rank."""

    size, rank = 1, 0

    def exchange(self, for_ranks):
        return for_ranks


@pytest.mark.parametrize("is_shared", [True, False])
def test_attention_finds_its_own_name_and_no_places(tiny_model, monkeypatch, is_shared):
    told = []

    def attention(module, *tensors, **kwargs):
        told.append((module.config._attn_implementation, "position_ids" in kwargs))
        return sdpa_attention_forward(module, *tensors, **kwargs)

    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", attention
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.arange(1, 7)[None]
    expected = model(ids).logits
    model.config._attn_implementation = "flash_attention_2"
    share_attention(model, "m", 2)
    name = model.config._attn_implementation
    assert name == "rl_context_flash_attention_2"
    inputs = {"input_ids": ids, "position_ids": torch.arange(6)[None]}
    if is_shared:
        inputs = ContextTokens(_Alone(), 6).inputs(ids)
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert told == [("flash_attention_2", False)] * 2
    assert model.config._attn_implementation == name
