r"""Adapters on their way to a generator: names, the sum with a weight, and who adds up.

```
stream of a sync --set_apart--> weights of the base   (only while a replica lacks them)
                            \-> A and B of each layer -> base + scale B A -> the model
```
Names are those of peft's files, so that a tensor of an adapter cannot be mistaken for
one of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from rl_models.errors import WeightSyncError
from rl_models.weights.loading import load_tensors, loaded_tensors

__all__ = [
    "MergedAdapter",
    "adapted_layer",
    "file_name",
    "is_of_adapter",
    "plain_name",
    "sent_name",
    "set_apart",
    "with_adapter",
]

_PREFIX = "base_model.model."
_BASE = ".base_layer."
_PARTS = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
_SHOWN = 5


def file_name(parameter: str) -> str:
    """Return what peft's files call a parameter of an adapter named `default`."""
    return _PREFIX + parameter.replace(".default", "")


def plain_name(parameter: str) -> str | None:
    """Return a parameter's name without adapters; None for one of an adapter."""
    if ".lora_A." in parameter or ".lora_B." in parameter:
        return None
    return parameter.replace(_BASE, ".")


def sent_name(parameter: str) -> str:
    """Return what a parameter of a model with adapters is called on its way."""
    return plain_name(parameter) or file_name(parameter)


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a sync is one of an adapter."""
    return name.startswith(_PREFIX)


def adapted_layer(name: str) -> tuple[str, str]:
    """Return the layer that a tensor of an adapter is for, and which one it is.

    Args:
        name: By peft's files.

    Returns:
        The path of the layer in the model; `A` or `B`.

    Raises:
        WeightSyncError: It is neither.
    """
    for part, ending in _PARTS.items():
        if name.endswith(ending):
            return name.removeprefix(_PREFIX).removesuffix(ending), part
    raise WeightSyncError(
        f"{name} is no tensor of an adapter that can be loaded: its name must end in "
        f"{' or '.join(_PARTS.values())}; set policy.lora.sync to merged"
    )


def with_adapter(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return `weight + scale b a`, summed in float32 and rounded once.

    Args:
        weight: [O, I] of a linear layer.
        a: [r, I] of its adapter.
        b: [O, r] likewise.
        scale: What the product is multiplied by.
    """
    product = b.float() @ a.float()
    return weight.float().add(product, alpha=scale).to(weight.dtype)


def set_apart(
    tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the base, and copy those of the adapter.

    Args:
        tensors: Of a sync.
        adapter: Where the copies go, by name.
    """
    for name, tensor in tensors:
        if is_of_adapter(name):
            adapter[name] = tensor.detach().clone()
        else:
            yield name, tensor


class MergedAdapter:
    """Keeps a model at the sum of its base and the newest adapter.

    The base of the layers that are adapted is kept beside the sum: each version is
    added to it, not to the version before, so that errors do not pile up.

    Args:
        model: Its parameters keep their storage.
        scale: What the product of the two matrices is multiplied by.
        receiver: Who loads; named in errors.
    """

    def __init__(self, model: nn.Module, scale: float, receiver: str) -> None:
        self._model = model
        self._scale = scale
        self._receiver = receiver
        self._base: dict[str, Tensor] = {}
        self._adapter: dict[str, Tensor] = {}

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take an adapter, and the base as well where the stream has it.

        Args:
            tensors: Of a sync; taken to its end.

        Raises:
            WeightSyncError: The tensors do not fit the model, which then holds neither
                the old weights nor the new ones.
        """
        adapter: dict[str, Tensor] = {}
        base = set_apart(tensors, adapter)
        first = next(base, None)
        if first is not None:
            self._base = {}
            load_tensors(self._model, chain([first], base), self._receiver)
        self._add(adapter)
        self._adapter = adapter

    @torch.no_grad()
    def _add(self, adapter: dict[str, Tensor]) -> None:
        weights = dict(self._model.named_parameters())
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in adapter.items():
            path, part = adapted_layer(name)
            layers.setdefault(f"{path}.weight", {})[part] = tensor
        problems = []
        for name, parts in layers.items():
            problem = _misfit(weights.get(name), parts)
            if problem:
                problems.append(f"the adapter of {name} {problem}")
                continue
            weight = weights[name]
            base = self._base.setdefault(name, weight.detach().clone())
            a, b = (parts[part].to(weight.device) for part in "AB")
            weight.copy_(with_adapter(base, a, b, self._scale))
        if problems:
            more = "; ..." if len(problems) > _SHOWN else ""
            raise WeightSyncError(
                f"The adapter does not fit the model of {self._receiver}: "
                f"{'; '.join(problems[:_SHOWN])}{more}. Trainer and generator must be "
                "built from the same model."
            )

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Return all that was loaded, as it was sent: base and adapter apart."""
        for name, tensor in loaded_tensors(self._model):
            yield name, self._base.get(name, tensor)
        yield from self._adapter.items()


def _misfit(weight: Tensor | None, parts: dict[str, Tensor]) -> str:
    """Return why an adapter cannot be added to a weight; empty: it can."""
    if weight is None:
        return "is of a layer that is unknown"
    if len(parts) < len(_PARTS):
        return f"has no {'B' if 'A' in parts else 'A'}"
    a, b = parts["A"], parts["B"]
    if (*b.shape[:1], *a.shape[1:]) != tuple(weight.shape) or len(a) != b.shape[-1]:
        shapes = f"{list(b.shape)} and {list(a.shape)}"
        return f"has shapes {shapes}, whose product must be {list(weight.shape)}"
    return ""
