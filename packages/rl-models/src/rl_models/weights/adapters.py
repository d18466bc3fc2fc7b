r"""Adapters on their way to a generator: their names, and merging them into weights.

```
stream of a sync --set_apart--> weights of the base   (only if the replica lacks them)
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
    """Return the name that peft's files give a parameter of the adapter `default`."""
    # peft names the adapter inside the model only: its files leave the name out.
    return _PREFIX + parameter.replace(".default", "")


def plain_name(parameter: str) -> str | None:
    """Return a parameter's name without adapters; None for one of an adapter."""
    if ".lora_A." in parameter or ".lora_B." in parameter:
        return None
    return parameter.replace(_BASE, ".")


def sent_name(parameter: str) -> str:
    """Return the name under which a parameter of a model with adapters is sent."""
    return plain_name(parameter) or file_name(parameter)


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a sync is one of an adapter."""
    return name.startswith(_PREFIX)


def adapted_layer(name: str) -> tuple[str, str]:
    """Return the layer that an adapter's tensor belongs to, and which factor it is.

    Args:
        name: As in peft's files.

    Returns:
        The path of the layer in the model; `A` or `B`.

    Raises:
        WeightSyncError: The name ends in neither.
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
        scale: Factor of the product.
    """
    # Trainer and replicas both merge here, so that their sums are equal to the bit. In
    # bfloat16 the product would be rounded before the sum is.
    product = b.float() @ a.float()
    return weight.float().add(product, alpha=scale).to(weight.dtype)


def set_apart(
    tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the base, and copy those of the adapter.

    Args:
        tensors: The stream of a sync.
        adapter: Receives the copies, by name.
    """
    for name, tensor in tensors:
        if is_of_adapter(name):
            # The stream hands out views of a block that the link uses again for later
            # tensors; an adapter is kept until the whole stream has been read.
            adapter[name] = tensor.detach().clone()
        else:
            yield name, tensor


class MergedAdapter:
    """Keeps a model at the sum of its base and the newest adapter.

    The base weights of adapted layers are kept beside the sum. Each version is added
    to them and not to the previous sum, so that rounding errors do not accumulate.

    Args:
        model: Its parameters keep their storage.
        scale: Factor of the product of the two matrices.
        receiver: Name of the replica, for errors.
    """

    def __init__(self, model: nn.Module, scale: float, receiver: str) -> None:
        self._model = model
        self._scale = scale
        self._receiver = receiver
        self._base: dict[str, Tensor] = {}
        self._adapter: dict[str, Tensor] = {}

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load an adapter, and the base as well if the stream contains it.

        Args:
            tensors: The stream of a sync; read to its end.

        Raises:
            WeightSyncError: The tensors do not fit the model, which then holds neither
                the old weights nor the new ones.
        """
        adapter: dict[str, Tensor] = {}
        base = set_apart(tensors, adapter)
        # `load_tensors` would report every weight as missing from a stream without a
        # base. Asking for the first tensor of the base also reads such a stream to its
        # end, which fills `adapter`.
        first = next(base, None)
        if first is not None:
            # The copies are of the previous base; `_add` copies the new weights.
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
        # All misfits go into one error: they have one cause, usually another model.
        problems = []
        for name, parts in layers.items():
            problem = _misfit(weights.get(name), parts)
            if problem:
                problems.append(f"the adapter of {name} {problem}")
                continue
            weight = weights[name]
            if name not in self._base:
                self._base[name] = weight.detach().clone()
            base = self._base[name]
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
        """Yield all loaded tensors as they were sent: base and adapter apart."""
        for name, tensor in loaded_tensors(self._model):
            # The model holds the sum, which was never sent and has no digest.
            yield name, self._base.get(name, tensor)
        yield from self._adapter.items()


def _misfit(weight: Tensor | None, parts: dict[str, Tensor]) -> str:
    """Return why an adapter cannot be added to a weight; empty if it can."""
    if weight is None:
        return "is of a layer that is unknown"
    if len(parts) < len(_PARTS):
        return f"has no {'B' if 'A' in parts else 'A'}"
    a, b = parts["A"], parts["B"]
    if (*b.shape[:1], *a.shape[1:]) != tuple(weight.shape) or len(a) != b.shape[-1]:
        shapes = f"{list(b.shape)} and {list(a.shape)}"
        return f"has shapes {shapes}, whose product must be {list(weight.shape)}"
    return ""
