from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.micro_batches import MicroBatch
from rl_distributed.errors import BatchError
from rl_models.ops.varlen_attention import ATTENTION_NAME
from rl_models.training.dtensor.microbatch import ModelBatch
from rl_models.training.global_batch import global_batches, micro_batches, part_of

CPU = torch.device("cpu")


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_needed_position_reads_its_own_prefix(rows, width, seed, packed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    ids = torch.arange(rows * width).view(rows, width)
    needed = torch.rand(rows, width - 1, generator=generator) < 0.4
    batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME if packed else None)
    fed = batch.inputs["input_ids"].reshape(-1)
    row, column = needed.nonzero(as_tuple=True)
    # The token under each position is the one before the target, of the same row.
    assert torch.equal(fed[batch.positions], ids[row, column])
    assert torch.equal(batch.targets, ids[row, column + 1])
    spread = batch.spread(batch.targets.float())
    expected = torch.where(needed, ids[:, 1:].float(), torch.zeros(()))
    assert torch.equal(spread, expected)


def test_nothing_after_the_last_needed_token_is_computed():
    ids = torch.arange(40).view(4, 10)
    needed = torch.zeros(4, 9, dtype=torch.bool)
    needed[0, 1] = needed[2, 7] = True
    batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME)
    assert batch.inputs["input_ids"].tolist() == [[0, 1, *range(20, 28)]]
    assert batch.positions.tolist() == [1, 9]


def test_a_batch_that_needs_nothing_still_makes_one_pass():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    needed = torch.zeros(2, 3, dtype=torch.bool)
    batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME)
    assert batch.inputs["input_ids"].shape == (1, 1)
    assert batch.positions.numel() == 0


def test_rows_of_nearly_equal_length_stay_a_rectangle():
    ids = torch.arange(60).view(6, 10)
    needed = torch.zeros(6, 9, dtype=torch.bool)
    needed[:, 7] = needed[0, 8] = True
    batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME)
    assert batch.inputs["input_ids"].shape == (1, 54)


def grouped(sizes, prompts, answers, seed):
    """Return rows of groups that share a prompt, and the needed answer log-probs."""
    generator = torch.Generator().manual_seed(seed)
    width = max(p + a for p, a in zip(prompts, answers, strict=True))
    ids = torch.randint(1, 23, (sum(sizes), width), generator=generator)
    needed = torch.zeros(sum(sizes), width - 1, dtype=torch.bool)
    row = 0
    for size, prompt, answer in zip(sizes, prompts, answers, strict=True):
        ids[row : row + size, :prompt] = ids[row, :prompt].clone()
        for place in range(row, row + size):
            own = int(torch.randint(1, answer + 1, (1,), generator=generator))
            needed[place, prompt - 1 : prompt - 1 + own] = True
        row += size
    return ids, needed


groups = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    min_size=1,
    max_size=4,
)


@given(groups, st.integers(0, 2**31 - 1), st.sampled_from(["llama", "mistral"]))
@settings(max_examples=30, deadline=None)
def test_shared_prefixes_change_neither_logits_nor_gradients(cases, seed, kind):
    ids, needed = grouped(*zip(*cases, strict=True), seed)
    found = []
    for share in (False, True):
        torch.manual_seed(0)
        model = tiny(kind).double()
        batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME, share)
        logits = model(**batch.inputs).logits[0][batch.positions]
        (
            logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)
        ).sum().backward()
        found.append((logits, [p.grad for p in model.parameters()], batch))
    (plain, plain_grads, plain_batch), (shared, shared_grads, shared_batch) = found
    torch.testing.assert_close(shared, plain, atol=5e-6, rtol=1e-5)
    for one, other in zip(shared_grads, plain_grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert torch.equal(shared_batch.targets, plain_batch.targets)
    fed, whole = (b.inputs["input_ids"].numel() for b in (shared_batch, plain_batch))
    assert fed <= whole


def tiny(kind):
    config_class, model_class, extra = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
    }[kind]
    config = config_class(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **extra,
    )
    config._attn_implementation = ATTENTION_NAME
    return model_class(config)


def test_a_shared_prompt_is_computed_once():
    ids, needed = grouped([4, 4], [10, 10], [1, 1], seed=3)
    batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME, True)
    assert batch.inputs["input_ids"].shape == (1, 20)
    assert batch.inputs["position_ids"].tolist() == [[*range(10), *range(10)]]
    assert batch.positions.tolist() == [9] * 4 + [19] * 4
    # Rows of different prompts share nothing.
    ids[1:4] += 1
    ids[5:] += 1
    ids[2, :2] = 0
    batch = ModelBatch.plan(ids, needed, CPU, ATTENTION_NAME, True)
    assert batch.inputs["input_ids"].numel() > 20


def test_plans_are_followed_and_columns_narrowed():
    data = BatchedDataDict(
        input_ids=torch.zeros(5, 8, dtype=torch.int64),
        input_lengths=torch.tensor([3, 5, 2, 8, 1]),
        other=torch.zeros(5),
        advantages=torch.zeros(5, 8, 2),
        texts=list("abcde"),
    )
    assert micro_batches(data, 2) == [
        MicroBatch(0, 2, 5),
        MicroBatch(2, 4, 8),
        # Log-probs need two columns, even for a one-token row.
        MicroBatch(4, 5, 2),
    ]
    part = part_of(data, MicroBatch(0, 2, 5))
    assert part["input_ids"].shape == (2, 5)
    assert part["advantages"].shape == (2, 5, 2)
    assert part["input_ids"].data_ptr() == data["input_ids"].data_ptr()
    assert part["texts"] == ["a", "b"]
    assert part["other"].shape == (2,)
    data.micro_batch_indices = [[[0, 3], [3, 5]]]
    assert micro_batches(data, 2) == [MicroBatch(0, 3, 5), MicroBatch(3, 5, 8)]


def test_a_shard_of_several_global_batches_has_no_micro_batches():
    data = BatchedDataDict(
        input_ids=torch.zeros(2, 8), input_lengths=torch.tensor([1, 2])
    )
    data.micro_batch_indices = [[[0, 1]], [[0, 1]]]
    with pytest.raises(BatchError, match="has 2 global batches; take one"):
        micro_batches(data, 2)
    assert [len(b["input_ids"]) for b in global_batches(data, 1)] == [1, 1]
