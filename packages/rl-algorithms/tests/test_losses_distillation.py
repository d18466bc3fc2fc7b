from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.distillation import DistillationLossFn
from rl_algorithms.testing import LossBatch, check_loss, token_batch
from rl_distributed.errors import ConfigError
from rl_models.types import LossInputType

V, K = 7, 3
KINDS = {
    "forward": {"kl_type": "forward"},
    "reverse": {"kl_type": "reverse"},
    "mixed": {"kl_type": "mixed", "mixed_kl_weight": 0.3},
    "jsd": {"kl_type": "jsd", "mixed_kl_weight": 0.8},
}
OUTSIDE = {
    "renormalised": {},
    "zero": {"zero_outside_topk": True},
    "bucket": {"bucket_outside_topk": True},
}


def logits(seed, num_rows, width, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width, V)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def distillation_batch(seed, teacher=None, student=None):
    """Return teacher columns as from `get_topk_logits`, and the student's side."""
    rows = token_batch(seed, num_rows=4, width=6)
    teacher = logits(seed, 4, 6) if teacher is None else teacher
    student = logits(seed + 999, 4, 6) if student is None else student
    values, indices = teacher.topk(K, dim=-1)
    data = {
        name: rows.data[name]
        for name in ("input_ids", "input_lengths", "token_mask", "sample_mask")
    }
    data |= {
        "topk_logits": values,
        "topk_indices": indices,
        "topk_log_normalizer": teacher.logsumexp(-1),
    }
    log_probs = student.log_softmax(-1)
    inputs = {
        "student_topk_logits": student.gather(-1, indices)[:, :-1],
        "student_log_normalizer": student.logsumexp(-1)[:, :-1],
        "student_entropy": -(log_probs.exp() * log_probs).sum(-1)[:, :-1],
    }
    return LossBatch(data, inputs)


def kl(p, q):
    return sum(
        float(a) * math.log(a / max(b, math.exp(-100)))
        for a, b in zip(p, q, strict=True)
        if a > 0
    )


def divergence(p, q, kind, w):
    if kind == "forward":
        return kl(p, q)
    if kind == "reverse":
        return kl(q, p)
    if kind == "mixed":
        return w * kl(p, q) + (1 - w) * kl(q, p)
    middle = [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]
    return w * kl(p, middle) + (1 - w) * kl(q, middle)


def reference(kind, outside, weight):
    """Compute GKD's formulas position by position, over the setting's events."""

    def loss(data, inputs, held):
        total, count = 0.0, 0.0
        for row in range(len(data["token_mask"])):
            for t in range(1, data["token_mask"].shape[1]):
                counts = data["token_mask"][row, t] * data["sample_mask"][row]
                if counts == 0:
                    continue
                count += float(counts)
                total += _position(data, inputs, row, t - 1)
        return total / max(count, 1.0)

    def _position(data, inputs, row, i):
        teacher = data["topk_logits"][row, i].tolist()
        student = inputs["student_topk_logits"][row, i].tolist()
        p = [math.exp(x - float(data["topk_log_normalizer"][row, i])) for x in teacher]
        norm = float(inputs["student_log_normalizer"][row, i])
        q = [math.exp(x - norm) for x in student]
        if outside == "bucket":
            return divergence([*p, 1 - sum(p)], [*q, 1 - sum(q)], kind, weight)
        p = [x / sum(p) for x in p]
        if outside == "renormalised":
            return divergence(p, [x / sum(q) for x in q], kind, weight)
        rest = 1 - sum(q)
        inside = divergence(p, q, kind, weight)
        if kind == "forward":
            return inside
        if kind == "jsd":
            return inside + (1 - weight) * rest * math.log(1 / (1 - weight))
        # The sum over the other tokens of q (log q + 100).
        entropy = float(inputs["student_entropy"][row, i])
        others = -entropy - sum(x * math.log(x) for x in q) + 100 * rest
        return inside + (1.0 if kind == "reverse" else 1 - weight) * others

    return loss


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_formula_of_its_paper_and_depends_on_nothing_else(kind, outside):
    settings = {**KINDS[kind], **OUTSIDE[outside]}
    weight = settings.get("mixed_kl_weight", 0.5)
    check_loss(
        DistillationLossFn(settings),
        distillation_batch,
        reference(kind, outside, weight),
        num_examples=4,
    )


