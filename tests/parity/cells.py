"""One cell of the parity matrix: a family, a layout, a loss; and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from parity.families import VOCABULARY
from rl_algorithms.losses.clipped_pg import ClippedPGLossFn
from rl_algorithms.losses.dpo import DPOLossFn
from rl_algorithms.losses.nll import NLLLossFn
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor import DTensorTrainingBackend, tensor_parallel

__all__ = [
    "LAYOUTS",
    "LOSSES",
    "Layout",
    "Outcome",
    "reference",
    "refusal_of",
    "run_rank",
]

NUM_ROWS, WIDTH, NUM_STEPS = 8, 20, 3
RATE = 0.05


@dataclass(frozen=True)
class Layout:
    """Settings of a policy, and how many ranks it has."""

    num_ranks: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    """Whether the driver packs rows into micro-batches by tokens."""
    padded: bool = False
    """Whether the driver makes micro-batches of rows of similar length, by tokens."""


def _parallel(num_ranks: int, dtensor: Any = None, **axes: Any) -> Layout:
    settings = {"parallelism": axes, "dtensor": dtensor or {}}
    return Layout(num_ranks, settings)


LAYOUTS: dict[str, Layout] = {
    "one rank": Layout(1),
    "FSDP 2": Layout(2),
    "FSDP 2 by layers": _parallel(2, {"shard_layers": True}),
    "HSDP 2 x 2": _parallel(4, {"data_replicas": 2}),
    "TP 2": _parallel(2, tensor=2),
    "TP 2, sequence": _parallel(2, tensor=2, sequence=True),
    "FSDP 2 x TP 2": _parallel(4, tensor=2),
    "FSDP 2 x TP 2, sequence": _parallel(
        4, {"shard_layers": True}, tensor=2, sequence=True
    ),
    "recomputed": _parallel(1, {"activation_checkpointing": True}),
    "TP 2, sequence, recomputed": _parallel(
        2, {"activation_checkpointing": True}, tensor=2, sequence=True
    ),
    "packed": Layout(1, packed=True),
    "dynamic": Layout(1, padded=True),
    "TP 2, packed": Layout(2, {"parallelism": {"tensor": 2}}, packed=True),
}
"""Layouts of the `dtensor` backend, by the name in the table of the docs."""

_POLICY_GRADIENT = {"reference_policy_kl_penalty": 0.1}
LOSSES: dict[str, Any] = {
    "SFT": NLLLossFn,
    "GRPO": lambda: ClippedPGLossFn({**_POLICY_GRADIENT, "token_level_loss": False}),
    "PPO": lambda: ClippedPGLossFn({**_POLICY_GRADIENT, "ratio_clip_c": 3.0}),
    "DPO": lambda: DPOLossFn({"reference_policy_kl_penalty": 0.5}),
}


@dataclass
class Outcome:
    """What a cell gave."""

    loss: float
    """The loss of the first step."""
    grad_norm: float
    gradients: dict[str, Tensor]
    """Whole gradients of the first step."""
    weights: dict[str, Tensor]
    """Whole weights after three steps of SGD."""


def make_batch(loss: str) -> BatchedDataDict[Any]:
    """Rows of different lengths with the columns of every loss; two make a pair."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(6, WIDTH + 1, (NUM_ROWS,), generator=generator)
    column = torch.arange(WIDTH)
    within = column < lengths[:, None]
    ids = torch.randint(2, VOCABULARY, (NUM_ROWS, WIDTH), generator=generator)
    mask = (column >= lengths[:, None] // 3 + 1) & within
    shape = (NUM_ROWS, WIDTH)
    rows = {
        "input_ids": ids * within,
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": torch.ones(NUM_ROWS),
    }
    if loss in ("GRPO", "PPO"):
        rows["advantages"] = torch.randn(shape, generator=generator)
        rows["prev_logprobs"] = -3 - torch.rand(shape, generator=generator)
        rows["generation_logprobs"] = rows["prev_logprobs"].clone()
    if loss in ("GRPO", "PPO", "DPO"):
        noise = torch.rand(shape, generator=generator)
        rows["reference_policy_logprobs"] = (-3 - noise) * mask
    return BatchedDataDict(rows)


def reference(folder: str, loss: str) -> Outcome:
    """Compute a cell by plain transformers, eagerly, in one process and float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    data, loss_fn = make_batch(loss), LOSSES[loss]()
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    counts = data["sample_mask"].sum(), mask.sum()
    columns = torch.arange(WIDTH)
    attention = (columns < data["input_lengths"][:, None]).long()
    first: Outcome | None = None
    for _ in range(NUM_STEPS):
        model.zero_grad()
        output = model(data["input_ids"], attention_mask=attention, use_cache=False)
        logprobs = torch.log_softmax(output.logits[:, :-1], dim=-1)
        logprobs = logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
        value, _ = loss_fn(data, *counts, next_token_logprobs=logprobs)
        value.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        if first is None:
            squares = sum(g.double().square().sum() for g in gradients.values())
            first = Outcome(value.item(), float(squares) ** 0.5, gradients, {})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= RATE * gradients[name]
    assert first is not None
    first.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return first


def _share(data: BatchedDataDict[Any], layout: Layout, backend: Any, loss: str) -> Any:
    """Rows of this rank, as the driver would send them."""
    place = backend._layout
    tokens = {
        "max_tokens_per_microbatch": 48,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    budget: dict[str, Any] = {}
    if layout.packed:
        algorithm = "modified_first_fit_decreasing"
        packing = {"algorithm": algorithm, "sequence_length_pad_multiple": 1}
        budget["sequence_packing_args"] = {**tokens, **packing}
    elif layout.padded:
        budget["dynamic_batching_args"] = {**tokens, "sequence_length_round": 4}
    pairs = {"rows_per_group": getattr(LOSSES[loss](), "rows_per_group", 1)}
    shards = data.shard_by_batch_size(place.data_size, NUM_ROWS, **budget, **pairs)
    return (shards[0] if budget else shards)[place.data_rank]


def run_rank(folder: str, layout: Layout, loss: str) -> Outcome | None:
    """Compute a cell with this process as one rank; rank 0 gives the outcome."""
    settings: dict[str, Any] = {
        "max_total_sequence_length": 64,
        "max_grad_norm": None,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": RATE}},
        **layout.settings,
    }
    config = PolicyConfig.from_dict({"model_name": folder, **settings})
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    gradients: dict[str, Tensor] = {}
    update = backend._update

    def keep(metrics: dict[str, list[Any]]) -> float:
        if not gradients:
            gradients.update(backend.model.full_gradients())
        return update(metrics)

    backend._update = keep  # type: ignore[method-assign]
    rows = _share(make_batch(loss), layout, backend, loss)
    mbs = 2 if loss == "DPO" else 3
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        result = backend.train_step(rows, LOSSES[loss](), gbs=NUM_ROWS, mbs=mbs)
        losses.append(result["loss"].item())
        norms.append(result["grad_norm"].item())
    weights = {name: value.clone() for name, value in backend.export_weights("float32")}
    backend.shutdown()
    if backend.ranks.rank:
        return None
    return Outcome(losses[0], norms[0], gradients, weights)


def refusal_of(folder: str, sabotage: str | None = None) -> str:
    """Return why two ranks refuse to share the layers of a model.

    Args:
        folder: The model.
        sabotage: Name of a function of `tensor_parallel` that says False to everything,
            as a plan with a mistake would.
    """
    kept = None if sabotage is None else getattr(tensor_parallel, sabotage)
    settings = {"model_name": folder, "parallelism": {"tensor": 2}}
    backend = DTensorTrainingBackend()
    try:
        if sabotage is not None:
            setattr(tensor_parallel, sabotage, lambda *arguments: False)
        backend.setup(PolicyConfig.from_dict(settings).to_dict())
    except UnsupportedModelError as error:
        return str(error)
    finally:
        if sabotage is not None:
            setattr(tensor_parallel, sabotage, kept)
        backend.shutdown()
    return "it was not refused"
