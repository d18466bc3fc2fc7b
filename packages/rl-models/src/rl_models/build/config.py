"""The shape of a small model and its tokenizer, as configuration.

It stands apart from `modelbuild`, so that a run can be checked without importing
transformers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_distributed.config import Config

__all__ = ["Architecture", "ModelBuildConfig", "TokenizerBuildConfig"]

Architecture = Literal["qwen2", "qwen3", "llama"]
"""Families of models that are built here."""


class TokenizerBuildConfig(Config):
    """Which tokenizer is built."""

    kind: Literal["characters", "vocabulary", "byte_bpe"] = "characters"
    """One token per character, one per given text, or byte-pair merges learnt from
    `training_texts`."""
    characters: str = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=:?.,\n"
    """The alphabet of kind "characters"; anything else becomes the unknown token (with
    architecture qwen2 it is left out)."""
    vocabulary: list[str] | None = None
    """The tokens of kind "vocabulary"; the longest that fits is taken."""
    vocab_size: int = Field(512, ge=260)
    """Tokens of kind "byte_bpe", the 256 bytes and the special ones included."""
    training_texts: list[str] | None = None
    """The texts from which kind "byte_bpe" learns its merges."""
    special_tokens: list[str] = Field(default_factory=list)
    """Further tokens that are never split, such as turn markers of a chat."""
    chat_template: str | None = None
    """Jinja template that is saved with the tokenizer."""

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizerBuildConfig:
        needed = {
            "characters": ("characters", self.characters),
            "vocabulary": ("vocabulary", self.vocabulary),
            "byte_bpe": ("training_texts", self.training_texts),
        }
        name, value = needed[self.kind]
        if not value:
            raise ValueError(f'{name} must not be empty for kind "{self.kind}"')
        if self.kind == "vocabulary" and "" in (self.vocabulary or ()):
            raise ValueError("vocabulary must not hold an empty text")
        return self


class ModelBuildConfig(Config):
    """Shape of a model with random weights, and its tokenizer."""

    architecture: Architecture = "qwen2"
    """Family of the model; all three are supported by every backend here. For qwen2
    transformers and vLLM take Qwen's own class of tokenizer, which leaves out unknown
    characters; with the others they become the unknown token."""
    hidden_size: int = Field(64, gt=0)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(2, gt=0)
    """Number of decoder layers."""
    num_attention_heads: int = Field(4, gt=0)
    """Query heads; must divide `hidden_size`."""
    num_key_value_heads: int | None = Field(None, gt=0)
    """Key and value heads; must divide the query heads. null: as many as those."""
    intermediate_size: int | None = Field(None, gt=0)
    """Width of the feed-forward part; null: three times `hidden_size`."""
    max_position_embeddings: int = Field(512, gt=0)
    """Longest sequence, the model's context."""
    tie_word_embeddings: bool = True
    """Whether the output layer shares the weights of the input embedding."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the random weights."""
    tokenizer: TokenizerBuildConfig = Field(default_factory=TokenizerBuildConfig)
    """The tokenizer; it decides the size of the vocabulary."""

    @model_validator(mode="after")
    def _check_tokenizer(self) -> ModelBuildConfig:
        kind, characters = self.tokenizer.kind, self.tokenizer.characters
        odd = kind == "characters" and not characters.isascii()
        if self.architecture == "qwen2" and (kind == "vocabulary" or odd):
            raise ValueError(
                "architecture qwen2 needs a byte-level tokenizer (ASCII characters or "
                "byte_bpe), because transformers loads it as Qwen's own class: got "
                f"kind {kind!r}; take architecture llama or qwen3"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> ModelBuildConfig:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % (2 * heads):
            raise ValueError(
                "hidden_size must be an even multiple of num_attention_heads: got "
                f"{self.hidden_size} with {heads} heads"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads: got "
                f"{heads} with {kv_heads}"
            )
        return self
