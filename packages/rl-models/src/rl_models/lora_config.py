"""Section `policy.lora`. Imports neither torch nor peft."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_distributed.config import Config

__all__ = ["LoRAConfig"]


class LoRAConfig(Config):
    """Low-rank adapters (Hu et al., arXiv:2106.09685), made by peft.

    The weights of the model stay as they are. Beside a linear layer `W` two small
    matrices are trained, and the layer computes `W x + (alpha / r) B A x`. `B` begins
    at zero, so that the adapted model begins as the model.
    """

    r: int = Field(16, gt=0)
    """Rank: rows of `A` and columns of `B`."""
    alpha: float | None = Field(None, gt=0)
    """The adapter's share is multiplied by `alpha / r`; null: 2 r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability that an input of an adapter is left out of a training step."""
    target_modules: list[str] | None = None
    """Names of the linear layers that get an adapter, such as `q_proj`; null: all in
    the decoder layers."""
    modules_to_save: list[str] | None = None
    """Names of modules that are trained whole beside the adapters, such as
    `embed_tokens` and `lm_head` for new tokens; null: none. Needs `sync: merged`."""
    use_rslora: bool = False
    """Multiply by `alpha / sqrt(r)` instead, which keeps large ranks learning
    (arXiv:2312.03732)."""
    adapter_path: str | None = None
    """Folder of an adapter to start from, in peft's format: `adapter_config.json` and
    `adapter_model.safetensors`; null: a new one."""

    sync: Literal["merged", "adapter"] = "merged"
    """What generators are sent after each step: `merged`, all weights with the adapter
    added to them; `adapter`, the adapter alone, and its base once. `adapter` needs the
    generation backend huggingface or vllm."""

    @model_validator(mode="after")
    def _check(self) -> LoRAConfig:
        if self.target_modules is not None and not self.target_modules:
            raise ValueError(
                "target_modules must name at least one linear layer: got an empty "
                "list; leave it null for all, or set lora to null"
            )
        if self.modules_to_save is not None and not self.modules_to_save:
            raise ValueError(
                "modules_to_save must name at least one module: got an empty list; "
                "leave it null for none"
            )
        if self.modules_to_save and self.sync == "adapter":
            raise ValueError(
                "sync must be merged with modules_to_save, because generators take "
                "adapters of linear layers alone: got adapter; set it to merged"
            )
        return self

    @property
    def scale(self) -> float:
        """What the adapter's share is multiplied by."""
        alpha = 2.0 * self.r if self.alpha is None else self.alpha
        return float(alpha / (self.r**0.5 if self.use_rslora else self.r))
