"""A saved reward model as a reward function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl_algorithms.data.collate import pad_rows
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.encoding import (
    TextEncoder,
    encode_conversations,
    end_tokens,
    render_conversation,
    uses_chat_template,
)
from rl_algorithms.data.types import Tokenizer
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.tokens.tokenizer import load_tokenizer

__all__ = ["RewardModelFn"]


class RewardModelFn:
    """Scores answers with a reward model; pass it as `reward_fn`.

    ```python
    rl.train(model, prompts, rl.RewardModelFn("runs/rm/checkpoints/step_100/..."))
    ```

    Prompt and answer are encoded as by `RMTrainer`, with the chat template if the
    model's tokenizer has one. The model is loaded on first use, in the process of the
    environment.

    Args:
        model_path: Folder of a model with this head, as `TrainResult.model_path`.
        batch_size: Number of rows per forward pass.
        config: Encoding of texts, as in training; by default the defaults.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        batch_size: int = 32,
        config: DataConfig | None = None,
    ) -> None:
        check_model_folder(model_path)
        self.model_path = str(model_path)
        self.batch_size = batch_size
        self.config = config if config is not None else DataConfig()
        self._loaded: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The function travels to the environment's worker, which loads the weights
        # itself.
        return {**self.__dict__, "_loaded": None}

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """Return the reward of each answer."""
        if self._loaded is None:
            model = load_scalar_model(self.model_path, "reward")
            self._loaded = model, load_tokenizer(self.model_path)
        model, tokenizer = self._loaded
        rows = self._tokens(tokenizer, prompts, responses)
        # By length, so that a batch has little padding.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        rewards = [0.0] * len(rows)
        for first in range(0, len(order), self.batch_size):
            chosen = order[first : first + self.batch_size]
            found = _scores(model, [rows[row] for row in chosen])
            for row, reward in zip(chosen, found, strict=True):
                rewards[row] = reward
        return rewards

    def _tokens(
        self, tokenizer: Tokenizer, prompts: list[str], responses: list[str]
    ) -> list[list[int]]:
        if uses_chat_template(self.config, tokenizer):
            rendered = [
                render_conversation(
                    tokenizer,
                    [
                        {"role": "user", "content": prompt},
                        {"role": "assistant", "content": response},
                    ],
                    [1],
                )
                for prompt, response in zip(prompts, responses, strict=True)
            ]
            return [ids for ids, _ in encode_conversations(tokenizer, rendered)]
        encoder = TextEncoder(tokenizer, self.config.add_bos)
        end = end_tokens(tokenizer, self.config)
        return [
            start + rest + end
            for start, rest in zip(
                encoder.starts(prompts), encoder.continuations(responses), strict=True
            )
        ]


@torch.no_grad()
def _scores(model: Any, rows: list[list[int]]) -> list[float]:
    ids, lengths = pad_rows([torch.tensor(row) for row in rows], pad_value=0)
    # No mask: attention is causal, so padding at the end does not affect earlier
    # tokens.
    last = torch.arange(len(rows)) * ids.shape[1] + lengths - 1
    scores: list[float] = model(input_ids=ids, positions=last, use_cache=False).tolist()
    return scores
