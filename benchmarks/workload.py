"""The inputs of both sides of a benchmark: a model, a tokenizer, prompts, sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from rl_models import ModelBuildConfig, build_model

DIGITS = "0123456789"
# Chosen once: with these, a step is about the size of the quickstart's.
SEED = 11


@dataclass(frozen=True)
class Workload:
    """One GRPO step: prompts x generations, and all lengths."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_prompts: int
    num_generations: int
    prompt_lengths: tuple[int, int]
    """Shortest and longest prompt, in tokens."""
    new_tokens: int
    """Tokens of an answer: of each if `fixed`, else of the longest."""
    fixed: bool
    """Every answer has `new_tokens` tokens, or ends where the model ends it."""
    target: float
    """The target ratio peer / ours."""

    @property
    def num_samples(self) -> int:
        """Number of rows of one step."""
        return self.num_prompts * self.num_generations

    def model(self, folder: Path, context: int = 256) -> Path:
        """Build the model folder."""
        config = ModelBuildConfig.from_dict(
            {
                "hidden_size": self.hidden_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "intermediate_size": 4 * self.hidden_size,
                "max_position_embeddings": context,
                "tokenizer": {"characters": DIGITS + "="},
            }
        )
        return Path(build_model(config, folder / self.name, seed=SEED))

    def prompts(self, count: int) -> list[dict[str, str]]:
        """Return rows with a prompt of digits and, for copying, its answer."""
        rng = random.Random(SEED)
        rows = []
        for _ in range(count):
            low, high = self.prompt_lengths
            digits = "".join(rng.choices(DIGITS, k=rng.randint(low, high) - 1))
            rows.append({"prompt": digits + "=", "answer": digits})
        return rows


WORKLOADS = {
    work.name: work
    for work in (
        Workload("grpo_small_fixed", 64, 2, 4, 64, 8, (12, 12), 12, True, 1.3),
        Workload("grpo_medium_fixed", 256, 6, 8, 16, 8, (12, 12), 64, True, 1.0),
        Workload("grpo_small_variable", 64, 2, 4, 64, 8, (8, 64), 64, False, 1.5),
    )
}


@dataclass(frozen=True)
class Examples:
    """Rows with given answers, for SFT and DPO."""

    name: str
    algorithm: str
    """`sft` or `dpo`."""
    ragged: bool
    """Lengths have the long tail of real text (a log-normal one), or are all equal."""
    target: float
    """The target ratio peer / ours."""
    batch_size: int = 64
    """Examples, or pairs, per step."""

    def model(self, folder: Path) -> Path:
        """Build the model folder."""
        return WORKLOADS["grpo_small_variable"].model(folder)

    def rows(self, count: int) -> list[dict[str, str]]:
        """Return rows with a prompt and its answer, or a better and a worse one."""
        rng = random.Random(SEED)
        columns = ["answer"] if self.algorithm == "sft" else ["chosen", "rejected"]
        return [
            {"prompt": self._digits(rng) + "="}
            | {column: self._digits(rng) for column in columns}
            for _ in range(count)
        ]

    def _digits(self, rng: random.Random) -> str:
        length = 48
        if self.ragged:
            length = min(max(round(rng.lognormvariate(3.0, 0.8)), 4), 120)
        return "".join(rng.choices(DIGITS, k=length))


EXAMPLES = {
    work.name: work
    for work in (
        Examples("sft_fixed", "sft", False, 1.0),
        Examples("sft_ragged", "sft", True, 1.5),
        Examples("dpo_fixed", "dpo", False, 1.0),
        Examples("dpo_ragged", "dpo", True, 1.5),
    )
}


def reward(completion: str) -> float:
    """Return the share of even digits: cheap, and with variance in every group."""
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
