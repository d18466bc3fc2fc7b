"""Changes to vLLM's layers on a CPU, made before a model is built.

- vLLM packs the weights of linear layers for its own kernels and drops the originals. A
  later `load_weights` then fails, and a tied output layer silently keeps its old pack.
  Here linear layers keep their weights as they are.
- Experts are packed for their kernel when a model is built, but not when their weights
  change: the kernel then reads new weights as if they were packed. Here they are packed
  each time.
- Its attention kernels support certain head sizes only. Heads of other sizes are padded
  with zeros, which change no product and are cut off again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

__all__ = ["adapt_cpu_layers", "kernel_head_size"]

_DONE = "rl_models_adapted"


def adapt_cpu_layers() -> None:
    """Make the changes, once per process."""
    # A second change would wrap the first, and pad heads that are padded already. The
    # mark is on the class, so that it also survives a second import of this module.
    if hasattr(Attention, _DONE):
        return
    linear_layers.dispatch_cpu_unquantized_gemm = _keep_weights(
        linear_layers.dispatch_cpu_unquantized_gemm
    )
    method = UnquantizedFusedMoEMethod
    method._setup_kernel = _packed_each_time(method._setup_kernel)
    Attention.__init__ = _init_padded(Attention.__init__)
    Attention.forward = _forward_padded(Attention.forward)
    setattr(Attention, _DONE, True)


def kernel_head_size(size: int) -> int:
    """Return the smallest head size of at least `size` that the kernels support.

    Raises:
        ValueError: There is none.
    """
    known = CPUAttentionBackend.get_supported_head_sizes()
    fitting = [each for each in known if each >= size]
    if not fitting:
        raise ValueError(
            f"vLLM's attention on a CPU takes heads of at most {max(known)}: got {size}"
        )
    return int(min(fitting))


def _packed_each_time(original: Callable[..., None]) -> Callable[..., None]:
    def set_up(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        # Asked first: the original makes the kernel, and packs the weights itself then.
        is_update = method.moe_kernel is not None
        original(method, layer, w13, w2)
        if is_update:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return set_up


def _keep_weights(original: Callable[..., None]) -> Callable[..., None]:
    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            # Convolutions and experts, which are no linear layers.
            original(layer, remove_weight)
            return
        # The plain function reads `layer.weight` at each call, so new weights count at
        # once.
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch


def _init_padded(original: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: Any, num_heads: int, head_size: int, *rest: Any, **more: Any
    ) -> None:
        padded = kernel_head_size(head_size)
        # `forward` pads keys and values alike.
        if padded != head_size and more.get("head_size_v") not in (None, head_size):
            raise ValueError(
                "vLLM's attention on a CPU does not take heads of size "
                f"{head_size} whose values have size {more['head_size_v']}"
            )
        # The cache is laid out for the padded size too. The scale of the scores was
        # computed from the model's own head size by the caller.
        original(self, num_heads, padded, *rest, **more)
        self.unpadded_head_size = head_size

    return init


def _forward_padded(original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        size, padded = self.unpadded_head_size, self.head_size
        if size == padded:
            return original(self, query, key, value, *rest, **more)

        def fill(heads: torch.Tensor | None) -> torch.Tensor | None:
            if heads is None:
                return None
            split = heads.reshape(heads.shape[0], -1, size)
            return torch.nn.functional.pad(split, (0, padded - size)).flatten(1)

        filled = original(self, fill(query), fill(key), fill(value))
        heads = filled.view(filled.shape[0], -1, padded)[..., :size]
        return heads.reshape(query.shape)

    return forward
