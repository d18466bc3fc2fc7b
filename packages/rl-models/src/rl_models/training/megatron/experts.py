"""The experts of a mixture, in the place of Megatron-core's own.

Router and exchange of tokens are Megatron-core's. The weights of a rank's experts are
stacked as transformers stacks them, so that a rank's part is a box of that tensor.
Megatron-core's other experts are a parameter each, or need Transformer Engine.

Letters in shapes: E experts of this rank, M pairs of a token and an expert, H hidden
size, I columns of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor, nn

__all__ = ["Experts", "mixture"]

# Megatron-core's router looks it up whether or not Transformer Engine, from which it
# comes, is installed.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class Experts(MegatronModule):  # type: ignore[misc]
    """This rank's experts."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        columns, hidden = config.moe_ffn_hidden_size, config.hidden_size
        settings = {"dtype": config.params_dtype}
        if not config.use_cpu_initialization:
            settings["device"] = torch.device("cuda", torch.cuda.current_device())
        shape = num_local_experts, 2 * columns, hidden
        self.gate_up_proj = nn.Parameter(torch.empty(shape, **settings))
        shape = num_local_experts, hidden, columns
        self.down_proj = nn.Parameter(torch.empty(shape, **settings))

    def forward(
        self, hidden_M_H: Tensor, count_E: Tensor, weight_M: Tensor
    ) -> tuple[Tensor, None]:
        """Send rows, sorted by expert, through their experts.

        Returns:
            [M, H], and no bias.
        """
        counts = count_E.tolist()
        outputs = []
        # `unbind`, not an index per expert, whose gradient would be as large as all.
        for rows, weights, into, out in zip(
            torch.split(hidden_M_H, counts),
            torch.split(weight_M, counts),
            self.gate_up_proj.unbind(),
            self.down_proj.unbind(),
            strict=True,
        ):
            gate, up = nn.functional.linear(rows, into).chunk(2, dim=-1)
            inner = nn.functional.silu(gate) * up * weights[:, None]
            outputs.append(nn.functional.linear(inner.to(rows.dtype), out))
        return torch.cat(outputs), None


def mixture() -> ModuleSpec:
    """Return the feed-forward part of a layer with experts."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=ModuleSpec(module=Experts)),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )
