"""One cell of the parity matrix: a family, a layout, a loss; and its reference."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from parity.families import VOCABULARY
from rl_algorithms.losses.clipped_pg import ClippedPGLossFn
from rl_algorithms.losses.dpo import DPOLossFn
from rl_algorithms.losses.nll import NLLLossFn
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor import DTensorTrainingBackend, experts, tensor_parallel
from rl_models.training.dtensor.context_parallel import ContextTokens
from rl_models.training.dtensor.forward import forward_logprobs

__all__ = [
    "LAYOUTS",
    "LOSSES",
    "MIXTURES",
    "Layout",
    "Outcome",
    "held_by_stages",
    "layouts_of",
    "reference",
    "reference_with_routers",
    "refusal_of",
    "refusal_of_context",
    "refusal_of_experts",
    "refusal_of_stages",
    "run_ends",
    "run_rank",
    "run_resumed",
    "run_saving",
    "saved_bytes",
]

NUM_ROWS, WIDTH, NUM_STEPS, MICRO_BATCH = 8, 20, 3, 3
RATE = 0.05
LORA: dict[str, Any] = {"r": 2, "alpha": 3.0}


@dataclass(frozen=True)
class Layout:
    """Settings of a policy, and its number of ranks."""

    num_ranks: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    """Whether the driver packs rows into micro-batches by tokens."""
    padded: bool = False
    """Whether the driver makes micro-batches of rows of similar length, by tokens."""
    has_adapters: bool = False
    """Whether an adapter is trained instead of the weights."""
    trains_ends: bool = False
    """Whether the embedding and the head are trained fully beside the adapter."""


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
    "CP 2": _parallel(2, context=2),
    "CP 2, packed": Layout(2, {"parallelism": {"context": 2}}, packed=True),
    "FSDP 2 x CP 2, recomputed": _parallel(
        4, {"shard_layers": True, "activation_checkpointing": True}, context=2
    ),
    "HSDP 2 x CP 2": _parallel(4, {"data_replicas": 2}, context=2),
    "CP 2 x TP 2, sequence": _parallel(
        4, {"shard_layers": True}, context=2, tensor=2, sequence=True
    ),
    "EP 2": _parallel(2, expert=2),
    "FSDP 2 x EP 2, recomputed": _parallel(
        4, {"shard_layers": True, "activation_checkpointing": True}, expert=2
    ),
    "EP 4, packed": Layout(4, {"parallelism": {"expert": 4}}, packed=True),
    "CP 2 x EP 2": _parallel(2, context=2, expert=2),
    "HSDP 2 x EP 2": _parallel(4, {"data_replicas": 2}, expert=2),
    "EP 2 x TP 2": _parallel(4, expert=2, tensor=2),
    "EP 2 x TP 2, sequence": _parallel(
        4, {"shard_layers": True}, expert=2, tensor=2, sequence=True
    ),
    "PP 2": _parallel(2, pipeline=2),
    "PP 2, packed, recomputed": Layout(
        2,
        {
            "parallelism": {"pipeline": 2},
            "dtensor": {"activation_checkpointing": True},
        },
        packed=True,
    ),
    "TP 2 x PP 2": _parallel(4, pipeline=2, tensor=2),
    "TP 2 x PP 2, sequence": _parallel(4, pipeline=2, tensor=2, sequence=True),
    "FSDP 2 x PP 2": _parallel(4, {"shard_layers": True}, pipeline=2),
    "LoRA": Layout(1, has_adapters=True),
    "LoRA, FSDP 2 by layers": Layout(
        2, {"dtensor": {"shard_layers": True}}, has_adapters=True
    ),
    "LoRA, TP 2": Layout(2, {"parallelism": {"tensor": 2}}, has_adapters=True),
    "LoRA, CP 2": Layout(2, {"parallelism": {"context": 2}}, has_adapters=True),
    "LoRA, PP 2": Layout(2, {"parallelism": {"pipeline": 2}}, has_adapters=True),
    "LoRA, TP 2 x PP 2, sequence": Layout(
        4,
        {"parallelism": {"tensor": 2, "pipeline": 2, "sequence": True}},
        has_adapters=True,
    ),
    "LoRA and ends, FSDP 2 by layers": Layout(
        2, {"dtensor": {"shard_layers": True}}, has_adapters=True, trains_ends=True
    ),
    "LoRA and ends, TP 2 x PP 2": Layout(
        4,
        {"parallelism": {"tensor": 2, "pipeline": 2}},
        has_adapters=True,
        trains_ends=True,
    ),
}
"""Layouts of the `dtensor` backend, by the name in the table of the docs."""

MIXTURES = ("mixtral", "qwen3_moe")
"""Mixture-of-experts families."""


def layouts_of(family: str) -> list[str]:
    """Return the names of the layouts that a family supports."""
    return [
        name
        for name, layout in LAYOUTS.items()
        if family in MIXTURES or "expert" not in layout.settings.get("parallelism", {})
    ]


_POLICY_GRADIENT = {"reference_policy_kl_penalty": 0.1}
LOSSES: dict[str, Any] = {
    "SFT": NLLLossFn,
    "GRPO": lambda: ClippedPGLossFn({**_POLICY_GRADIENT, "token_level_loss": False}),
    "PPO": lambda: ClippedPGLossFn({**_POLICY_GRADIENT, "ratio_clip_c": 3.0}),
    "DPO": lambda: DPOLossFn({"reference_policy_kl_penalty": 0.5}),
}


@dataclass
class Outcome:
    """The results of a cell."""

    loss: float
    """The loss of the first step."""
    grad_norm: float
    gradients: dict[str, Tensor]
    """Whole gradients of the first step."""
    weights: dict[str, Tensor]
    """Whole weights after three steps of SGD."""


def make_batch(loss: str) -> BatchedDataDict[Any]:
    """Return rows of different lengths with every loss's columns; two make a pair."""
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


