"""The weights of a Llama-like model folder, in modules that compute nothing.

`FusedDecoder` computes everything itself, so it needs no model code of transformers,
whose import takes longer than everything else that a process does before its first
token. Names of weights are those of transformers, so they can be updated and compared
as usual. A folder that is unusual in any way is left to transformers.

Letters in shapes: L positions, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rl_models.checkpoint.context_length import CONTEXT_KEYS
from rl_models.checkpoint.model_folder import check_model_folder, read_model_config

__all__ = ["PlainConfig", "PlainModel", "load_plain_model"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GENERATION = "generation_config.json"
# It changes what is computed with the weights.
_ADAPTER = "adapter_config.json"
_UNUSUAL_KEYS = (
    "attention_bias",
    "auto_map",
    "mlp_bias",
    "quantization_config",
    "rope_scaling",
    "use_sliding_window",
)


@dataclass(frozen=True)
class PlainConfig:
    """Fields of `config.json` for a model that is computed by this package."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None
    context_length: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Read a config; None where it misses a key or has an unusual one."""
        heads, size = config.get("num_attention_heads"), config.get("hidden_size")
        if not (isinstance(heads, int) and isinstance(size, int) and _is_plain(config)):
            return None
        fields = cls.__dataclass_fields__
        values: dict[str, Any] = {key: config.get(key) for key in fields}
        values["head_dim"] = config.get("head_dim") or size // heads
        values["rope_theta"] = _rope(config).get("rope_theta")
        lengths = [config[key] for key in CONTEXT_KEYS if config.get(key)]
        values["context_length"] = lengths[0] if lengths else None
        missing = {key for key, value in values.items() if value is None}
        return cls(**values) if missing <= {"eos_token_id", "context_length"} else None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the rotary embedding, which older files have outside."""
    return config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Return whether the model has no computation beyond that of its family."""
    # Anything unknown is left to transformers: sampling with a part left out would be
    # silently wrong.
    kind, rope = config.get("model_type"), _rope(config)
    return (
        kind in {"llama", "mistral", "qwen2", "qwen3"}
        # Qwen3's default is not the hidden size over the heads.
        and (kind != "qwen3" or bool(config.get("head_dim")))
        # Qwen's configs have a window that counts only with `use_sliding_window`.
        and (kind in {"qwen2", "qwen3"} or not config.get("sliding_window"))
        and all(k == "full_attention" for k in config.get("layer_types") or [])
        and config.get("hidden_act") == "silu"
        and config.get("pretraining_tp", 1) == 1
        and rope.keys() <= {"rope_theta", "rope_type"}
        and rope.get("rope_type", "default") == "default"
        and not any(config.get(key) for key in _UNUSUAL_KEYS)
    )


def _placeholder(*shape: int) -> nn.Parameter:
    # Without memory: loading assigns the files' tensors to it.
    return nn.Parameter(torch.empty(shape, device="meta"))


class _Matrix(nn.Module):
    """Weights like those of `nn.Linear`, which would fill them first.

    Drawing random numbers for a placeholder imports torch's compiler.
    """

    def __init__(self, out_features: int, in_features: int, bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = _placeholder(out_features, in_features)
        self.bias = _placeholder(out_features) if bias else None


class _Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = _placeholder(size)
        self.variance_epsilon = epsilon


class _Attention(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.scaling = self.head_dim**-0.5
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        bias = config.model_type == "qwen2"
        self.q_proj = _Matrix(queries, size, bias)
        self.k_proj = _Matrix(keys, size, bias)
        self.v_proj = _Matrix(keys, size, bias)
        self.o_proj = _Matrix(size, queries)
        if config.model_type == "qwen3":
            self.q_norm = _Norm(self.head_dim, config.rms_norm_eps)
            self.k_norm = _Norm(self.head_dim, config.rms_norm_eps)


class _FeedForward(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _Matrix(inner, size)
        self.up_proj = _Matrix(inner, size)
        self.down_proj = _Matrix(size, inner)


class _Layer(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)


class _Decoder(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embed_tokens = _Matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Layer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self._config = config

    def rotary_emb(self, probe: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[1, L, D] cosines and sines of positions [1, L], in the dtype of `probe`."""
        size, device = self._config.head_dim, probe.device
        exponents = torch.arange(0, size, 2, dtype=torch.float).to(device) / size
        frequencies = 1.0 / (self._config.rope_theta**exponents)
        angles = positions[..., None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(probe.dtype), both.sin().to(probe.dtype)


class PlainModel(nn.Module):
    """Weights under the names that transformers gives them."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)
        self.lm_head = _Matrix(config.vocab_size, config.hidden_size)

    def tie(self) -> None:
        """Let the output share the weights of the embeddings where the config says."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.lm_head.weight.dtype


def load_plain_model(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None
) -> PlainModel | None:
    """Load a folder in float32; None if it must be left to transformers.

    Args:
        name_or_path: A folder; a name on the hub is left to transformers.
        overrides: Fields of `config.json` to replace.

    Raises:
        ModelLoadError: The folder is not there, or has no readable `config.json`.
    """
    folder = check_model_folder(name_or_path)
    if folder is None or (folder / _ADAPTER).exists():
        return None
    try:
        saved = {**(read_model_config(folder) or {}), **(overrides or {})}
        if (folder / _GENERATION).is_file():
            text = (folder / _GENERATION).read_text(encoding="utf-8")
            # As in transformers, this file goes before `config.json`.
            saved["eos_token_id"] = json.loads(text).get("eos_token_id")
        config = PlainConfig.of(saved)
        if config is None:
            return None
        model = PlainModel(config)
        weights = _read_weights(folder)
        if config.tie_word_embeddings and "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights, strict=True, assign=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError):
        return None  # transformers explains what is wrong, or can load it
    model.tie()
    return model


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = {_SINGLE}
    if not (folder / _SINGLE).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        files = set(index["weight_map"].values())
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(folder / file))
    # Copies, because the files are mapped, and a folder may be replaced meanwhile.
    return {name: w.to(torch.float32, copy=True) for name, w in weights.items()}
