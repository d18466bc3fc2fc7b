"""The tensors that a vLLM model holds, by the names under which weights are sent.

vLLM keeps some tensors fused (`q_proj`, `k_proj` and `v_proj` as `qkv_proj`), pads
vocabularies, and splits matrices over the processes of a tensor-parallel group. Here
tensors are cut apart, cropped and gathered again, so that each can be compared with
what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

__all__ = ["held_tensors"]


def held_tensors(
    model: Any, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those of the named tensors that the model holds.

    Every process of a tensor-parallel group must ask for the same names, because
    gathering a tensor is a collective.

    Args:
        model: A model of vLLM whose weights are kept as a checkpoint has them, fused
            at most.
        names: Hugging Face names.
    """
    fused: Mapping[str, Sequence[str]] = (
        getattr(model, "packed_modules_mapping", None) or {}
    )
    # A tied weight is one parameter, and may have been sent under either of its names.
    places = dict(model.named_parameters(remove_duplicate=False))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    with torch.no_grad():
        for name in names:
            mapped = name if mapper is None else mapper.map_name(name)
            place, part = _place(mapped or "", name, fused, places)
            if place in places:
                layer = model.get_submodule(place.rpartition(".")[0])
                yield name, _whole(layer, places[place].data, part)


def _place(
    mapped: str,
    name: str,
    fused: Mapping[str, Sequence[str]],
    places: Mapping[str, Any],
) -> tuple[str, int | None]:
    """Return the name of the parameter that holds a tensor, and which part it is."""
    for whole, parts in fused.items():
        for number, part in enumerate(parts):
            if f".{part}." in name and len(parts) > 1:
                # Some models map the names of files to fused ones, others do not.
                place = mapped.replace(f".{part}.", f".{whole}.")
                if place in places and f".{whole}." in place:
                    return place, number
    return mapped, None


def _whole(layer: Any, held: torch.Tensor, part: int | None) -> torch.Tensor:
    """Return a tensor as it was sent, gathered from the processes of the group."""
    shards = getattr(layer, "tp_size", 1)
    if isinstance(layer, VocabParallelEmbedding):
        return _gathered(held, 0, shards)[: int(layer.org_vocab_size)]
    if isinstance(layer, RowParallelLinear):
        # The layer splits its inputs; a bias belongs to the outputs, and is whole.
        return _gathered(held, 1, shards) if held.dim() > 1 else held
    if not isinstance(layer, ColumnParallelLinear):
        return held
    if part is None:
        return _gathered(held, 0, shards)
    sizes = layer.output_partition_sizes
    start = sum(sizes[:part])
    whole = _gathered(held[start : start + sizes[part]], 0, shards)
    copies = getattr(layer, "num_kv_head_replicas", 1)
    if part == 0 or copies == 1 or shards == 1:
        return whole
    # With fewer key-value heads than processes, several processes hold the same head.
    apart = whole.view(shards // copies, copies, -1, *whole.shape[1:])
    return apart[:, 0].flatten(0, 1)


def _gathered(held: torch.Tensor, dim: int, shards: int) -> torch.Tensor:
    if shards == 1:
        return held
    whole: torch.Tensor = tensor_model_parallel_all_gather(held.contiguous(), dim)
    return whole
