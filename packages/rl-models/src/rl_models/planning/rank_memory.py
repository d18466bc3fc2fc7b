"""Memory of one rank of a model: the terms that all training backends have."""

from __future__ import annotations

from dataclasses import dataclass

from rl_models.config import OptimizerConfig
from rl_models.planning.layouts import Layout
from rl_models.planning.model_shape import ModelShape

__all__ = [
    "MASTER_BYTES",
    "MicroBatch",
    "ModelMemory",
    "RankWork",
    "layer_work",
    "optimizer_copies",
    "optimizer_work",
]

MASTER_BYTES = 4
"""Bytes of a number of the weights that an optimizer updates."""
_COPIES = {
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adadelta": 2,
    "RMSprop": 1,
    "SGD": 0,
    "Muon": 1,
}
_COPIES_UNKNOWN = 2
_IN_PLACE = ("SGD", "Muon")
"""Optimizers that make no numbers of all parameters at once."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest forward pass of a phase."""

    num_tokens: int
    """Tokens that go through the model."""
    num_positions: int
    """Number of these that need logits."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank does with a model."""

    training: MicroBatch
    """The largest micro-batch of training."""
    passing: MicroBatch
    """The largest one of a pass without gradients."""
    num_micro_batches: int
    """Micro-batches per optimizer step."""
    on_gpu: bool
    """Whether ranks have GPUs."""
    is_trained: bool = True
    """False for a reference policy or a teacher."""
    keeps_logits: bool = False
    """Whether a loss needs more of the logits than log-probs, as in distillation: they
    then exist all at once."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes on one rank's device."""

    weights: int
    """Shards of the weights, kept from start to end."""
    optimizer: int
    """Shards of the optimizer's state, kept from the first step on."""
    gathered: int
    """Weights in use by the computation."""
    gradients: int
    activations: int
    """Tensors kept for the backward pass, and that pass's own."""
    logits: int
    passing_activations: int
    """The same without a backward pass, as for log-probs."""
    passing_logits: int
    sync: int
    """The largest weight, whole and converted, while weights are sent."""
    start: int
    """While the model is loaded: a rank reads its part."""
    host: int
    """Shards in the memory of the machine, with `policy.dtensor.cpu_offload`."""

    @property
    def resident(self) -> int:
        """Bytes that stay in use while others work."""
        return self.weights + self.optimizer

    @property
    def training(self) -> int:
        """The peak of an optimizer step."""
        working = self.gathered + self.gradients + self.activations + self.logits
        return self.resident + working

    @property
    def passing(self) -> int:
        """The peak of a forward pass without a backward pass."""
        working = self.gathered + self.passing_activations + self.passing_logits
        return self.resident + working


def optimizer_copies(optimizer: OptimizerConfig) -> tuple[int, bool]:
    """Return numbers per parameter in the optimizer's state, and whether that is known.

    Args:
        optimizer: Section `policy.optimizer`.
    """
    module, _, name = optimizer.name.rpartition(".")
    known = name in _COPIES and module.startswith("torch.optim")
    copies = _COPIES.get(name, _COPIES_UNKNOWN) if known else _COPIES_UNKNOWN
    kwargs = optimizer.kwargs
    extra = sum(bool(kwargs.get(key)) for key in ("amsgrad", "centered"))
    if name in ("SGD", "RMSprop"):
        extra += bool(kwargs.get("momentum"))
    return copies + extra, known


def optimizer_work(
    optimizer: OptimizerConfig, num_updated: int, *, on_gpu: bool
) -> int:
    """Return the temporary bytes of an optimizer's step.

    torch updates all parameters at once by default on a GPU (`foreach`), which takes a
    float32 number for each of them; with `fused`, or one by one, it takes none.

    Args:
        optimizer: Section `policy.optimizer`.
        num_updated: Number of parameters that this rank updates.
        on_gpu: Whether ranks have GPUs.
    """
    kwargs, name = optimizer.kwargs, optimizer.name.rpartition(".")[2]
    default = on_gpu and not kwargs.get("fused")
    given = kwargs.get("foreach")
    at_once = default if given is None else bool(given)
    return MASTER_BYTES * num_updated if at_once and name not in _IN_PLACE else 0


def layer_work(
    shape: ModelShape, layout: Layout, num_tokens: int, compute_bytes: int
) -> int:
    """Return the temporary bytes of one layer's computation.

    Args:
        shape: Sizes of the model.
        layout: How ranks share it.
        num_tokens: Tokens of the ranks that share a row.
        compute_bytes: Bytes of a number that is computed with.
    """
    columns = shape.intermediate_size
    if shape.num_expert_layers:
        columns = max(columns, shape.experts_per_token * shape.expert_size)
    tokens = -(-num_tokens // layout.context)
    numbers = columns / layout.tensor + 2 * shape.hidden_size
    return round(tokens * numbers * compute_bytes)