def run(batch, settings, **columns):
    data = {**batch.data, **columns}
    return DistillationLossFn(settings)(data, *batch.counts(), **batch.inputs)


@pytest.mark.parametrize("outside", ["renormalised", "bucket"])
@pytest.mark.parametrize("kind", KINDS)
def test_is_zero_for_equal_distributions_only(kind, outside):
    settings = {**KINDS[kind], **OUTSIDE[outside]}
    same = logits(0, 4, 6)
    loss, metrics = run(distillation_batch(0, same, same + 2.0), settings)
    assert float(loss) == pytest.approx(0, abs=1e-12)
    assert float(metrics["top1_agreement"]) == 1
    masses = [float(metrics[f"{who}_topk_mass"]) for who in ("teacher", "student")]
    assert masses[0] == pytest.approx(masses[1])
    assert 0 < masses[0] < 1
    assert float(run(distillation_batch(0), settings)[0]) > 0.01


def whole_divergence(teacher, student, batch, kind, weight):
    """Return the divergence over the whole vocabulary."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    mask = batch.data["token_mask"][:, 1:] * batch.data["sample_mask"][:, None]
    values = [
        divergence(p[row, t].tolist(), q[row, t].tolist(), kind, weight)
        for row, t in mask.nonzero().tolist()
    ]
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_bucket_is_a_lower_bound_of_the_whole_divergence(kind, seed):
    settings = {**KINDS[kind], "bucket_outside_topk": True}
    teacher, student = logits(seed, 4, 6), logits(seed + 7, 4, 6)
    batch = distillation_batch(seed, teacher, student)
    weight = settings.get("mixed_kl_weight", 0.5)
    whole = whole_divergence(teacher, student, batch, kind, weight)
    assert 0 < float(run(batch, settings)[0]) <= whole


def test_zero_outside_punishes_what_the_teacher_does_not_say():
    teacher = logits(1, 4, 6)
    outside = teacher.topk(V, dim=-1).indices[..., K:]
    strays = teacher.scatter_add(-1, outside, torch.full_like(teacher, 2.0))
    plain, zero = (
        [
            float(run(distillation_batch(1, teacher, student), settings)[0])
            for student in (teacher, strays)
        ]
        for settings in (
            {"kl_type": "reverse"},
            {"kl_type": "reverse", "zero_outside_topk": True},
        )
    )
    assert plain[0] == pytest.approx(plain[1], abs=1e-9), "renormalised: not seen"
    assert zero[1] > zero[0] + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_outside_topk": True, "bucket_outside_topk": True}, "exclude each"),
        ({"kl_type": "jsd", "mixed_kl_weight": 1.0}, "use forward or reverse"),
        ({"kl_type": "backward"}, "reverse"),
        ({"mixed_kl_weight": 1.5}, "at most 1"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistillationLossFn(settings)


def test_it_says_what_it_needs():
    batch = distillation_batch(0)
    loss = DistillationLossFn({"zero_outside_topk": True, "kl_type": "mixed"})
    assert loss.input_type is LossInputType.DISTILLATION
    assert loss.needs_entropy
    assert not DistillationLossFn({"zero_outside_topk": True}).needs_entropy
    inputs = {k: v for k, v in batch.inputs.items() if k != "student_entropy"}
    with pytest.raises(LossInputError, match="student_entropy: got student_log"):
        loss(batch.data, *batch.counts(), **inputs)
    with pytest.raises(LossInputError, match="student_topk_logits: got nothing"):
        loss(batch.data, *batch.counts())
    narrow = batch.data["topk_logits"][..., :2]
    with pytest.raises(LossInputError, match=r"must be \[4, 5, 3\]: got \[4, 5, 2\]"):
        run(batch, {}, topk_logits=narrow)
    data = {k: v for k, v in batch.data.items() if k != "topk_log_normalizer"}
    with pytest.raises(LossInputError, match="'topk_log_normalizer' of the batch is m"):
        loss(data, *batch.counts(), **batch.inputs)
