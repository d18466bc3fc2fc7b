"""Tensor parallelism: ranks that share each layer of a decoder.

```
hidden -> [into_shared] -> q k v, gate up: rows of the weight -> attention, activation
                        -> o, down: columns of the weight -> [out_of_shared] -> hidden
```
Every rank has some of the attention heads, of the feed-forward columns or experts and,
if the number of ranks divides it, of the vocabulary. Weights that are not cut (norms,
biases after a sum) are the same on every rank. The plan follows from the modules' names
in Llama, Mistral, Mixtral, Qwen and Gemma; a layer with anything else in it is refused,
because a weight that is cut in the wrong place silently trains wrong. A probe at the
start compares a layer, its gradients included, before and after the cut. Adapters are
cut with their layers.

A rank's part of a weight is a plain parameter of the same name, not a DTensor: FSDP can
shard it further, optimizers see parameters of one kind, and small layers are spared
DTensor's dispatch, which takes longer than their products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear

from rl_distributed.logs.logging import get_logger
from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor.collectives import TensorRanks
from rl_models.training.dtensor.experts import (
    EXPERT_WEIGHTS,
    are_experts,
    probed,
    through_experts,
)
from rl_models.training.dtensor.layer_probe import (
    LayerProbe,
    Probed,
    check_differences,
)
from rl_models.training.dtensor.layout import Layout
from rl_models.training.dtensor.weight_source import move

__all__ = ["TensorParallel"]

_log = get_logger(__name__)

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_OF_ADAPTED = (".base_layer", ".lora_A.default", ".lora_B.default")
"""Modules that peft puts into a linear layer."""


class TensorParallel:
    """Cuts a model between the ranks that share its layers.

    Args:
        model: A Hugging Face causal LM, or a model with a scalar head, unsharded.
            Parameters may be on the meta device, but for those of its first layer.
        layout: The place of this rank among all.
        name: The model's name, for messages.

    Raises:
        UnsupportedModelError: The model has modules that the plan does not know.
    """

    def __init__(self, model: Any, layout: Layout, name: str) -> None:
        self.ranks = TensorRanks(layout.tensor_group, layout.splits_tokens)
        self._device = layout.ranks.device
        self._base = _decoder(model, name)
        _check_layers(self._base.layers, name)
        first = probed(self._base.layers)
        # Before the layer is cut in place.
        self._probe = LayerProbe(self._base, first)
        wanted = self._probe.whole(first)
        self._cut: dict[nn.Parameter, int] = {}
        self._partial: list[nn.Parameter] = []
        for layer in self._base.layers:
            self._cut_layer(layer)
        self.splits_vocabulary = self._cut_vocabulary(model, name)
        if layout.splits_tokens:
            self._split_tokens()
        move(model, self._device)
        # By name from here on: FSDP replaces the parameter objects.
        self._dims = {n: self._cut.get(p) for n, p in model.named_parameters()}
        partial = set(self._partial)
        self._partial_names = {n for n, p in model.named_parameters() if p in partial}
        self._compare(wanted, first, name)

    def ask(self, layer: nn.Module) -> Probed:
        """Run the probe's tokens through a layer that is cut; collective."""
        join = self.ranks.join_tokens if self.ranks.splits_tokens else None
        with ExitStack() as stack:
            if self.ranks.splits_tokens and layer is not self._base.layers[0]:
                # In the model the first layer splits the tokens; this one is probed by
                # itself.
                split = layer.register_forward_pre_hook(
                    self._split_first, with_kwargs=True
                )
                stack.callback(split.remove)
            return self._probe.ask(layer, self._device, join)

    def _compare(self, wanted: Probed, layer: nn.Module, name: str) -> None:
        """Refuse a model if a layer computes something else once it is cut."""
        found = self.ask(layer)
        partial = set(self._partial)
        pairs = {
            "its output": (found.output, wanted.output),
            "the gradient of its input": (found.input_gradient, wanted.input_gradient),
        }
        for key, parameter in layer.named_parameters():
            gradient = found.gradients[key]
            if parameter in partial:
                gradient = self.ranks.total(gradient)
            whole, dim = wanted.gradients[key], self._cut.get(parameter)
            if dim is not None:
                whole = whole.chunk(self.ranks.size, dim=dim)[self.ranks.rank]
            pairs[f"the gradient of {key}"] = (gradient, whole)
        check_differences(pairs, "tensor", "cut", name)

    def dim_of(self, name: str) -> int | None:
        """Return the dimension along which a parameter is cut; None if it is whole."""
        return self._dims[name]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole parameter from each rank's part; collective."""
        dim = self._dims.get(name)
        return part if dim is None else self.ranks.joined(part, dim)

    def add_partial_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Add up gradients of uncut weights that saw only a rank's heads or tokens.

        Once per step, after the last backward pass: only their sum matters, and one
        collective for all of them is faster than one for each in each pass.
        """
        # In the order of names, which is the same on all ranks; a set's is not.
        gradients = [
            grad.to_local() if isinstance(grad, DTensor) else grad
            for name in sorted(self._partial_names)
            if name in parameters and (grad := parameters[name].grad) is not None
        ]
        if not gradients:
            return
        total = self.ranks.total(torch.cat([grad.flatten() for grad in gradients]))
        start = 0
        for grad in gradients:
            grad.copy_(total[start : start + grad.numel()].view_as(grad))
            start += grad.numel()

    def _cut_layer(self, layer: nn.Module) -> None:
        for name, module in list(layer.named_modules()):
            leaf = name.rpartition(".")[2]
            if leaf in _BY_ROWS:
                self._cut_weights(module, 0)
            elif leaf in _BY_COLUMNS:
                self._cut_weights(module, 1)
                # Without its bias, which the sum over the ranks would count R times.
                inner = _inner(module)
                inner.forward = MethodType(_unbiased, inner)
                module.register_forward_hook(self._leave)
                # Each rank adds the bias to its tokens only.
                if inner.bias is not None and self.ranks.splits_tokens:
                    self._partial.append(inner.bias)
            elif _is_mixture(module):
                self._cut_mixture(module)
            elif any(hasattr(module, child) for child in _BY_ROWS):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
        for name, parameter in layer.named_parameters():
            if parameter in self._cut or not name.endswith("norm.weight"):
                continue
            # A norm of heads sees this rank's heads; with split tokens, other norms see
            # this rank's tokens. Either way the gradient is a part of the whole one.
            if _is_head_norm(name) or self.ranks.splits_tokens:
                self._partial.append(parameter)

    def _cut_mixture(self, block: Any) -> None:
        experts = block.experts
        for key in EXPERT_WEIGHTS:
            self._replace(experts, key, 0)
        # Read by transformers' forward pass.
        experts.num_experts = experts.gate_up_proj.shape[0]
        # Of these, ranks with other tokens may have some each.
        experts.num_of_tensor_rank = experts.num_experts
        experts.forward = MethodType(self._own_tokens, experts)
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(
            lambda module, args, out: self.ranks.out_of_shared(out)
        )
        # The router sees all tokens, but gets gradients from this rank's experts only.
        self._partial.append(block.gate.weight)

    def _cut_weights(self, module: Any, dim: int) -> None:
        inner = _inner(module)
        self._replace(inner, "weight", dim)
        if dim == 0 and getattr(inner, "bias", None) is not None:
            self._replace(inner, "bias", 0)
        if inner is not module:
            self._cut_adapter(module.lora_A.default, module.lora_B.default, dim)

    def _cut_adapter(self, a: Any, b: Any, dim: int) -> None:
        """Cut the matrix that has the cut dimension of the weight.

        The other one stays whole, and each rank has a part of its gradient: `A` is
        followed by this rank's rows of `B`, or `B` follows a sum over its columns of
        `A`.
        """
        cut, whole = (b, a) if dim == 0 else (a, b)
        self._replace(cut, "weight", dim)
        self._partial.append(whole.weight)

    def _replace(self, module: Any, name: str, dim: int) -> None:
        whole = getattr(module, name)
        local = whole.detach().chunk(self.ranks.size, dim=dim)[self.ranks.rank]
        if not local.is_meta:
            # A copy, so that the memory of the whole weight can be freed.
            local = local.to(self._device, copy=True)
        local = local.contiguous()
        parameter = nn.Parameter(local, requires_grad=whole.requires_grad)
        setattr(module, name, parameter)
        self._cut[parameter] = dim

    def _cut_vocabulary(self, model: Any, name: str) -> bool:
        inputs = model.get_input_embeddings()
        outputs = model.get_output_embeddings()
        size = inputs.weight.shape[0]
        if size % self.ranks.size:
            _log.warning(
                "%s: its vocabulary of %d is not a multiple of "
                "policy.parallelism.tensor (%d); embedding and head are whole on every "
                "rank",
                name,
                size,
                self.ranks.size,
            )
            return False
        tied = outputs is not None and outputs.weight is inputs.weight
        self._replace(inputs, "weight", 0)
        inputs.forward = MethodType(self._shared_embedding, inputs)
        if outputs is None:
            return False
        if tied:
            # Replacing the embedding's parameter has untied the head.
            outputs.weight = inputs.weight
        else:
            self._replace(outputs, "weight", 0)
        if outputs.bias is not None:
            self._replace(outputs, "bias", 0)
        outputs.register_forward_pre_hook(self._enter_head)
        return True

    def _split_tokens(self) -> None:
        """Split tokens before the first layer, and join them after the last norm."""
        first: nn.Module = self._base.layers[0]
        norm: nn.Module = self._base.norm
        self.split_tokens_at(first)
        self.join_tokens_at(norm)
        self._partial.extend(norm.parameters())

    def split_tokens_at(self, first: nn.Module) -> None:
        """Split tokens before a layer."""
        first.register_forward_pre_hook(self._split_first, with_kwargs=True)

    def join_tokens_at(self, last: nn.Module) -> None:
        """Join tokens after a module."""
        last.register_forward_hook(
            lambda module, args, out: self.ranks.join_tokens(out)
        )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_hidden(self.ranks.into_shared, args, kwargs)

    def _split_first(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_hidden(self.ranks.split, args, kwargs)

    def _own_tokens(
        self, experts: Any, hidden_N_H: Tensor, expert_N_K: Tensor, weight_N_K: Tensor
    ) -> Tensor:
        """Compute the pairs of a token and an expert whose expert is on this rank.

        Or on one of those with other tokens, which share this rank's experts.
        """
        per_rank = experts.num_of_tensor_rank
        expert_M = expert_N_K.reshape(-1) - self.ranks.rank * per_rank
        is_own = (expert_M >= 0) & (expert_M < per_rank)
        pair = is_own.nonzero().squeeze(-1)
        # As ranks that share experts need them. Stable, so that sums keep their order.
        pair = pair[expert_M[pair].argsort(stable=True)]
        token = pair // expert_N_K.shape[1]
        computed = through_experts(experts, hidden_N_H[token], expert_M[pair])
        weighted = computed * weight_N_K.reshape(-1)[pair][:, None]
        zeros = weighted.new_zeros(hidden_N_H.shape)
        return zeros.index_add(0, token, weighted).to(hidden_N_H.dtype)

    def _leave(self, module: Any, args: Any, out: Tensor) -> Tensor:
        """Add up the ranks' outputs of a layer and its adapter, and the bias once."""
        total = self.ranks.out_of_shared(out)
        bias = _inner(module).bias
        return total if bias is None else total + bias

    def _shared_embedding(self, module: Any, input_ids: Tensor) -> Tensor:
        weight = module.weight
        own = input_ids - self.ranks.rank * weight.shape[0]
        is_own = (own >= 0) & (own < weight.shape[0])
        padding = module.padding_idx
        if padding is not None:
            padding -= self.ranks.rank * weight.shape[0]
            padding = padding if 0 <= padding < weight.shape[0] else None
        # Tokens of other ranks look up some row here, which is set to zero for the sum.
        found = embedding(own.clamp(0, weight.shape[0] - 1), weight, padding)
        found = self.ranks.sum(found * is_own[..., None].to(found.dtype))
        # Gemma's embedding multiplies by it in a forward method that this one replaces.
        scale = getattr(module, "embed_scale", None)
        return found if scale is None else found * scale.to(found.dtype)

    def _enter_head(self, module: nn.Module, args: Any) -> Any:
        return (self.ranks.copy(args[0]),)


