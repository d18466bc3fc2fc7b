"""The adapter of a model of vLLM: found by requests, replaced in place.

vLLM wraps each layer that is adapted. The wrapper holds the two matrices in buffers of
its own, and the layer with the weight of the base. There is one adapter, under one
number, which every request names; a new version takes its place in the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_models.errors import WeightSyncError
from rl_models.weights.adapters import adapted_layer

__all__ = ["adapter_request", "load_adapter", "without_wrappers"]

_NUMBER = 1
_SHOWN = 5


def adapter_request(arguments: Mapping[str, Any]) -> Any | None:
    """Return what requests name the adapter by; None for an engine without one.

    Args:
        arguments: Of vLLM's `EngineArgs`.
    """
    if not arguments.get("enable_lora"):
        return None
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    # Never read: the adapter is there before the first request.
    return LoRARequest("policy", _NUMBER, "sent by the trainer")


@contextmanager
def without_wrappers(model: Any) -> Iterator[None]:
    """Have the layers of the base in their places, under the names of the model.

    Args:
        model: A model of vLLM, with or without adapters.
    """
    manager = getattr(model, "lora_manager", None)
    wrappers = {} if manager is None else dict(manager.modules)
    try:
        for path, wrapper in wrappers.items():
            _put(model, path, wrapper.base_layer)
        yield
    finally:
        for path, wrapper in wrappers.items():
            _put(model, path, wrapper)


def _put(model: Any, path: str, module: torch.nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def load_adapter(model: Any, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Put an adapter in the place of the one before.

    Args:
        model: A model of vLLM that was built for adapters.
        tensors: By the names of peft's files; they are kept as they are.
        scale: What the product of the two matrices is multiplied by.

    Raises:
        WeightSyncError: There are none, or the model cannot adapt a layer.
    """
    from vllm.lora.lora_model import LoRAModel  # noqa: PLC0415

    manager = model.lora_manager
    helper = _settings(tensors, scale)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        _NUMBER,
        # vLLM multiplies by the scale in place.
        {name: tensor.clone() for name, tensor in tensors.items()},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    _check_layers(manager, lora.loras)
    try:
        manager.remove_adapter(_NUMBER)
        manager.add_adapter(lora)
        manager.activate_adapter(_NUMBER)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise WeightSyncError(
            f"vLLM cannot load the adapter: {type(error).__name__}: {error}. Trainer "
            "and generator must be built from the same model."
        ) from error


def _settings(tensors: Mapping[str, torch.Tensor], scale: float) -> Any:
    """Return what vLLM reads of an adapter's `adapter_config.json`."""
    from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415

    layers = {part: set[str]() for part in "AB"}
    rank = 0
    for name, tensor in tensors.items():
        layer, part = adapted_layer(name)
        layers[part].add(layer)
        rank = len(tensor) if part == "A" else rank
    odd = sorted(layers["A"] ^ layers["B"])
    if odd or not rank:
        raise WeightSyncError(
            "an engine that computes with an adapter needs both matrices of each "
            f"layer: got {f'one of {odd[0]}' if odd else 'none'}"
        )
    names = sorted({layer.rpartition(".")[2] for layer in layers["A"]})
    return PEFTHelper(r=rank, lora_alpha=scale * rank, target_modules=names)


def _check_layers(manager: Any, layers: Mapping[str, Any]) -> None:
    """Refuse layers that vLLM would leave out without a word."""
    known = {
        *manager.modules,
        *(p for ps in manager.packed_modules.values() for p in ps),
    }
    unknown = [layer for layer in layers if layer not in known]
    if unknown:
        more = ", ..." if len(unknown) > _SHOWN else ""
        raise WeightSyncError(
            f"vLLM cannot adapt {', '.join(unknown[:_SHOWN])}{more} of this model; "
            "name others in policy.lora.target_modules, or set policy.lora.sync to "
            "merged."
        )
