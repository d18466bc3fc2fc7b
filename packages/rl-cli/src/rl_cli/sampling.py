"""Sampling from a model folder in this process, without Ray."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.errors import ConfigError
from rl_models import GenerationConfig
from rl_models.checkpoint.model_folder import check_model_folder, folder_context_length
from rl_models.generation.choice import for_this_process
from rl_models.generation.four_methods import build_generation_backend
from rl_models.tokens.chat import encode_prompt
from rl_models.tokens.tokenizer import decode_rows, load_tokenizer, pad_token_id

__all__ = ["Sample", "sample"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One answer."""

    prompt: str
    response: str
    num_tokens: int
    """Number of sampled tokens, including the stop token."""
    logprob: float | None
    """Sum of the tokens' log-probabilities; None: not provided by the backend."""
    truncated: bool
    """True if it was cut off at the token limit."""


def sample(
    model: str | Path,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    greedy: bool = False,
    num_samples: int = 1,
    chat: bool | None = None,
    shorten: bool = False,
) -> list[Sample]:
    """Answer every prompt `num_samples` times, prompts in order.

    Args:
        model: Folder or hub name.
        prompts: Texts.
        config: Sampling settings.
        greedy: Pick the most probable tokens.
        num_samples: Number of answers per prompt.
        chat: Format prompts with the chat template; None: if the model has one.
        shorten: Reduce the maximum answer length to the rest of the model's context.
    """
    check_model_folder(model)
    tokenizer = load_tokenizer(model)
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"--chat: the tokenizer of {model} has no chat template.")
    use_chat = bool(tokenizer.chat_template) if chat is None else chat
    _warn_of_unknown_characters(tokenizer, prompts)
    rows = [_encode(tokenizer, text, use_chat) for text in prompts]
    # Encoded once per prompt, then repeated.
    rows = [row for row in rows for _ in range(num_samples)]
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = torch.full((len(rows), int(lengths.max())), pad_token_id(tokenizer))
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
    context = folder_context_length(model) if shorten else None
    if context is not None and context > int(lengths.max()):
        room = context - int(lengths.max())
        config = config.replace(max_new_tokens=min(config.max_new_tokens, room))
    config = for_this_process(config)
    backend = build_generation_backend(config.backend)
    backend.setup(config.to_dict(), model_name=str(model))
    try:
        data: AnyRows = BatchedDataDict(
            {"input_ids": input_ids, "input_lengths": lengths}
        )
        out = backend.generate(data, greedy=greedy)
    finally:
        backend.shutdown()
    ends = out["unpadded_sequence_lengths"]
    logprobs = out.get("logprobs")
    texts = decode_rows(tokenizer, out["output_ids"], lengths, ends)
    return [
        Sample(
            prompts[index // num_samples],
            texts[index],
            int(out["generation_lengths"][index]),
            None if logprobs is None else float(logprobs[index].sum()),
            bool(out["truncated"][index]),
        )
        for index in range(len(rows))
    ]


def _warn_of_unknown_characters(tokenizer: Any, prompts: Sequence[str]) -> None:
    """Warn about characters that the model cannot see, which alters the prompt."""
    left_out, unknown = [], []
    # Without whitespace, which many tokenizers join to the following character.
    for character in dict.fromkeys("".join("".join(prompts).split())):
        ids = tokenizer(character, add_special_tokens=False)["input_ids"]
        if not ids:
            left_out.append(character)
        elif tokenizer.unk_token_id in ids:
            unknown.append(character)
    for characters, what in (
        (left_out, "are left out"),
        (unknown, f"become {tokenizer.unk_token}"),
    ):
        if characters:
            logger.warning(
                "the tokenizer of the model has no token for %s in the prompts; they "
                "%s",
                ", ".join(map(repr, characters)),
                what,
            )


def _encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    ids = encode_prompt(tokenizer, text, chat=chat)
    if not ids:
        raise ConfigError(f"The prompt {text!r} has no tokens; give a longer one.")
    return ids