def _inner(module: Any) -> Any:
    """Return the linear layer inside an adapted one, or the layer itself."""
    return getattr(module, "base_layer", module)


def _unbiased(module: Any, hidden: Tensor) -> Tensor:
    return linear(hidden, module.weight)


def _with_hidden(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change the hidden state, the first argument of a layer or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _is_mixture(module: nn.Module) -> bool:
    """Return whether a module has a router and its experts, and nothing else."""
    # A shared expert beside them would be computed and added up by every rank.
    children = dict(module.named_children())
    return children.keys() == {"gate", "experts"} and are_experts(children["experts"])


def _is_head_norm(name: str) -> bool:
    return name.endswith(("q_norm.weight", "k_norm.weight"))


def _decoder(model: Any, name: str) -> Any:
    base = model.base_model
    lacking = [n for n in ("layers", "norm", "embed_tokens") if not hasattr(base, n)]
    if lacking:
        raise UnsupportedModelError(
            f"policy.parallelism.tensor cannot cut {name}: {type(base).__name__} has "
            f"no {', '.join(lacking)}, as Llama, Mistral, Qwen and Gemma name their "
            "parts; set it to 1"
        )
    return base


def _check_layers(layers: Any, name: str) -> None:
    """Refuse layers with a parameter that the plan does not know."""
    for layer in layers:
        odd = sorted(_unknown_parameters(layer))
        if odd:
            raise UnsupportedModelError(
                f"policy.parallelism.tensor cannot cut {name}: its layers "
                f"({type(layer).__name__}) have {', '.join(odd[:3])}, and only "
                f"{', '.join((*_BY_ROWS, *_BY_COLUMNS))}, experts with their router "
                "(gate) and norms are known; set it "
                "to 1"
            )


def _unknown_parameters(layer: nn.Module) -> Iterator[str]:
    for name, parameter in layer.named_parameters():
        owner = name.rpartition(".")[0]
        module: Any = layer.get_submodule(owner)
        for part in _OF_ADAPTED:
            owner = owner.removesuffix(part)
        leaf = owner.rpartition(".")[2]
        if leaf in (*_BY_ROWS, *_BY_COLUMNS):
            if isinstance(module, nn.Linear):
                continue
        elif leaf in ("gate", "experts"):
            if _is_mixture(layer.get_submodule(owner.rpartition(".")[0])):
                continue
        elif (
            name.endswith("norm.weight")
            and parameter.ndim == 1
            # A norm over all heads together would need the other ranks' heads.
            and (not _is_head_norm(name) or _is_one_head(layer, owner, parameter))
        ):
            continue
        yield name


def _is_one_head(layer: nn.Module, owner: str, parameter: Tensor) -> bool:
    attention: Any = layer.get_submodule(owner.rpartition(".")[0])
    return bool(parameter.numel() == getattr(attention, "head_dim", -1))