def adapter_folder(folder: str) -> Path:
    """Return the folder of the adapter from which a model's LoRA layouts start."""
    return Path(folder) / "adapter"


def _with_adapter(model: Any, folder: str) -> Any:
    """Return a peft model whose adapter does not start at zero; it is saved."""
    config = LoraConfig(
        r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=_adapted(model)
    )
    generator = torch.Generator().manual_seed(5)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    adapted.save_pretrained(str(adapter_folder(folder)))
    return adapted


def _adapted(model: Any) -> list[str]:
    """Return the names of the layers that get an adapter: all that peft supports."""
    layers = [m for layer in model.model.layers for m in layer.named_modules()]
    names = {n.rpartition(".")[2] for n, m in layers if isinstance(m, nn.Linear)}
    if model.config.model_type in MIXTURES:
        names &= {f"{name}_proj" for name in "qkvo"}
    return sorted(names)


def reference(
    folder: str, loss: str, *, has_adapters: bool = False, trains_ends: bool = False
) -> Outcome:
    """Compute a cell with plain transformers, eagerly, in one process and float32.

    Args:
        folder: The model.
        loss: Name of the loss.
        has_adapters: Train a peft adapter instead of the weights.
        trains_ends: Train the embedding and the head beside it.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if has_adapters:
        model = _with_adapter(model, folder)
    if trains_ends:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(True)
    trained = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
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
        gradients = {n: p.grad.clone() for n, p in trained.items()}
        if first is None:
            squares = sum(g.double().square().sum() for g in gradients.values())
            first = Outcome(value.item(), float(squares) ** 0.5, gradients, {})
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter -= RATE * gradients[name]
    assert first is not None
    model = model.merge_and_unload() if has_adapters else model
    first.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return first


def reference_with_routers(folder: str, weight: float) -> Outcome:
    """Compute `reference` of SFT with the routers' loss and without a step."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    home: Any = inspect.getmodule(type(model))
    config, data = model.config, make_batch("SFT")
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    counts = data["sample_mask"].sum(), data["token_mask"][:, 1:].sum()
    columns, total = torch.arange(WIDTH), 0.0
    for start in range(0, NUM_ROWS, MICRO_BATCH):
        part = data.slice(start, min(start + MICRO_BATCH, NUM_ROWS))
        # A row's last token predicts nothing, so it does not go through the model.
        is_token = columns < part["input_lengths"][:, None] - 1
        output = model(
            part["input_ids"], attention_mask=is_token.long(), output_router_logits=True
        )
        logprobs = torch.log_softmax(output.logits[:, :-1], dim=-1)
        logprobs = logprobs.gather(-1, part["input_ids"][:, 1:, None])[..., 0]
        value, _ = NLLLossFn()(part, *counts, next_token_logprobs=logprobs)
        balance = home.load_balancing_loss_func(
            output.router_logits, experts, config.num_experts_per_tok, is_token
        )
        value = value + weight * balance * part["token_mask"][:, 1:].sum() / counts[1]
        value.backward()
        total += value.item()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    squares = sum(g.double().square().sum() for g in gradients.values())
    weights = {
        n: (p - RATE * gradients[n]).detach() for n, p in model.named_parameters()
    }
    return Outcome(total, float(squares) ** 0.5, gradients, weights)


