"""Check that a model can be cut into the shards of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_distributed.errors import ConfigError

__all__ = ["check_shards"]


def check_shards(size: int, model_config: Mapping[str, Any]) -> None:
    """Refuse a model that cannot be cut into this number of shards.

    Args:
        size: Tensor-parallel size.
        model_config: The model's `config.json`; fields that it leaves out are not
            checked.

    Raises:
        ConfigError: A number of heads or columns is not divisible.
    """
    text = model_config.get("text_config") or model_config
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    if kv_heads and size % kv_heads == 0:
        kv_heads = None  # several shards have the same one
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": text.get("intermediate_size"),
    }
    for name, count in counts.items():
        if count and count % size:
            raise ConfigError(
                f"generation.vllm.tensor_parallel_size must divide {name} of the "
                f"model: got {size} with {count}; use {_largest_divisor(count, size)}"
            )


def _largest_divisor(count: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if count % size == 0)
