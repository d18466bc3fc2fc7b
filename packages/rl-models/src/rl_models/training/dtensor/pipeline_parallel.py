"""Pipeline parallelism: ranks that each have some of a decoder's layers.

```
stage 0: tokens -> embedding -> layers --hidden--> stage 1: layers -> norm, head -> loss
                               <--gradient--
```
All stages get the same rows and plan the same micro-batches, so each knows the shapes
of what it receives. Modules of other stages are replaced by ones that hand on what they
get: the others keep their names. Tied embeddings are on the first and on the last
stage, which add up their gradients once per step.

| part       | consumes                  | produces         | waits for              |
|------------|---------------------------|------------------|------------------------|
| `enter`    | -                         | hidden states    | a send by stage - 1    |
| `leave`    | hidden states, own layers | a send           | the oldest of many     |
| `backward` | a loss, or a gradient     | a send           | a send by stage + 1    |

A rank that dies closes its connections, which ends the receives of its neighbours.
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
    """Stands where another stage has a module."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the module would have changed."""
        return hidden


class PipelineStage:
    """Keeps the layers of one stage of a model, and joins it to its neighbours.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head, whole but for
            tensor parallelism.
        layout: Which stage this is, and who has the others.
        dtype: Of hidden states on their way between stages.
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
        self._keep_own(model)
        self._model = model
        self._tensor_ranks: TensorRanks | None = None
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._entered: Tensor | None = None
        self._left: Tensor | None = None

    def register_output(self) -> None:
        """Give the model, when it is sharded, a method that computes the stage."""
        self._model.stage_output = self._stage_output
        # Sharded weights are there during methods that FSDP knows.
        register_fsdp_forward_method(self._model, "stage_output")

    def split_tokens(self, cutter: TensorParallel) -> None:
        """Split the tokens of this stage, which gets them whole and leaves them so."""
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
        """The parameters of all stages, in the order of the whole model."""
        return list(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of any stage; with `tensor`, of a part."""
        return self._shapes[name][0]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of a parameter of any stage."""
        return self._shapes[name][1]

    def owns(self, name: str) -> bool:
        """Whether this is the first stage that has a parameter."""
        return self._owners[name] == self.stage

    def num_stages_with(self, name: str) -> int:
        """Return how many stages have a parameter."""
        return 2 if name == self._tied else 1

    def from_owner(self, name: str, value: Tensor | None, like: Tensor) -> Tensor:
        """Return a tensor that the owner of a parameter has; collective over stages.

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
        """Return what the last stage knows; collective over stages."""
        known = [value]
        source = self._rank_of(self.num_stages - 1)
        device = self._device if self._device.type == "cuda" else None
        dist.broadcast_object_list(known, source, self._group, device)
        return known[0]

    def of_all(self, known: Mapping[str, _Known]) -> dict[str, _Known]:
        """Return what all stages know of their parameters; collective over stages."""
        parts: list[Any] = [None] * self.num_stages
        dist.all_gather_object(parts, dict(known), self._group)
        return {name: value for part in parts for name, value in part.items()}

    def enter(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of this stage: with hidden states of the one before.

        Args:
            inputs: Arguments of the whole model.
        """
        self._entered = None
        if self.is_first:
            return inputs
        shape = (*inputs["input_ids"].shape, self._hidden_size)
        hidden = self._receive(shape, self.stage - 1, self._group)
        if torch.is_grad_enabled():
            hidden.requires_grad_()
        self._entered = hidden
        rest = {key: value for key, value in inputs.items() if key != "input_ids"}
        return {**rest, "inputs_embeds": hidden}

    def leave(self, inputs: dict[str, Any]) -> None:
        """Compute what the next stage enters with, and send it there."""
        self._left = self._model.stage_output(inputs)
        sent = self._left.detach().to(self._dtype)
        self._send(sent, self.stage + 1, self._group)

    @property
    def has_entered(self) -> bool:
        """Whether a forward pass has received what it begins with."""
        return self._entered is not None

    def take_ends(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what the last forward pass received and what it sent."""
        ends = self._entered, self._left
        self._entered = self._left = None
        return ends

    def backward(
        self, entered: Tensor | None, left: Tensor | None, loss: Tensor | None
    ) -> None:
        """Run a micro-batch back through this stage.

        Args:
            entered: See `take_ends`.
            left: See `take_ends`.
            loss: On the last stage, its loss; None if it failed.
        """
        end = entered if left is None else left
        if self._tensor_ranks is not None and end is not None:
            # Other micro-batches have gone forward since this one did.
            self._tensor_ranks.num_tokens = end.shape[1]
        if loss is not None:
            torch.autograd.backward(loss)
        elif left is not None:
            # Another group than hidden states have: NCCL runs what one pair of ranks
            # exchanges in one group in order, and both would wait for the other.
            gradient = self._receive(tuple(left.shape), self.stage + 1, None)
            torch.autograd.backward(left, gradient.to(left.dtype))
        if entered is not None:
            gradient = torch.zeros_like(entered)
            gradient = gradient if entered.grad is None else entered.grad
            self._send(gradient, self.stage - 1, None)

    def finish_sends(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def add_tied_gradient(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of an embedding that is the head of the last stage."""
        ends = (0, self.num_stages - 1)
        if self._tied is None or self.stage not in ends:
            return
        parameter = parameters[self._tied]
        if parameter.grad is None:
            # Other stages' ends wait for it: no gradient is one of zeros.
            parameter.grad = torch.zeros_like(parameter)
        own = local_part(parameter.grad)
        other = torch.empty_like(own)
        peer = self._rank_of(ends[0] if self.is_last else ends[1])
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
        # No stage is further ahead of another than this while gradients are wanted.
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
        UnsupportedModelError: It has modules whose stage is not known, or does with
            embeddings what a stage must not do again.
    """
    _check_parts(model, name)
    _check_entry(model, name)


def _check_parts(model: Any, name: str) -> None:
    """Refuse a model with parameters that no stage is known for."""
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

    Stages after the first enter with them where tokens are embedded otherwise: what is
    done to embeddings would be done again in each.
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
