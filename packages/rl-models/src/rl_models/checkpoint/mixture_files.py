"""Weight files of mixtures, whose experts are separate tensors in the files.

Models have all experts of a layer in two parameters, `gate_up_proj` [E, 2 I, H] and
`down_proj` [E, H, I] (E experts, I columns, H hidden size). Files have three tensors
per expert, under names that depend on the family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_models.checkpoint.weight_files import WeightFiles

__all__ = ["MixtureFiles"]

_EXPERT = re.compile(
    r"(?P<layer>.+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<number>\d+)"
    r"\.(?P<part>gate_proj|up_proj|down_proj|w1|w3|w2)\.weight"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ROUTER = re.compile(r"(.+)\.block_sparse_moe\.gate\.weight")


class MixtureFiles:
    """The tensors of a model by the names of its parameters, with experts joined.

    Args:
        files: The files, of any model.
    """

    def __init__(self, files: WeightFiles) -> None:
        self.source = files.source
        self._files = files
        self._experts: dict[tuple[str, str], dict[int, str]] = {}
        self._names: dict[str, str] = {}
        for name in files.shapes:
            expert, router = _EXPERT.fullmatch(name), _ROUTER.fullmatch(name)
            if expert is not None:
                part = _PARTS.get(expert["part"], expert["part"])
                key = f"{expert['layer']}.mlp.experts", part
                self._experts.setdefault(key, {})[int(expert["number"])] = name
            else:
                known = name if router is None else f"{router[1]}.mlp.gate.weight"
                self._names[known] = name
        self._shapes = {k: files.shapes[name] for k, name in self._names.items()}
        for home in {home for home, _ in self._experts}:
            self._shapes.update(self._shapes_of(home))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each parameter, by name."""
        return self._shapes

    def _shapes_of(self, home: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's experts; none if some are missing."""
        # Without an entry, the caller leaves the folder to transformers, which explains
        # what is wrong or converts it.
        found: dict[str, set[tuple[int, ...]]] = {}
        numbers = []
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = self._experts.get((home, part), {})
            found[part] = {self._files.shapes[name] for name in names.values()}
            numbers.append(sorted(names))
        count = len(numbers[0])
        is_whole = all(each == list(range(count)) for each in numbers)
        is_alike = all(len(each) == 1 for each in found.values())
        if not is_whole or not is_alike or found["gate_proj"] != found["up_proj"]:
            return {}
        ((columns, hidden),) = found["gate_proj"]
        (down,) = found["down_proj"]
        return {
            f"{home}.gate_up_proj": (count, 2 * columns, hidden),
            f"{home}.down_proj": (count, *down),
        }

    def read_part(
        self, name: str, shape: torch.Size, slices: tuple[slice, ...]
    ) -> Tensor:
        """Return a part of a parameter in float32; see `WeightFiles.read_part`."""
        home, _, leaf = name.rpartition(".")
        if (home, "down_proj") not in self._experts:
            return self._files.read_part(self._names.get(name, name), shape, slices)
        experts, rows, columns = (
            range(size)[part] for size, part in zip(shape, slices, strict=True)
        )
        kinds = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
        height = shape[1] // len(kinds)
        whole = torch.Size((height, shape[2]))
        across = slice(columns.start, columns.stop)
        # The requested rows span the gate rows and the up rows below them; each kind
        # is a tensor of its own in the files.
        parts = []
        for expert in experts:
            pieces = []
            for number, kind in enumerate(kinds):
                start = min(max(rows.start - number * height, 0), height)
                stop = min(max(rows.stop - number * height, 0), height)
                file_name = self._experts[home, kind][expert]
                pieces.append(
                    self._files.read_part(
                        file_name, whole, (slice(start, stop), across)
                    )
                )
            parts.append(torch.cat(pieces))
        if not parts:
            return torch.empty(0, len(rows), len(columns))
        return torch.stack(parts)