def _share(data: BatchedDataDict[Any], layout: Layout, backend: Any, loss: str) -> Any:
    """Return this rank's rows, as the driver would send them."""
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


def _started(folder: str, layout: Layout) -> DTensorTrainingBackend:
    settings: dict[str, Any] = {
        "max_total_sequence_length": 64,
        "max_grad_norm": None,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": RATE}},
        **layout.settings,
    }
    if layout.has_adapters:
        path = str(adapter_folder(folder))
        saved = PeftConfig.from_pretrained(path)
        targets = sorted(saved.target_modules)
        settings["lora"] = {**LORA, "adapter_path": path, "target_modules": targets}
        if layout.trains_ends:
            # One of which is the other where the two are tied.
            settings["lora"]["modules_to_save"] = ["embed_tokens", "lm_head"]
    config = PolicyConfig.from_dict({"model_name": folder, **settings})
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    return backend


def saved_bytes(folder: str, layout: Layout) -> int:
    """Return the bytes of activations kept by a forward pass of all rows."""
    backend = _started(folder, layout)
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        if not whole.is_leaf or not whole.requires_grad:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = make_batch("SFT")
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        needed = rows["token_mask"][:, 1:] != 0
        logprobs = forward_logprobs(backend.model, rows["input_ids"], needed, 1.0)
    logprobs.sum().backward()
    backend.shutdown()
    return sum(held.values())


def run_rank(
    folder: str, layout: Layout, loss: str, num_steps: int = NUM_STEPS
) -> Outcome | None:
    """Compute a cell with this process as one rank; rank 0 returns the outcome."""
    backend = _started(folder, layout)
    gradients: dict[str, Tensor] = {}
    update = backend._update

    def keep() -> tuple[float, dict[str, list[Any]]]:
        if not gradients:
            # Copies on the CPU, where the reference is.
            found = backend.model.full_gradients()
            gradients.update((name, value.cpu()) for name, value in found)
        return update()

    backend._update = keep  # type: ignore[method-assign]
    rows = _share(make_batch(loss), layout, backend, loss)
    micro_batch_size = 2 if loss == "DPO" else MICRO_BATCH
    losses, norms = [], []
    for _ in range(num_steps):
        result = backend.train_step(
            rows,
            LOSSES[loss](),
            global_batch_size=NUM_ROWS,
            micro_batch_size=micro_batch_size,
        )
        losses.append(result["loss"].item())
        norms.append(result["grad_norm"].item())
    exported = backend.export_weights("float32")
    weights = {name: value.cpu().clone() for name, value in exported}
    backend.shutdown()
    if backend.ranks.rank:
        return None
    return Outcome(losses[0], norms[0], gradients, weights)


def held_by_stages(folder: str) -> list[list[str]]:
    """Return the parameters for which each of two stages has memory."""
    backend = _started(folder, LAYOUTS["PP 2"])
    held: list[Any] = [None, None]
    dist.all_gather_object(held, list(backend.model.parameters))
    backend.shutdown()
    return held


