"""Where the weights of a rank come from, part by part.

A rank that shares a model with others builds it without memory for its weights, finds
out which parts of them are its own, and reads only these. Where a folder does not hold
the weights under the names and with the shapes of the model, transformers converts them
when it loads them, so that every rank has to load the whole model first.
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
    """Those of a model in memory."""

    def __init__(self, model: Any) -> None:
        self._values = dict(model.named_parameters())

    def part(self, name: str, box: Box) -> Tensor:
        """Return a part of a parameter; see `WeightSource.part`."""
        value: Tensor = self._values[name].detach()[box.slices]
        return value


class FileWeights:
    """Those of safetensors, of which only the asked parts are read.

    Args:
        files: The safetensors.
        new: Parameters that are in none of them.
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
    """Return a model, and the weights that it is to get, if it has none.

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
        # Where more is wrong than that, loading the whole model says what.
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
    """Return a tensor for which files and model differ; None if there is none."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "quantized weights"
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name not in new and files.shapes.get(name) != tuple(parameter.shape):
            return str(name)
    # A weight that is tied here may be two in the files, and a buffer may be saved.
    others = model.state_dict().keys() - parameters.keys()
    return next((str(name) for name in sorted(others) if name in files.shapes), None)


def fill_for_probe(
    model: Any, left: Iterable[nn.Module], weights: WeightSource
) -> None:
    """Give layers that are probed, and what leads to them, their weights.

    Args:
        model: A model with parameters on the meta device.
        left: The decoder layers after the one that is probed.
        weights: Its weights.
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
            # Memory that nobody touches is not taken: a probe sees few tokens.
            rows = min(NUM_TOKENS + 1, parameter.shape[0])
            box = Box(box.global_shape, box.starts, (rows, *parameter.shape[1:]))
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        value[box.slices] = weights.part(name, box)
        filled[parameter] = nn.Parameter(value, parameter.requires_grad)
    _replace(model, filled)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory of their own, without values.

    Parameters that are one stay one, and those that are sharded stay sharded.
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
    """Move what has memory to a device."""
    apply: Callable[[Callable[[Tensor], Tensor]], nn.Module] = model._apply
    apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


@contextmanager
def place_adapters(model: nn.Module) -> Iterator[None]:
    """Let layers on the meta device get adapters that are not.

    An adapter goes where the weight of its layer is, so that the weight stands on the
    CPU meanwhile, as one number that is repeated.
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
