"""Small causal language models with their tokenizer, built without any download.

`build_model(ModelBuildConfig(...), folder)` writes an ordinary Hugging Face folder
(config, safetensors, fast tokenizer) with random weights, which `transformers` loads
like any other model.
"""

from __future__ import annotations

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
    Qwen3Config,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils import logging as hf_logging

from rl_models.model_build_config import ModelBuildConfig, TokenizerBuildConfig

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
        folder: Where to write; made if it is missing.
        seed: Equal seeds give equal weights, bit for bit. The global random state is
            left as it was.

    Returns:
        The folder.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(
        config.tokenizer, max_length=config.max_position_embeddings
    )
    model_config = _model_config(config, tokenizer)
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
    config: TokenizerBuildConfig, max_length: int = 512
) -> PreTrainedTokenizerFast:
    """Make the tokenizer alone.

    Token 0 pads, token 1 ends a text, token 2 stands for what is unknown.
    """
    special = [PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN, *config.special_tokens]
    if config.kind == "byte_bpe":
        backend = _byte_bpe(config, special)
    elif config.kind == "characters" and config.characters.isascii():
        backend = _single_bytes(config.characters, special)
    else:
        tokens = config.characters if config.kind == "characters" else config.vocabulary
        backend = _longest_match(tokens or (), special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        additional_special_tokens=list(config.special_tokens),
        model_max_length=max_length,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def _longest_match(tokens: Iterable[str], special: list[str]) -> Tokenizer:
    """One token per text; a regular expression finds the longest that fits."""
    ordered = [*special, *(token for token in tokens if token not in special)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(ordered))}
    by_length = sorted(vocabulary, key=lambda token: (-len(token), token))
    pattern = "|".join(re.escape(token) for token in by_length) + "|(?m:.)|\\n"
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _single_bytes(characters: str, special: list[str]) -> Tokenizer:
    """One token per ASCII character, as byte-level pairs without a merge.

    transformers loads the tokenizer of any `qwen2` folder as Qwen's own class, which
    keeps vocabulary and merges and replaces the rest; in this form nothing is lost.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    ordered = dict.fromkeys([*special, *shown])
    vocabulary = {token: index for index, token in enumerate(ordered)}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN_TOKEN)
    backend = Tokenizer(model)
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_bpe(config: TokenizerBuildConfig, special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    # Qwen's way to cut words, so that its own class gives the same tokens.
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
        # Only Qwen3 chooses the width of a head freely; the others derive it.
        del settings["head_dim"]
    return _CONFIG_CLASSES[config.architecture](**settings)
