"""Copying a verified stream of tensors into a module, and comparing the two."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_distributed.transfer.manifest import Manifest, digest_of
from rl_models.errors import WeightSyncError

__all__ = ["changed_tensors", "load_tensors", "loaded_tensors"]

_SHOWN = 5


def load_tensors(
    model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], receiver: str
) -> None:
    """Copy each tensor to its place; what has no place, or misses its tensor, raises.

    Args:
        model: Its parameters and saved buffers keep their storage.
        tensors: By the model's own names. Parameters that share their storage (tied
            embeddings) need only one of their names. It is taken to its end.
        receiver: Name of the loading side in errors.

    Raises:
        WeightSyncError: A name that is missing or unknown, or another shape. The model
            then holds neither the old weights nor the new ones.
    """
    places = _places(model)
    covered: set[int] = set()
    problems = []
    with torch.no_grad():
        for name, tensor in tensors:
            place = places.get(name)
            if place is None:
                # Collected, not raised: the stream must be taken to its end, and one
                # message shall name all of them.
                problems.append(f"{name} is unknown")
            elif place.shape != tensor.shape:
                have, got = tuple(place.shape), tuple(tensor.shape)
                problems.append(f"{name} has shape {got} instead of {have}")
                covered.add(id(place))
            else:
                place.copy_(tensor)
                covered.add(id(place))
    # By identity, as a tied weight has several names and comes under one of them.
    absent = [name for name, place in places.items() if id(place) not in covered]
    problems += [f"{name} is missing" for name in absent]
    if problems:
        shown = "; ".join(problems[:_SHOWN]) + ("; ..." if len(problems) > 5 else "")
        raise WeightSyncError(
            f"The weights do not fit the model of {receiver}: {shown}. Trainer and "
            "generator must be built from the same model."
        )


def loaded_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and saved buffers, tied ones under each of their names."""
    yield from _places(model).items()


def _places(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def changed_tensors(
    manifest: Manifest, loaded: Iterator[tuple[str, torch.Tensor]]
) -> list[str]:
    """Names of the tensors of a manifest that a model holds otherwise.

    Args:
        manifest: What the model was given.
        loaded: What it has, by the same names; further tensors do not matter.
    """
    wrong = {entry.name: entry for entry in manifest.entries}
    for name, tensor in loaded:
        entry = wrong.get(name)
        if entry is not None and _digest(tensor) == entry.digest:
            del wrong[name]
    return list(wrong)


def _digest(tensor: torch.Tensor) -> str:
    # The sender digests bytes in row-major order, whatever the layout here.
    flat = tensor.detach().contiguous().view(-1)
    return digest_of(flat.view(torch.uint8))
