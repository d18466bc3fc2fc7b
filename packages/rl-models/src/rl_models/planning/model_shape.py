"""Sizes of a decoder by its `config.json`: numbers of parameters, by module.

Letters in comments: H hidden size, F feed-forward columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_models.build.config import ModelBuildConfig
from rl_models.errors import ModelLoadError

__all__ = ["Head", "ModelShape", "shape_of_build", "shape_of_config"]

Head = Literal["lm", "value", "reward"]
"""Output of the model, see `policy.head`."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties of a family that are in its code and not in a config.

    `None` for a bias: the config decides.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    has_qk_norms: bool = False
    norms_per_layer: int = 2


_UNTIED = {"tie_word_embeddings": False}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(_UNTIED, mlp_bias=None),
    "mistral": _Family(
        {**_UNTIED, "num_key_value_heads": 8}, qkv_bias=False, output_bias=False
    ),
    "mixtral": _Family(
        {**_UNTIED, "num_key_value_heads": 8, "num_local_experts": 8}
        | {"num_experts_per_tok": 2},
        qkv_bias=False,
        output_bias=False,
    ),
    "qwen2": _Family(
        {**_UNTIED, "num_key_value_heads": 32}, qkv_bias=True, output_bias=False
    ),
    "qwen3": _Family(
        {**_UNTIED, "num_key_value_heads": 32, "head_dim": 128}, has_qk_norms=True
    ),
    "qwen3_moe": _Family(
        {**_UNTIED, "num_key_value_heads": 4, "num_experts_per_tok": 8},
        has_qk_norms=True,
    ),
    "gemma": _Family(
        {"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256}
    ),
    "gemma2": _Family(
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256},
        norms_per_layer=4,
    ),
    "gemma3_text": _Family(
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256},
        has_qk_norms=True,
        norms_per_layer=4,
    ),
}
_ANY = _Family(_UNTIED, mlp_bias=None)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model."""

    family: str
    """`model_type` of the config."""
    is_known: bool
    """Whether parameters are counted by the family's code, and not estimated."""
    hidden_size: int
    intermediate_size: int
    """Feed-forward columns of a layer without experts."""
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    ties_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norms: bool = False
    norms_per_layer: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """Feed-forward columns of one expert."""
    num_expert_layers: int = 0
    """Layers with experts."""
    head: Head = "lm"

    @property
    def query_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Columns of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def norm_parameters(self) -> int:
        """Parameters of a layer's norms, which nothing cuts."""
        of_heads = 2 * self.head_dim if self.has_qk_norms else 0
        return self.norms_per_layer * self.hidden_size + of_heads

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, norms left out."""
        sent, taken = self.query_size + 2 * self.key_value_size, self.query_size
        weights = self.hidden_size * (sent + taken)
        biases = sent * self.has_qkv_bias + self.hidden_size * self.has_output_bias
        return weights + biases

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the feed-forward part of a layer without experts."""
        weights = 3 * self.hidden_size * self.intermediate_size
        biases = (2 * self.intermediate_size + self.hidden_size) * self.has_mlp_bias
        return weights + biases

    @property
    def router_parameters(self) -> int:
        """Parameters that choose the experts of one layer."""
        return self.num_experts * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.num_layers - self.num_expert_layers

    @property
    def largest_layer_parameters(self) -> int:
        """Parameters of the largest layer, which is gathered in one piece."""
        kinds = [self.mlp_parameters] if self.num_dense_layers else []
        if self.num_expert_layers:
            experts = self.num_experts * self.expert_parameters
            kinds.append(self.router_parameters + experts)
        return self.norm_parameters + self.attention_parameters + max(kinds)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the table of input tokens."""
        return self.vocab_size * self.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Number of elements of the largest weight, which a sync gathers whole."""
        experts = 2 * self.num_experts * self.expert_size * self.hidden_size
        matrices = self.hidden_size * self.intermediate_size
        return max(self.embedding_parameters, matrices, experts)

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not the embedding's."""
        if self.head != "lm":
            return self.hidden_size + (self.head == "value")  # a bias
        return 0 if self.ties_embeddings else self.embedding_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters; tied ones count once."""
        shared = self.num_layers * (self.norm_parameters + self.attention_parameters)
        dense = self.num_dense_layers * self.mlp_parameters
        ends = self.embedding_parameters + self.head_parameters + self.hidden_size
        return shared + dense + self._routed_parameters(self.num_experts) + ends

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_expert_layers * (
            max(0, idle) * self.expert_parameters
        )

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all experts of all layers, routers left out."""
        return self.num_expert_layers * self.num_experts * self.expert_parameters

    def _routed_parameters(self, num_experts: int) -> int:
        experts = num_experts * self.expert_parameters
        return self.num_expert_layers * (self.router_parameters + experts)


