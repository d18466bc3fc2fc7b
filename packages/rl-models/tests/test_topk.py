"""Top-k logits and the inputs of a distillation loss, against plain transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError
from rl_models.config import PolicyConfig
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.testing import build_tiny_model
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.types import LossInputType, LossType

K = 4
LENGTHS = torch.tensor([9, 4, 7, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("topk") / "model", seed=5)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(9)
    ids = torch.randint(3, 15, (4, 9), generator=generator)
    ids[columns >= LENGTHS[:, None]] = 0
    mask = (columns >= 2) & (columns < LENGTHS[:, None])
    mask[0, 5] = False
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": LENGTHS,
            "token_mask": mask.float(),
            "sample_mask": torch.ones(4),
        }
    )


@pytest.fixture(scope="module")
def truth(folder, rows):
    """[B, S, V] float64 logits."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(input_ids=rows["input_ids"]).logits


def backend(folder, **settings):
    config = PolicyConfig(
        model_name=str(folder), max_total_sequence_length=64, **settings
    )
    made = DTensorTrainingBackend()
    made.setup(config.to_dict())
    return made


def needed(rows):
    """[B, S]: positions whose next token is trained on."""
    return torch.nn.functional.pad(rows["token_mask"][:, 1:] != 0, (0, 1))


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_they_are_the_largest_logits_with_their_normalizer(
    folder, rows, truth, temperature
):
    made = backend(folder)
    found = made.get_topk_logits(rows, k=K, micro_batch_size=3, temperature=temperature)
    scaled = truth / (temperature or 1.0)
    here = needed(rows)
    values, indices = scaled.topk(K, dim=-1)
    assert torch.equal(found["topk_indices"][here].long(), indices[here])
    for name, want in (
        ("topk_logits", values),
        ("topk_log_normalizer", scaled.logsumexp(-1)),
    ):
        assert torch.allclose(found[name][here].double(), want[here], atol=1e-5)
        assert not found[name][~here].any(), "0 where nothing was asked for"
    made.shutdown()


class Capture:
    """Records its inputs; the loss is a sum of all of them."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    needs_entropy = True

    def __init__(self):
        self.parts = []

    def __call__(self, data, global_valid_seqs, global_valid_toks, **inputs):
        self.parts.append({k: v.detach().clone() for k, v in inputs.items()})
        total = sum(value.sum() for value in inputs.values())
        return total / global_valid_toks, {}


def test_a_distillation_loss_gets_the_students_side(folder, rows, truth):
    # The teacher's tokens are those of other logits.
    generator = torch.Generator().manual_seed(1)
    vocabulary = truth.shape[-1]
    indices = torch.rand(4, 9, vocabulary, generator=generator).topk(K).indices
    made, loss = backend(folder), Capture()
    data = BatchedDataDict({**rows, "topk_indices": indices.to(torch.int32)})
    metrics = made.train_step(data, loss, global_batch_size=4, micro_batch_size=4)
    (part,) = loss.parts
    here = rows["token_mask"][:, 1:] != 0
    logits = truth[:, :-1]
    log_probs = logits.log_softmax(-1)
    wanted = {
        "student_topk_logits": logits.gather(-1, indices[:, :-1]),
        "student_log_normalizer": logits.logsumexp(-1),
        "student_entropy": -(log_probs.exp() * log_probs).sum(-1),
    }
    assert set(part) == set(wanted)
    for name, want in wanted.items():
        assert torch.allclose(part[name][here].double(), want[here], atol=1e-5), name
        assert not part[name][~here].any()
    assert metrics["grad_norm"] > 0
    made.shutdown()


def test_wrong_tokens_are_named(folder, rows):
    made = backend(folder)
    with pytest.raises(BatchError, match="vocabulary"):
        made.get_topk_logits(rows, k=1000, micro_batch_size=4)
    with pytest.raises(BatchError, match="'topk_indices'"):
        made.train_step(rows, Capture(), global_batch_size=4, micro_batch_size=4)
    indices = torch.full((4, 9, K), 999, dtype=torch.int32)
    data = BatchedDataDict({**rows, "topk_indices": indices})
    with pytest.raises(BatchError, match=r"token 999.*one vocabulary"):
        made.train_step(data, Capture(), global_batch_size=4, micro_batch_size=4)
    made.shutdown()


@pytest.mark.usefixtures("ray_cluster")
def test_two_ranks_and_packing_give_the_same(folder, rows, truth):
    cluster = RayVirtualCluster([2], use_gpus=False)
    policy = HuggingFacePolicy(
        folder,
        cluster,
        max_total_sequence_length=64,
        sequence_packing={"train_mb_tokens": 64},
    )
    try:
        found = policy.get_topk_logits(rows.slice(0, 3), K)
        with pytest.raises(BatchError, match="k must be at least 1: got 0"):
            policy.get_topk_logits(rows, 0)
    finally:
        policy.shutdown()
        cluster.shutdown()
    here = needed(rows)[:3]
    assert found["topk_logits"].shape == (3, 9, K)
    values, indices = truth[:3].topk(K, dim=-1)
    assert torch.equal(found["topk_indices"][here].long(), indices[here])
    assert torch.allclose(found["topk_logits"][here].double(), values[here], atol=1e-5)
