"""An algorithm of one's own: supervised training with the focal loss.

Tokens that the model already knows weigh less: `-(1 - p)^gamma log p` (Lin et al.,
2017, arXiv:1708.02002). The loop is `BaseTrainer`'s; this file says what one step is.

    python examples/focal.py MODEL_FOLDER ROWS.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_algorithms import (
    BaseTrainer,
    DataModule,
    SFTConfig,
    register_algorithm,
    train,
)
from rl_algorithms.trainers.steps.training_rows import count_tokens, train_metrics

GAMMA = 2.0


@register_algorithm("focal")
class FocalTrainer(BaseTrainer[SFTConfig]):
    """Trains on given answers, the harder tokens more."""

    algorithm: ClassVar[str] = "focal"
    config_class: ClassVar[type[SFTConfig]] = SFTConfig

    def _load_data(self, dataset: Any, val_dataset: Any) -> tuple[Any, Any]:
        data = DataModule(
            self.config.data,
            self.components.tokenizer,
            kind="demonstrations",
            batch_size=self.plan.num_prompts,
            max_length=self.config.policy.max_total_sequence_length,
            seed=self.config.seed,
            train=dataset,
        )
        return data.train_loader, None

    def _setup_algorithm(self) -> None:
        self._loss = self._build_loss()

    def _train_step(self, batch: Any) -> Mapping[str, Any]:
        output = self.train_policy(batch, self._loss, batch.size)
        return count_tokens(batch) | train_metrics(output)

    @staticmethod
    def _compute_loss(
        data: Any, global_valid_seqs: Any, global_valid_toks: Any, **inputs: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        logprobs = inputs["next_token_logprobs"]
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        per_token = -((1 - logprobs.exp()) ** GAMMA) * logprobs
        # The global count, so that micro-batches and ranks add up to the whole batch.
        loss = (per_token * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item()}


if __name__ == "__main__":
    model, rows = sys.argv[1:]
    result = train(model, rows, algorithm="focal", lr=1e-3, max_num_steps=20)
    print(result.metrics["train:loss"], result.model_path)
