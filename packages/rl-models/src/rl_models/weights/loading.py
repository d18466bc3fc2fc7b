"""Copying a verified bundle into a model."""

from __future__ import annotations

import torch

from rl_models.errors import WeightSyncError
from rl_models.weights.manifest import WeightBundle

__all__ = ["load_bundle"]


def load_bundle(
    model: torch.nn.Module, bundle: WeightBundle, version: int, receiver: str
) -> None:
    """Check everything about a bundle, then copy it; on an error nothing is changed.

    Args:
        model: Its parameters keep their storage.
        bundle: Weights by the model's own parameter names. Parameters that share their
            storage (tied embeddings) need only one of their names.
        version: The version that the receiver was told to load.
        receiver: Who loads; named in errors.

    Raises:
        WeightSyncError: Another version, a damaged tensor, a name that is missing or
            unknown, or another shape.
    """
    if bundle.version is not None and bundle.version != version:
        raise WeightSyncError(
            f"{receiver} was told to load weights of version {version}, but the bundle "
            f"holds version {bundle.version}. Nothing was loaded."
        )
    bundle.verify(receiver)
    names = dict(model.named_parameters(remove_duplicate=False))
    problems = _mismatches(names, bundle)
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise WeightSyncError(
            f"The weights of version {version} do not fit the model of {receiver}: "
            f"{shown}. Trainer and generator must be built from the same model; "
            "nothing was loaded."
        )
    with torch.no_grad():
        for name, tensor in bundle.tensors():
            names[name].copy_(tensor)


def _mismatches(
    names: dict[str, torch.nn.Parameter], bundle: WeightBundle
) -> list[str]:
    sent = {entry.name: entry for entry in bundle.entries}
    covered = {id(names[name]) for name in sent if name in names}
    problems = [f"{name} is missing" for name in _uncovered(names, covered)]
    for name, entry in sent.items():
        if name not in names:
            problems.append(f"{name} is unknown")
        elif tuple(names[name].shape) != entry.shape:
            have = tuple(names[name].shape)
            problems.append(f"{name} has shape {entry.shape} instead of {have}")
    return problems


def _uncovered(names: dict[str, torch.nn.Parameter], covered: set[int]) -> list[str]:
    return [name for name, value in names.items() if id(value) not in covered]
