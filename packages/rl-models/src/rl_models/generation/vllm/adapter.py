"""The LoRA adapter of a vLLM model: named by every request, replaced in place.

vLLM wraps each adapted layer. The wrapper holds the two matrices in buffers of its own,
and the layer with the base weight. There is a single adapter, under a fixed number that
every request names; a new version overwrites the buffers.
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
    """Return the adapter for requests to name; None for an engine without one.

    Args:
        arguments: Arguments of vLLM's `EngineArgs`.
    """
    if not arguments.get("enable_lora"):
        return None
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    # The path is never read: vLLM looks for files only if it does not know the number,
    # and the adapter is loaded before the first request.
    return LoRARequest("policy", _NUMBER, "sent by the trainer")


@contextmanager
def without_wrappers(model: Any) -> Iterator[None]:
    """Put the base layers back in place of their wrappers for the context.

    Args:
        model: A model of vLLM, with or without adapters.
    """
    # vLLM's `load_weights` finds parameters by name, and a wrapper adds `base_layer` to
    # the names below it.
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
    """Replace the adapter.

    Args:
        model: A model of vLLM that was built for adapters.
        tensors: By the names of peft's files; they are not changed.
        scale: Factor of the product of the two matrices.

    Raises:
        WeightSyncError: There are no tensors, or the model cannot adapt a layer.
    """
    from vllm.lora.lora_model import LoRAModel  # noqa: PLC0415

    manager = model.lora_manager
    helper = _settings(tensors, scale)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        _NUMBER,
        # vLLM multiplies B by the scale in place, and the tensors as they were sent are
        # still compared with the manifest later.
        {name: tensor.clone() for name, tensor in tensors.items()},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    _check_layers(manager, lora.loras)
    try:
        # First, because vLLM keeps the old matrices when a number that it knows is
        # added.
        manager.remove_adapter(_NUMBER)
        manager.add_adapter(lora)
        manager.activate_adapter(_NUMBER)
    # vLLM checks sizes by assertions as well.
    except (RuntimeError, ValueError, AssertionError) as error:
        raise WeightSyncError(
            f"vLLM cannot load the adapter: {type(error).__name__}: {error}. Trainer "
            "and generator must be built from the same model."
        ) from error


def _settings(tensors: Mapping[str, torch.Tensor], scale: float) -> Any:
    """Return the settings that vLLM would read from an `adapter_config.json`."""
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
    # vLLM computes the scale as alpha / r.
    return PEFTHelper(r=rank, lora_alpha=scale * rank, target_modules=names)


def _check_layers(manager: Any, layers: Mapping[str, Any]) -> None:
    """Refuse layers that vLLM would skip silently."""
    # Layers that vLLM fuses, such as q, k and v, have no wrapper of their own name.
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
