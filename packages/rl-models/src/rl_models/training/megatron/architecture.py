"""Megatron-core's GPT model of a Hugging Face config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rl_models.training.megatron.attention import Attention
from rl_models.training.megatron.conversion import has_experts
from rl_models.training.megatron.experts import mixture
from rl_models.training.megatron.layout import RankLayout

__all__ = ["HiddenStates", "build_gpt", "padded_vocabulary"]


class Norm(nn.Module):
    """Root-mean-square norm that marks weights whose gradient is a partial one.

    Each tensor rank normalizes its part of the tokens (sequence parallel) or its heads
    (`per_head`): the gradient of the weight is then the sum over these ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sums_over_tensor_ranks = (  # type: ignore[attr-defined]
            per_head or config.sequence_parallel
        )
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Scale each vector to a root mean square of 1, then by the weight."""
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class HiddenStates(GPTModel):  # type: ignore[misc]
    """A GPT model that returns the last hidden states.

    The head runs at needed positions only, and later.
    """

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def build_gpt(
    config: Any,
    layout: RankLayout,
    chunk: int,
    *,
    dtype: torch.dtype,
    recompute: bool,
) -> HiddenStates:
    """Build a part of the model, its weights not yet set.

    Args:
        config: The Hugging Face config.
        layout: This rank's place.
        chunk: Number of the part among those of this rank.
        dtype: Data type of weights and hidden states.
        recompute: Compute each layer once more in the backward pass.
    """
    settings = _settings(config, layout, dtype, recompute)
    virtual = chunk if layout.num_chunks > 1 else None
    stage = layout.stage
    first = get_transformer_layer_offset(settings, virtual, pp_rank=stage)
    num_layers = get_num_layers_to_build(settings, virtual, pp_rank=stage)
    dense = _layer(settings)
    sparse = replace(dense, submodules=replace(dense.submodules, mlp=mixture()))
    layers = [
        sparse if has_experts(config, layer) else dense
        for layer in range(first, first + num_layers)
    ]
    return HiddenStates(
        settings,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
        padded_vocabulary(config.vocab_size, layout.tensor_size),
        config.max_position_embeddings,
        pre_process=layout.has_embedding(chunk),
        post_process=layout.has_head(chunk),
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        vp_stage=virtual,
    )


def _layer(settings: TransformerConfig) -> ModuleSpec:
    """Return a layer without experts."""
    # The local layers of torch: those of Transformer Engine need a GPU.
    layer = get_gpt_layer_local_spec(
        qk_layernorm=settings.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    attention = parts.self_attention
    own = replace(attention.submodules, core_attention=Attention)
    if settings.qk_layernorm:
        per_head = ModuleSpec(module=Norm, params={"per_head": True})
        own = replace(own, q_layernorm=per_head, k_layernorm=per_head)
    attention = replace(attention, submodules=own)
    return replace(
        layer,
        submodules=replace(
            parts,
            input_layernorm=Norm,
            pre_mlp_layernorm=Norm,
            self_attention=attention,
        ),
    )


def padded_vocabulary(vocab_size: int, tensor_size: int) -> int:
    """Return the rows of the embedding: the fewest that tensor ranks share evenly."""
    return vocab_size + -vocab_size % tensor_size


def _settings(
    config: Any, layout: RankLayout, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    family = config.model_type
    heads = config.num_attention_heads
    recomputed: dict[str, Any] = {}
    if recompute:
        recomputed = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    chunks = layout.num_chunks if layout.num_chunks > 1 else None
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=family == "qwen2",
        qk_layernorm=family in ("qwen3", "qwen3_moe"),
        # These families have none; `families` refuses configs that ask for some.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_size,
        sequence_parallel=layout.parallelism.sequence,
        pipeline_model_parallel_size=layout.num_stages,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=dtype,
        # Interleaved stages send in both directions at once, and of two ranks
        # Megatron-core would mix up the shapes.
        variable_seq_lengths=layout.num_stages > 1 and chunks is None,
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        # Megatron-core demands it for varying lengths, also without experts.
        moe_token_dispatcher_type="alltoall",
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=layout.device.type == "cpu",
        # All weights are loaded afterwards.
        perform_initialization=False,
        # The fused kernels need a GPU, and round more.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Otherwise Megatron-core divides by the number of micro-batches, but losses are
        # divided by global counts already.
        calculate_per_token_loss=True,
        **recomputed,
        **_settings_of_experts(config, layout),
    )


def _settings_of_experts(config: Any, layout: RankLayout) -> dict[str, Any]:
    if config.model_type != "qwen3_moe":
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # Without it, weights of the chosen experts are made to add up to 1.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.expert_size,
        # Experts are whole: tensor ranks have other ones each.
        "expert_tensor_parallel_size": 1,
    }
