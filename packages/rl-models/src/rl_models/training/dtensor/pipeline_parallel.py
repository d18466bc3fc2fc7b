"""Pipeline parallelism: each rank has some of a decoder's layers.

```
stage 0: tokens -> embedding -> layers --hidden--> stage 1: layers -> norm, head -> loss
                               <--gradient--
```
All stages get the same rows and plan the same micro-batches, so each knows the shapes
that it receives. Modules of other stages are replaced by ones that pass their input on,
so that the remaining ones keep their names. Tied embeddings are on the first and on the
last stage, which add up their gradients once per step.

| part       | consumes                  | produces         | waits for              |
|------------|---------------------------|------------------|------------------------|
| `enter`    | -                         | hidden states    | a send by stage - 1    |
| `leave`    | hidden states, own layers | a send           | the oldest of many     |
| `backward` | a loss, or a gradient     | a send           | a send by stage + 1    |

A rank that dies closes its connections, which ends its neighbours' pending receives.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor.collectives import TensorRanks
from rl_models.training.dtensor.layer_probe import NUM_TOKENS, input_of_layer
from rl_models.training.dtensor.layout import Layout
from rl_models.training.dtensor.sharding import local_part
from rl_models.training.dtensor.tensor_parallel import TensorParallel

__all__ = ["PipelineStage", "check_stages"]

_Known = TypeVar("_Known")


class _HandsOn(nn.Module):
    """Takes the place of a module of another stage."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input unchanged."""
        return hidden


class PipelineStage:
    """Keeps the layers of one stage of a model, and joins it to its neighbours.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head, whole but for
            tensor parallelism.
        layout: The place of this rank among all.
        dtype: Data type of hidden states between stages.
    """

    def __init__(self, model: Any, layout: Layout, dtype: torch.dtype) -> None:
        self.stage, self.num_stages = layout.stage, layout.num_stages
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.num_stages - 1
        self._device, self._dtype = layout.ranks.device, dtype
        self._layout = layout
        self._group = layout.pipeline_group()
        self._hidden_size = int(model.get_input_embeddings().weight.shape[1])
        head = model.get_output_embeddings()
        self._is_tied = head is not None and (
            head.weight is model.get_input_embeddings().weight
        )
        # Names, owners and shapes of all stages are recorded before the other stages'
        # modules are dropped: exports and states need them on every rank.
        self._owners = self._stages_of(model)
        self._tied = next(
            (
                n
                for n, p in model.named_parameters()
                if self._is_tied and p is head.weight
            ),
            None,
        )
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters()
        }
        self.trained = [n for n, p in model.named_parameters() if p.requires_grad]
        """Names of the trained parameters of all stages."""
        self._keep_own(model)
        self._model = model
        self._tensor_ranks: TensorRanks | None = None
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._entered: Tensor | None = None
        self._left: Tensor | None = None

    def register_output(self) -> None:
        """Give the model, once sharded, a method that computes the stage."""
        self._model.stage_output = self._stage_output
        # FSDP gathers weights only during methods that are registered.
        register_fsdp_forward_method(self._model, "stage_output")

    def split_tokens(self, cutter: TensorParallel) -> None:
        """Split tokens within this stage, which receives and sends them whole."""
        self._tensor_ranks = cutter.ranks
        base = self._model.base_model
        if not self.is_first:
            per_stage = self._layers_per_stage(base.layers)
            cutter.split_tokens_at(base.layers[self.stage * per_stage])
        if not self.is_last:
            cutter.join_tokens_at(base.norm)

    def _layers_per_stage(self, layers: Any) -> int:
        return len(layers) // self.num_stages

    def _stages_of(self, model: Any) -> dict[str, int]:
        """Return the first stage that has each parameter."""
        base = model.base_model
        stages = dict.fromkeys(base.embed_tokens.parameters(), 0)
        per_stage = self._layers_per_stage(base.layers)
        for index, layer in enumerate(base.layers):
            stages.update(dict.fromkeys(layer.parameters(), index // per_stage))
        last = self.num_stages - 1
        return {n: stages.get(p, last) for n, p in model.named_parameters()}

    def _keep_own(self, model: Any) -> None:
        base = model.base_model
        per_stage = self._layers_per_stage(base.layers)
        for index in range(len(base.layers)):
            if index // per_stage != self.stage:
                base.layers[index] = _HandsOn()
        if not (self.is_first or (self.is_last and self._is_tied)):
            base.embed_tokens = _HandsOn()
        if not self.is_last:
            base.norm = _HandsOn()
            for child_name, child in list(model.named_children()):
                if child is not base:
                    setattr(model, child_name, _HandsOn())

    @property
    def names(self) -> list[str]:
        """Names of the parameters of all stages, in the order of the whole model."""
        return list(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of any stage's parameter; with `tensor`, of a part."""
        return self._shapes[name][0]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a parameter of any stage."""
        return self._shapes[name][1]

    def owns(self, name: str) -> bool:
        """Whether this is the first stage that has a parameter."""
        return self._owners[name] == self.stage

    def num_stages_with(self, name: str) -> int:
        """Return the number of stages that have a parameter."""
        return 2 if name == self._tied else 1

    def from_owner(self, name: str, value: Tensor | None, like: Tensor) -> Tensor:
        """Return a tensor of the owner of a parameter; collective over stages.

        Args:
            name: The parameter.
            value: The tensor, on the owner.
            like: One of its shape and type, without data.
        """
        if not self.owns(name) or value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        value = value.to(self._device).contiguous()
        dist.broadcast(value, self._rank_of(self._owners[name]), self._group)
        return value

    def from_last(self, value: _Known) -> _Known:
        """Return the value of the last stage; collective over stages."""
        # Pickles travel as tensors, which NCCL takes on GPUs only.
        known = [value]
        source = self._rank_of(self.num_stages - 1)
        device = self._device if self._device.type == "cuda" else None
        dist.broadcast_object_list(known, source, self._group, device)
        return known[0]

    def of_all(self, known: Mapping[str, _Known]) -> dict[str, _Known]:
        """Return the values of all stages by parameter; collective over stages."""
        parts: list[Any] = [None] * self.num_stages
        dist.all_gather_object(parts, dict(known), self._group)
        return {name: value for part in parts for name, value in part.items()}

    def enter(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of this stage, with hidden states of the previous one.

        Args:
            inputs: Arguments of the whole model.
        """
        self._entered = None
        if self.is_first:
            return inputs
        shape = (*inputs["input_ids"].shape, self._hidden_size)
        hidden = self._receive(shape, self.stage - 1, self._group)
        if torch.is_grad_enabled():
            # A leaf, whose gradient is the one to send back.
            hidden.requires_grad_()
        self._entered = hidden
        rest = {key: value for key, value in inputs.items() if key != "input_ids"}
        return {**rest, "inputs_embeds": hidden}

    def leave(self, inputs: dict[str, Any]) -> None:
        """Compute the hidden states for the next stage, and send them."""
        self._left = self._model.stage_output(inputs)
        sent = self._left.detach().to(self._dtype)
        self._send(sent, self.stage + 1, self._group)

    @property
    def has_entered(self) -> bool:
        """Whether the current forward pass has received its hidden states."""
        return self._entered is not None

    def take_ends(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the hidden states that the last forward pass received and sent."""
        ends = self._entered, self._left
        self._entered = self._left = None
        return ends

    def backward(
        self, entered: Tensor | None, left: Tensor | None, loss: Tensor | None
    ) -> None:
        """Run the backward pass of a micro-batch through this stage.

        Args:
            entered: See `take_ends`.
            left: See `take_ends`.
            loss: On the last stage, its loss; None if it failed.
        """
        end = entered if left is None else left
        if self._tensor_ranks is not None and end is not None:
            # Micro-batches that went forward since then may have another length.
            self._tensor_ranks.num_tokens = end.shape[1]
        if loss is not None:
            torch.autograd.backward(loss)
        elif left is not None:
            # Not the group of hidden states: within a group NCCL runs the exchanges of
            # a pair of ranks in order, and with hidden states on their way in the other
            # direction both ranks would wait for each other.
            gradient = self._receive(tuple(left.shape), self.stage + 1, None)
            torch.autograd.backward(left, gradient.to(left.dtype))
        if entered is not None:
            # Zeros after a loss that failed: the previous stage waits for a gradient.
            gradient = torch.zeros_like(entered)
            gradient = gradient if entered.grad is None else entered.grad
            self._send(gradient, self.stage - 1, None)

    def finish_sends(self) -> None:
        """Wait until everything that was sent has been received."""
        # Only then may the memory of sent tensors be freed.
        while self._sends:
            self._sends.popleft()[0].wait()

    def add_tied_gradient(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of an embedding that is the head of the last stage."""
        ends = (0, self.num_stages - 1)
        name = self._tied
        # Under adapters it is frozen.
        if name is None or name not in self.trained or self.stage not in ends:
            return
        parameter = parameters[name]
        if parameter.grad is None:
            # The other end waits for a gradient, so send zeros if there is none.
            parameter.grad = torch.zeros_like(parameter)
        own = local_part(parameter.grad)
        other = torch.empty_like(own)
        peer = self._rank_of(ends[0] if self.is_last else ends[1])
        # Both directions in one batch: two ranks that first send to each other would
        # block.
        pair = [
            dist.P2POp(dist.isend, own.clone(), peer, self._group),
            dist.P2POp(dist.irecv, other, peer, self._group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        own.add_(other)

    def _stage_output(self, inputs: dict[str, Any]) -> Tensor:
        found: Tensor = self._model.base_model(**inputs).last_hidden_state
        return found

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self._group, stage)

    def _send(self, value: Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        value = value.contiguous()
        work = dist.isend(value, self._rank_of(stage), group)
        self._sends.append((work, value))
        # A bound on tensors kept alive by sends. With gradients no stage gets further
        # ahead of another than this, so it never waits there.
        while len(self._sends) > 2 * self.num_stages:
            self._sends.popleft()[0].wait()

    def _receive(
        self, shape: tuple[int, ...], stage: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        value = torch.empty(shape, dtype=self._dtype, device=self._device)
        dist.recv(value, self._rank_of(stage), group)
        return value


def check_stages(model: Any, name: str) -> None:
    """Refuse a model that cannot be cut into stages.

    Args:
        model: The whole model; its parameters may be on the meta device.
        name: Its name, for the message.

    Raises:
        UnsupportedModelError: It has modules whose stage is not known, or processes
            embeddings in a way that every stage would repeat.
    """
    _check_parts(model, name)
    _check_entry(model, name)


def _check_parts(model: Any, name: str) -> None:
    """Refuse a model with parameters whose stage is not known."""
    base = model.base_model
    known = ("embed_tokens", "layers", "norm")
    lacking = [part for part in known if not hasattr(base, part)]
    prefix = model.base_model_prefix
    inner = re.compile(rf"{re.escape(prefix)}\.({'|'.join(known)})\.")
    odd = [
        n
        for n, _ in model.named_parameters()
        if n.startswith(f"{prefix}.") and not inner.match(n)
    ]
    if lacking or odd:
        what = f"no {', '.join(lacking)}" if lacking else f"also {', '.join(odd[:3])}"
        raise UnsupportedModelError(
            f"policy.parallelism.pipeline cannot cut {name}: {type(base).__name__} has "
            f"{what}, and only {', '.join(known)}, as Llama, Mistral, Qwen and Gemma "
            "name their parts, are known; set it to 1"
        )


@torch.no_grad()
def _check_entry(model: Any, name: str) -> None:
    """Refuse a decoder that changes hidden states before its first layer.

    Later stages pass hidden states in as embeddings, so anything done to embeddings
    would be repeated in each stage.
    """
    base, hidden_size = model.base_model, model.get_input_embeddings().weight.shape[1]
    seeded = torch.Generator().manual_seed(0)
    given = torch.randn(1, NUM_TOKENS, hidden_size, generator=seeded)
    found = input_of_layer(base, base.layers[0], {"inputs_embeds": given})
    if not torch.equal(found, given):
        raise UnsupportedModelError(
            f"policy.parallelism.pipeline cannot cut {name}: {type(base).__name__} "
            "changes embeddings before its first layer, which every stage would do "
            "again; set it to 1"
        )