def run_saving(folder: str, layout: Layout, target: str) -> dict[str, Any]:
    """Train a step and save; return whole weights, and the adapters sent."""
    backend = _started(folder, layout)
    rows = _share(make_batch("SFT"), layout, backend, "SFT")
    backend.train_step(
        rows, NLLLossFn(), global_batch_size=NUM_ROWS, micro_batch_size=MICRO_BATCH
    )
    backend.save_checkpoint(Path(target) / "weights", Path(target) / "state")
    found = {"weights": dict(backend.export_weights("float32"))}
    sent = backend.export_adapters("float32", with_base=False)
    found["sent"] = {name: value.clone() for name, value in sent}
    found["specs"] = {
        name: tuple(value.shape)
        for name, value in backend.adapter_specs(with_base=False).items()
    }
    backend.shutdown()
    return found


def run_resumed(folder: str, layout: Layout, source: str) -> dict[str, Tensor]:
    """Return the whole weights from a state of `run_saving`."""
    backend = _started(folder, layout)
    backend.load_checkpoint(None, Path(source) / "state")
    weights = {name: value.clone() for name, value in backend.export_weights("float32")}
    backend.shutdown()
    return weights


def run_ends(folder: str, layout: Layout) -> list[tuple[float, float]]:
    """Return losses and gradient norms if only row ends are trained on.

    Each row is a micro-batch, so some ranks that share its tokens have none of these.
    """
    backend = _started(folder, layout)
    rows = make_batch("SFT")
    column, lengths = torch.arange(WIDTH), rows["input_lengths"][:, None]
    rows["token_mask"] = ((column >= lengths - 2) & (column < lengths)).long()
    share = _share(rows, layout, backend, "SFT")
    steps = []
    for _ in range(2):
        result = backend.train_step(
            share, NLLLossFn(), global_batch_size=NUM_ROWS, micro_batch_size=1
        )
        steps.append((result["loss"].item(), result["grad_norm"].item()))
    backend.shutdown()
    return steps


def refusal_of(folder: str, sabotage: str | None = None) -> str:
    """Return why two ranks refuse to shard a model's layers.

    Args:
        folder: The model.
        sabotage: Name of a function of `tensor_parallel` that always returns False, as
            a faulty plan would.
    """
    with ExitStack() as stack:
        if sabotage is not None:
            stack.enter_context(patch.object(tensor_parallel, sabotage, _says_false))
        return _refusal(folder, {"tensor": 2})


def refusal_of_context(folder: str, sabotage: str | None = None) -> str:
    """Return why two ranks refuse to split a model's tokens.

    Args:
        folder: The model.
        sabotage: Method of `ContextTokens` that gives every rank the first tokens.
    """
    with ExitStack() as stack:
        if sabotage is not None:
            stack.enter_context(patch.object(ContextTokens, sabotage, _first_tokens))
        return _refusal(folder, {"context": 2})


def refusal_of_stages(folder: str) -> str:
    """Return why two ranks refuse to split a model into stages."""
    return _refusal(folder, {"pipeline": 2})


def refusal_of_experts(folder: str, sabotage: bool = False) -> str:
    """Return why two ranks refuse to shard a model's experts.

    Args:
        folder: The model.
        sabotage: Send every row through another expert.
    """
    with ExitStack() as stack:
        if sabotage:
            stack.enter_context(patch.object(experts, "own_experts", _other_expert))
        return _refusal(folder, {"expert": 2})


_own_experts = experts.own_experts


def _other_expert(module: Any, rows: Tensor, expert: Tensor) -> Tensor:
    return _own_experts(module, rows, module.num_experts - 1 - expert)


def _says_false(*arguments: Any) -> bool:
    return False


def _first_tokens(context: ContextTokens, whole: Tensor) -> Tensor:
    return whole[:, : context.per_rank].contiguous()


def _refusal(folder: str, parallelism: dict[str, int]) -> str:
    backend = DTensorTrainingBackend()
    settings = {"model_name": folder, "parallelism": parallelism}
    try:
        backend.setup(PolicyConfig.from_dict(settings).to_dict())
    except UnsupportedModelError as error:
        return str(error)
    finally:
        backend.shutdown()
    return "it was not refused"