def shape_of_config(
    config: Mapping[str, Any], name: str, head: Head = "lm"
) -> ModelShape:
    """Read the sizes of a model.

    Args:
        config: Its `config.json`, overrides included.
        name: The model's name, for messages.
        head: Output of the model.

    Raises:
        ModelLoadError: A field that the parameters depend on is missing or no number.
    """
    text = config.get("text_config")
    # Multimodal models have the sizes of their language model in a section.
    fields = {**config, **text} if isinstance(text, Mapping) else dict(config)
    kind = str(fields.get("model_type", "unknown"))
    family = _FAMILIES.get(kind, _ANY)
    read = _Fields({**family.defaults, **fields}, name)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    experts = next((read.optional(key) for key in _EXPERTS if read.optional(key)), 0)
    num_layers = read.size("num_hidden_layers")
    feed_forward = read.size("intermediate_size")
    attention_bias = read.flag("attention_bias")
    return ModelShape(
        family=kind,
        is_known=kind in _FAMILIES and not isinstance(text, Mapping),
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_layers=num_layers,
        num_heads=heads,
        num_key_value_heads=read.optional("num_key_value_heads") or heads,
        head_dim=read.optional("head_dim") or hidden // heads,
        vocab_size=read.size("vocab_size"),
        ties_embeddings=read.flag("tie_word_embeddings"),
        has_qkv_bias=_decided(family.qkv_bias, attention_bias),
        has_output_bias=_decided(family.output_bias, attention_bias),
        has_mlp_bias=_decided(family.mlp_bias, read.flag("mlp_bias")),
        has_qk_norms=family.has_qk_norms,
        norms_per_layer=family.norms_per_layer,
        num_experts=experts,
        experts_per_token=read.size("num_experts_per_tok") if experts else 0,
        expert_size=(read.optional("moe_intermediate_size") or feed_forward)
        if experts
        else 0,
        num_expert_layers=_num_expert_layers(read, num_layers) if experts else 0,
        head=head,
    )


def shape_of_build(config: ModelBuildConfig, head: Head = "lm") -> ModelShape:
    """Return the sizes of a model that a recipe builds.

    A tokenizer that learns its merges is assumed to reach the configured size.

    Args:
        config: The section `model` of the recipe.
        head: Output of the model.
    """
    tokenizer = config.tokenizer
    texts = {
        "characters": list(tokenizer.characters),
        "vocabulary": tokenizer.vocabulary or [],
        "byte_bpe": [],
    }[tokenizer.kind]
    # Three more for padding, the end of a text and unknown characters.
    tokens = {*texts, *tokenizer.special_tokens}
    size = tokenizer.vocab_size if tokenizer.kind == "byte_bpe" else len(tokens) + 3
    fields = {
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 3 * config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "vocab_size": size,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    return shape_of_config(fields, "the model of the recipe", head)


def _decided(by_family: bool | None, by_config: bool) -> bool:
    return by_config if by_family is None else by_family


class _Fields:
    """Fields of a config, read with messages that name them."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values, self._name = values, name

    def optional(self, key: str) -> int:
        """Return a size; 0 where it is missing or null."""
        value = self._values.get(key)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelLoadError(
                f"{key} in config.json of the model {self._name!r} must be a whole "
                f"number: got {value!r}; correct it there or in "
                "policy.hf_config_overrides"
            )
        return value

    def size(self, key: str) -> int:
        """Return a size that must be there."""
        value = self.optional(key)
        if value == 0:
            raise ModelLoadError(
                f"config.json of the model {self._name!r} has no {key}, without which "
                "its size is not known (only decoders with the fields of Llama, "
                f"Mistral, Qwen or Gemma are): add policy.hf_config_overrides.{key}=N"
            )
        return value

    def flag(self, key: str) -> bool:
        """Return whether a field is there and true."""
        return bool(self._values.get(key, False))

    def numbers(self, key: str) -> set[int]:
        """Return a list of layers; empty where it is missing or null."""
        return {n for n in self._values.get(key) or () if isinstance(n, int)}


def _num_expert_layers(read: _Fields, num_layers: int) -> int:
    dense = read.numbers("mlp_only_layers")
    step = read.optional("decoder_sparse_step") or 1
    return sum((n + 1) % step == 0 and n not in dense for n in range(num_layers))
