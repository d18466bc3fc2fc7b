"""Memory of one rank of a generator, and the duration of a weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_models.generation.config import GenerationConfig
from rl_models.lora_config import LoRAConfig
from rl_models.planning.adapter_shape import AdapterShape
from rl_models.planning.model_shape import ModelShape
from rl_models.weights.config import Transport

__all__ = ["BANDWIDTHS", "GeneratorMemory", "SyncPlan", "generator_memory", "plan_sync"]

_GIB = 1 << 30
# While one bucket is sent, the next is packed, and the one before is loaded.
_BUCKETS_AT_ONCE = 3

BANDWIDTHS: Mapping[str, float] = {
    "object_store": 1.0e9,
    "shared_memory": 2.0e9,
    "collective": 10.0e9,
    "cuda_ipc": 50.0e9,
    "file": 0.5e9,
}
"""Assumed bytes per second of each transport, packing and loading included."""


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Bytes on one rank's device."""

    weights: int
    cache: int
    """Keys and values of the rows that are decoded at once, or all room for them."""
    held: int
    """Bytes that stay in use while the trainer works on the same device."""
    cache_bytes_per_token: int
    rows_at_once: int
    """Rows that are decoded at once, limited by the settings and by the cache."""
    wanted_rows: int
    """Rows that the settings let a replica decode at once."""

    @property
    def holds_a_row(self) -> bool:
        """Whether the cache holds a row of full length."""
        return self.rows_at_once > 0


def generator_memory(
    shape: ModelShape,
    config: GenerationConfig,
    *,
    num_rows: int,
    row_length: int,
    device_bytes: int | None,
) -> GeneratorMemory:
    """Return the memory of one rank of a replica.

    Args:
        shape: Sizes of the model.
        config: Section `policy.generation`, whose backend is not `auto`.
        num_rows: Rows that a replica gets at once.
        row_length: Longest row.
        device_bytes: Memory of the rank's GPU; None: a CPU, or not known.
    """
    each = 2 if config.precision == "bfloat16" else 4
    is_vllm = config.backend == "vllm"
    tensor = config.vllm.tensor_parallel_size if is_vllm else 1
    weights = each * shape.num_parameters // tensor
    # With more ranks than key-value heads, several ranks hold the same head.
    columns = max(shape.key_value_size // tensor, shape.head_dim)
    per_token = 2 * shape.num_layers * columns * each
    limit = config.vllm.max_num_seqs if is_vllm else config.max_batch_size
    wanted = min(limit or num_rows, num_rows)
    cache = wanted * row_length * per_token
    if not is_vllm:
        return GeneratorMemory(weights, cache, weights, per_token, wanted, wanted)
    room = _vllm_cache(config, weights, device_bytes)
    if room is not None:
        cache = room
    rows = min(wanted, cache // (row_length * per_token))
    sleeps = config.vllm.enable_sleep_mode and device_bytes is not None
    held = 0 if sleeps else weights + cache
    return GeneratorMemory(weights, cache, held, per_token, rows, wanted)


def _vllm_cache(
    config: GenerationConfig, weights: int, device_bytes: int | None
) -> int | None:
    """Return the bytes that vLLM allocates for the cache; None if not known."""
    if config.vllm.kv_cache_gib is not None:
        return round(config.vllm.kv_cache_gib * _GIB)
    if device_bytes is None:
        return None
    share = config.vllm.gpu_memory_utilization
    return max(0, round(share * device_bytes) - weights)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """One update of a generator's weights."""

    transport: str
    num_bytes: int
    bytes_per_second: float
    """Assumed."""
    bucket_bytes: int
    """Memory of all buckets that exist at a time, on either side."""

    @property
    def seconds(self) -> float:
        """Expected duration."""
        return self.num_bytes / self.bytes_per_second


def plan_sync(
    shape: ModelShape,
    config: GenerationConfig,
    *,
    num_nodes: int,
    adapter: LoRAConfig | None = None,
) -> SyncPlan:
    """Return the plan of a weight update; `auto` is resolved as in a run.

    Args:
        shape: Sizes of the model.
        config: Section `policy.generation`.
        num_nodes: Nodes of the run.
        adapter: The adapter that is sent apart from its base, which is sent only once;
            None: all weights are sent each time.
    """
    settings = config.weight_sync
    transport: Transport = settings.transport
    if transport == "auto":
        transport = "shared_memory" if num_nodes == 1 else "object_store"
    each = 2 if config.precision == "bfloat16" else 4
    # A tensor is not split, so a bucket is at least as large as the largest one.
    largest = max(settings.bucket_bytes, each * shape.largest_tensor)
    numbers = shape.num_parameters
    if adapter is not None:
        numbers = AdapterShape(shape, adapter).num_parameters
    return SyncPlan(
        transport,
        each * numbers,
        BANDWIDTHS[transport],
        min(_BUCKETS_AT_ONCE * largest, each * shape.num_parameters),
    )
