"""Sources of a rank's weights, which are read part by part.

A rank that shares a model with others builds it without memory for its weights,
determines its parts of them, and reads only these. If a folder does not hold the
weights under the names and with the shapes of the model, transformers converts them on
loading, so that every rank has to load the whole model first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rl_distributed.logs.logging import get_logger
from rl_models.checkpoint.mixture_files import MixtureFiles
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.checkpoint.sharded import Box
from rl_models.checkpoint.weight_files import WeightFiles
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError
from rl_models.ops.causal_lm import causal_lm_skeleton, load_causal_lm
from rl_models.ops.scalar_head import load_scalar_model, scalar_model_skeleton
from rl_models.training.dtensor.layer_probe import NUM_TOKENS

__all__ = [
    "LoadedWeights",
    "WeightSource",
    "allocate",
    "fill_for_probe",
    "move",
    "open_model",
    "place_adapters",
]

_log = get_logger(__name__)

_WHOLE = "the weights of %s are loaded as a whole by every rank that shares them: %s"


class WeightSource(Protocol):
    """The weights of a model by Hugging Face names."""

    def part(self, name: str, box: Box) -> Tensor:
        """Return a part of a parameter in float32, on the CPU."""
        ...


class LoadedWeights:
    """Weights of a model in memory."""

    def __init__(self, model: Any) -> None:
        self._values = dict(model.named_parameters())

    def part(self, name: str, box: Box) -> Tensor:
        """Return a part of a parameter; see `WeightSource.part`."""
        value: Tensor = self._values[name].detach()[box.slices]
        return value


class FileWeights:
    """Weights in safetensors files, of which only the requested parts are read.

    Args:
        files: The safetensors.
        new: Parameters that are in none of them, such as a new head.
    """

    def __init__(self, files: MixtureFiles, new: Mapping[str, Tensor]) -> None:
        self._files = files
        self._new = new

    def part(self, name: str, box: Box) -> Tensor:
        """Return a part of a parameter; see `WeightSource.part`."""
        if name in self._new:
            return self._new[name][box.slices]
        shape = torch.Size(box.global_shape)
        return self._files.read_part(name, shape, box.slices)


def open_model(
    config: PolicyConfig, source: Any, *, shared: bool
) -> tuple[Any, WeightSource | None]:
    """Return a model, and the source of its weights if it has none.

    Args:
        config: The policy's config.
        source: A folder or a hub name.
        shared: Whether ranks share the model. Its parameters are then on the meta
            device, unless only loading the whole model gives their values.

    Raises:
        ModelLoadError: The folder is missing or incomplete, or the name unknown.
    """
    opened = _without_weights(config, source) if shared else None
    if opened is not None:
        return opened
    overrides = config.hf_config_overrides
    if config.head == "lm":
        return load_causal_lm(source, "float32", overrides), None
    return load_scalar_model(source, config.head, overrides, config.seed), None


def _without_weights(
    config: PolicyConfig, source: Any
) -> tuple[Any, WeightSource] | None:
    """Return a model without memory for its weights; None if it must be loaded."""
    try:
        files = MixtureFiles(WeightFiles(source))
        model = _skeleton(config, files.source)
    except (ModelLoadError, SafetensorError, OSError, ValueError, KeyError) as error:
        # Not an error yet: if more is wrong than that, loading the whole model fails
        # with a better message.
        _log.warning(_WHOLE, source, f"they cannot be read in parts ({error})")
        return None
    if model is None:
        reason = "only loading the model gives the values of its buffers"
    else:
        drawn = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
        new = {name: p for name, p in drawn.items() if name not in files.shapes}
        odd = _odd_name(model, files, new)
        if odd is None:
            return model, FileWeights(files, new)
        reason = f"the files hold {odd} in another way than the model does"
    _log.warning(_WHOLE, files.source, reason)
    return None


def _skeleton(config: PolicyConfig, source: str) -> Any | None:
    folder = check_model_folder(source)
    overrides = config.hf_config_overrides
    where = str(folder or source)
    if config.head == "lm":
        return causal_lm_skeleton(where, overrides)
    return scalar_model_skeleton(where, config.head, overrides, config.seed)


def _odd_name(model: Any, files: MixtureFiles, new: Mapping[str, Tensor]) -> str | None:
    """Return a tensor that differs between files and model; None if there is none."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "quantized weights"
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name not in new and files.shapes.get(name) != tuple(parameter.shape):
            return str(name)
    # The files may have two weights where the model has a tied one, or a saved buffer.
    others = model.state_dict().keys() - parameters.keys()
    return next((str(name) for name in sorted(others) if name in files.shapes), None)


def fill_for_probe(
    model: Any, left: Iterable[nn.Module], weights: WeightSource
) -> None:
    """Load the weights of the probed layer and of everything before it.

    Args:
        model: A model with parameters on the meta device.
        left: The decoder layers after the probed one.
        weights: Source of the weights.
    """
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    unneeded = {p for layer in left for p in layer.parameters()}
    if head is not None and head.weight is not embedding:
        unneeded.update(head.parameters())
    filled = {}
    for name, parameter in model.named_parameters():
        if parameter in unneeded or not parameter.is_meta:
            continue
        box = Box.whole(parameter.shape)
        if parameter is embedding:
            # The probe sees few tokens, and untouched pages of memory are never
            # allocated.
            rows = min(NUM_TOKENS + 1, parameter.shape[0])
            box = Box(box.global_shape, box.starts, (rows, *parameter.shape[1:]))
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        value[box.slices] = weights.part(name, box)
        filled[parameter] = nn.Parameter(value, parameter.requires_grad)
    _replace(model, filled)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters on the meta device, without values.

    Tied parameters stay tied, and sharded ones stay sharded.
    """
    made = {}
    for parameter in model.parameters():
        if parameter.is_meta:
            value = torch.empty_like(parameter.detach(), device=device)
            made[parameter] = nn.Parameter(value, parameter.requires_grad)
    _replace(model, made)


def _replace(model: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in new:
                module._parameters[name] = new[parameter]


def move(model: nn.Module, device: torch.device) -> None:
    """Move all tensors that have memory to a device."""
    # `Module.to` refuses models with tensors on the meta device.
    apply: Callable[[Callable[[Tensor], Tensor]], nn.Module] = model._apply
    apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


@contextmanager
def place_adapters(model: nn.Module) -> Iterator[None]:
    """Have adapters created on the CPU for layers on the meta device.

    peft creates an adapter on the device of its layer's weight, so the weight is
    replaced meanwhile by a tensor on the CPU, a single number that is repeated.
    """
    placed = [
        (module, parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear) and (parameter := module.weight).is_meta
    ]
    for module, parameter in placed:
        value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module.weight = nn.Parameter(value, parameter.requires_grad)
    try:
        yield
    finally:
        for module, parameter in placed:
            parameter.requires_grad_(module.weight.requires_grad)
            module.weight = parameter
