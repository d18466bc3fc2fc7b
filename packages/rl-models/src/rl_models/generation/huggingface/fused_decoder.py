"""Llama-like models run with few, large operations.

A decoding step of a small model on a CPU is a few hundred short operations; their
number decides its time. Here query, key and value come from one product, gate and up
from one, and residuals are added inside the products. The two coordinates of a rotary
pair lie side by side (the rows of the query and key matrices are reordered, which no
product of a query and a key can see), so that rotating is one product of complex
numbers with a table. `refresh` makes the reordered matrices again after new weights
were loaded; the model's gate and up matrices are views of the fused one.

Letters in shapes: B rows, N tokens (T packed prompt tokens, or B new ones), P prompts,
E hidden size, H query heads, K key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from rl_models.generation.huggingface.kv_cache import BufferPool, KVBuffers
from rl_models.ops.packed_attention import packed_attention, packed_model_inputs

__all__ = ["FusedDecoder"]

IntArray = npt.NDArray[np.int64]

_ARCHITECTURES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}
# Rotary embeddings whose angles depend on the position alone, and fit a fixed table.
_STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}


@dataclass(slots=True)
class _Layer:
    """Matrices of one decoder layer; those with two names are fused."""

    attention: Any
    input_norm: Any
    mlp_norm: Any
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _share_storage(linears: list[Any]) -> torch.Tensor:
    """Join the weights of linear layers in one matrix, of which they become views."""
    fused = torch.cat([linear.weight.detach() for linear in linears])
    sizes = [linear.out_features for linear in linears]
    for linear, part in zip(linears, torch.split(fused, sizes), strict=True):
        linear.weight.data = part
    return fused


class FusedDecoder:
    """Decodes batches with a model of the Llama, Mistral, Qwen2 or Qwen3 family."""

    mixes_lengths = True

    @staticmethod
    def supports(model: Any) -> bool:
        """Return whether the model has exactly the structure computed here."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        layer_types = getattr(config, "layer_types", None) or []
        return (
            type(model).__name__ in _ARCHITECTURES
            and model.dtype == torch.float32
            and getattr(config, "hidden_act", None) == "silu"
            and rope.get("rope_type", "default") in _STATIC_ROTARY
            and getattr(config, "pretraining_tp", 1) == 1
            and all(kind == "full_attention" for kind in layer_types)
            and (bool(layer_types) or getattr(config, "sliding_window", None) is None)
            and not getattr(config, "attention_bias", False)
            and not getattr(config, "mlp_bias", False)
            and getattr(config, "quantization_config", None) is None
        )

    def __init__(self, model: Any) -> None:
        self.model = model
        self.pool = BufferPool()
        self.heads = int(model.config.num_attention_heads)
        self.kv_heads = int(model.config.num_key_value_heads)
        self.head_size = int(model.model.layers[0].self_attn.head_dim)
        self.layers = [self._build_layer(layer) for layer in model.model.layers]
        self._rotations = torch.empty(0, dtype=torch.complex64, device=model.device)
        self.refresh()

    @staticmethod
    def _build_layer(layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        rows = sum(linear.out_features for linear in inputs)
        weight = attention.q_proj.weight
        has_norm = hasattr(attention, "q_norm")
        has_bias = attention.q_proj.bias is not None
        # Copies where rows are reordered, filled by `refresh`; the other matrices share
        # the model's storage and follow its updates by themselves.
        return _Layer(
            attention,
            layer.input_layernorm,
            layer.post_attention_layernorm,
            weight.new_empty(rows, weight.shape[1]),
            weight.new_empty(rows) if has_bias else None,
            weight.new_empty(attention.head_dim) if has_norm else None,
            weight.new_empty(attention.head_dim) if has_norm else None,
            attention.o_proj.weight.detach(),
            _share_storage([mlp.gate_proj, mlp.up_proj]),
            mlp.down_proj.weight.detach(),
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's present weights."""
        for layer in self.layers:
            attention = layer.attention
            inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
            self._fill(layer.query_key_value, [linear.weight for linear in inputs])
            if layer.query_key_value_bias is not None:
                biases = [linear.bias for linear in inputs]
                self._fill(layer.query_key_value_bias, biases)
            if layer.query_norm is not None and layer.key_norm is not None:
                layer.query_norm.copy_(self._pair_up(attention.q_norm.weight))
                layer.key_norm.copy_(self._pair_up(attention.k_norm.weight))

    def _fill(self, fused: torch.Tensor, parts: list[torch.Tensor]) -> None:
        query, key, value = parts
        ordered = [self._pair_up(query), self._pair_up(key), value]
        torch.cat(ordered, out=fused)

    def _pair_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Place rows i and i + D / 2 of each head side by side."""
        halves = rows.view(-1, 2, self.head_size // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    def begin(
        self, lengths_B: IntArray, max_new_tokens: int, *, more_follow: bool = False
    ) -> _FusedState:
        """Start a batch; rows are sorted by falling prompt length."""
        self._extend_rotary(int(lengths_B[0]) + max_new_tokens)
        buffers = KVBuffers(
            lengths_B, max_new_tokens, self.pool, more_follow=more_follow
        )
        return _FusedState(self, buffers)

    def release(self) -> None:
        """Free the cache's memory."""
        self.pool.clear()

    def _extend_rotary(self, length: int) -> None:
        """Return the table of [position, D / 2] rotations, repeated for every head."""
        if length <= len(self._rotations):
            return
        positions = torch.arange(length, device=self.model.device)[None]
        # By the model's own module, which knows the kind of its rotary embedding.
        probe = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        cos, sin = self.model.model.rotary_emb(probe, positions)
        half = self.head_size // 2
        rotations = torch.complex(cos[0, :, :half], sin[0, :, :half])
        self._rotations = rotations.repeat(1, self.heads + self.kv_heads)

    def embed(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """Return [N, E] the embeddings of tokens."""
        table: torch.Tensor = self.model.model.embed_tokens.weight
        return table.index_select(0, tokens_N)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [N, (H + K) * D / 2] the rotations of positions."""
        return self._rotations.index_select(0, positions)

    def project(
        self, layer: _Layer, hidden_N_E: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute queries [N, H, D], keys and values [N, K, D] of a layer's input."""
        fused = functional.linear(
            _normalise(hidden_N_E, layer.input_norm),
            layer.query_key_value,
            layer.query_key_value_bias,
        )
        turned = self.heads + self.kv_heads
        heads = fused.view(len(hidden_N_E), -1, self.head_size)
        query_key, values = torch.split(heads, [turned, self.kv_heads], 1)
        if layer.query_norm is not None:
            query_key = self._normalise_heads(layer, query_key)
        # A complex product rotates all heads of queries and keys at once.
        pairs = query_key.reshape(len(heads), turned, -1, 2)
        pairs = torch.view_as_complex(pairs).flatten(1)
        query_key = torch.view_as_real(pairs * rotations).view(len(heads), turned, -1)
        query, key = torch.split(query_key, [self.heads, self.kv_heads], 1)
        return query, key, values

    def _normalise_heads(self, layer: _Layer, query_key: torch.Tensor) -> torch.Tensor:
        query, key = torch.split(query_key, [self.heads, self.kv_heads], 1)
        epsilon = layer.attention.q_norm.variance_epsilon
        size = (self.head_size,)
        return torch.cat(
            [
                functional.rms_norm(query, size, layer.query_norm, epsilon),
                functional.rms_norm(key, size, layer.key_norm, epsilon),
            ],
            1,
        )

    def finish_layer(
        self, layer: _Layer, hidden_N_E: torch.Tensor, attended_N_HD: torch.Tensor
    ) -> torch.Tensor:
        """Compute output projection, feed-forward part and both residuals."""
        hidden_N_E = torch.addmm(hidden_N_E, attended_N_HD, layer.output.t())
        normed = _normalise(hidden_N_E, layer.mlp_norm)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        activated = functional.silu(gate).mul_(up)
        return torch.addmm(hidden_N_E, activated, layer.down.t())

    def logits(self, hidden_N_E: torch.Tensor) -> torch.Tensor:
        """Return [N, V] logits in float32."""
        normed = _normalise(hidden_N_E, self.model.model.norm)
        return functional.linear(normed, self.model.lm_head.weight).float()


class _FusedState:
    """One batch in flight; see `decoders.DecodingState`."""

    def __init__(self, decoder: FusedDecoder, buffers: KVBuffers) -> None:
        self.decoder = decoder
        self.buffers = buffers

    def prefill(
        self,
        tokens_T: torch.Tensor,
        lengths_P: IntArray,
        first_row: int,
        prompt_B: IntArray,
    ) -> torch.Tensor:
        """Return [P, V] logits; the last layer is finished at the last tokens only."""
        decoder = self.decoder
        packed = packed_model_inputs(lengths_P, tokens_T.device)
        rotations = decoder.rotations(packed["position_ids"][0])
        starts = np.cumsum(lengths_P) - lengths_P
        last_P = torch.from_numpy(starts + lengths_P - 1).to(tokens_T.device)
        hidden = decoder.embed(tokens_T)
        for index, layer in enumerate(decoder.layers):
            query, key, value = decoder.project(layer, hidden, rotations)
            self.buffers.place_prompts(
                index, key, value, first_row, starts[prompt_B], decoder.heads
            )
            attended = packed_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                packed["cu_seq_lens_q"],
                scaling=layer.attention.scaling,
            )[0].flatten(1)
            # After attention, which needs all tokens, only the last ones matter.
            if index == len(decoder.layers) - 1:
                hidden = hidden.index_select(0, last_P)
                attended = attended.index_select(0, last_P)
            hidden = decoder.finish_layer(layer, hidden, attended)
        return decoder.logits(hidden)

    def step(self, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Return [B, V] logits after one more token per row."""
        decoder, buffers = self.decoder, self.buffers
        rotations = decoder.rotations(positions_B)
        hidden = decoder.embed(tokens_B)
        buffers.begin_step()
        for index, layer in enumerate(decoder.layers):
            query, key, value = decoder.project(layer, hidden, rotations)
            buffers.append(index, key, value)
            attended = buffers.attend(index, query, layer.attention.scaling)
            hidden = decoder.finish_layer(layer, hidden, attended.flatten(1))
        return decoder.logits(hidden)

    def keep(self, alive_B: npt.NDArray[np.bool_]) -> IntArray:
        """Drop the rows that are not alive."""
        return self.buffers.keep(alive_B)

    def admit(self, lengths_N: IntArray) -> int:
        """Add rows behind the others."""
        return self.buffers.admit(lengths_N)


def _normalise(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
