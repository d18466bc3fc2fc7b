"""Small causal language models with their tokenizer, built without any download.

`build_model(ModelBuildConfig(...), folder)` writes an ordinary Hugging Face folder
(config, safetensors, fast tokenizer) with random weights, which `transformers` loads
like any other model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils import logging as hf_logging

from rl_models.build.config import (
    Architecture,
    ModelBuildConfig,
    TokenizerBuildConfig,
)

__all__ = [
    "ModelBuildConfig",
    "TokenizerBuildConfig",
    "build_model",
    "build_tokenizer",
]

_CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
}

PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN = "<pad>", "<eos>", "<unk>"


def build_model(config: ModelBuildConfig, folder: str | Path, seed: int = 0) -> Path:
    """Write a model with random float32 weights, and its tokenizer.

    Args:
        config: The shape of the model and the kind of tokenizer.
        folder: Target folder, created if missing.
        seed: Equal seeds give equal weights, bit for bit. The global random state is
            left as it was.

    Returns:
        The folder.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(
        config.tokenizer, config.max_position_embeddings, config.architecture
    )
    model_config = _model_config(config, tokenizer)
    # Forked, so that building a model does not shift the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    with _no_progress_bars():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def build_tokenizer(
    config: TokenizerBuildConfig,
    max_length: int = 512,
    architecture: Architecture | None = None,
) -> PreTrainedTokenizerFast:
    """Make the tokenizer alone.

    Token 0 pads, token 1 ends a text, token 2 stands for unknown text.

    Args:
        config: Its kind and its tokens.
        max_length: Longest text, in tokens.
        architecture: The model that it is saved with. In a folder of a `qwen2` model
            transformers and vLLM take Qwen's own class, whatever the folder says, so
            the tokenizer is one of that class, which leaves out unknown characters.
    """
    special = [PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN, *config.special_tokens]
    settings: dict[str, Any] = {
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKEN,
        "unk_token": UNKNOWN_TOKEN,
        "additional_special_tokens": list(config.special_tokens),
        "model_max_length": max_length,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    if architecture == "qwen2":
        tokenizer = Qwen2Tokenizer(**_byte_pairs(config, special), **settings)
    else:
        backend = _backend(config, special)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def _backend(config: TokenizerBuildConfig, special: list[str]) -> Tokenizer:
    if config.kind == "byte_bpe":
        return _byte_bpe(config, special)
    tokens = config.characters if config.kind == "characters" else config.vocabulary
    return _longest_match(tokens or (), special)


def _longest_match(tokens: Iterable[str], special: list[str]) -> Tokenizer:
    """Return a tokenizer with one token per text, which prefers the longest match."""
    # By a regular expression with longer texts first: the model itself only looks up
    # whole words.
    ordered = [*special, *(token for token in tokens if token not in special)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(ordered))}
    by_length = sorted(vocabulary, key=lambda token: (-len(token), token))
    pattern = "|".join(re.escape(token) for token in by_length) + "|(?m:.)|\\n"
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _byte_pairs(config: TokenizerBuildConfig, special: list[str]) -> dict[str, Any]:
    """Return vocabulary and merges, which is all that Qwen's class reads from a file.

    ASCII characters are one byte each and need no merge. Bytes that the vocabulary
    lacks are left out by that class.
    """
    if config.kind == "byte_bpe":
        model = json.loads(_byte_bpe(config, special).to_str())["model"]
        merges = [tuple(merge) for merge in model["merges"]]
        return {"vocab": model["vocab"], "merges": merges}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = [byte_level.pre_tokenize_str(text)[0][0] for text in config.characters]
    ordered = dict.fromkeys([*special, *shown])
    return {"vocab": {token: n for n, token in enumerate(ordered)}, "merges": []}


def _byte_bpe(config: TokenizerBuildConfig, special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    # Qwen's way of splitting words, so that all architectures get the same tokens.
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(config.training_texts or (), trainer)
    return backend


def _model_config(
    config: ModelBuildConfig, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedConfig:
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 3 * config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": config.initializer_range,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    if config.architecture != "qwen3":
        # Only Qwen3 has a head size of its own; the others derive it.
        del settings["head_dim"]
    return _CONFIG_CLASSES[config.architecture](**settings)
