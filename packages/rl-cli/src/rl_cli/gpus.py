"""The option `--gpus`, which names the GPUs to plan for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click

__all__ = ["Gpus", "GpusType", "parse_gpus"]

_GIB = 1 << 30
# Memory of the driver, its context and the communication library, and the share that
# fragmentation leaves usable.
_DRIVER_BYTES, _USABLE = 1 << 30, 0.95
_PATTERN = re.compile(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)(?:gi?b?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs on equal nodes."""

    num_nodes: int
    per_node: int
    gib: float
    """Nominal memory of each, in GiB."""

    @property
    def count(self) -> int:
        """Total number of GPUs."""
        return self.num_nodes * self.per_node

    @property
    def usable_bytes(self) -> int:
        """Memory available to a run, per GPU."""
        return round(self.gib * _GIB * _USABLE) - _DRIVER_BYTES

    def describe(self) -> str:
        """Describe the GPUs in one line."""
        nodes = f" on each of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.per_node} GPU(s) of {self.gib:g} GiB{nodes}"


def parse_gpus(text: str) -> Gpus:
    """Read `8x80GB`, or `2x8x80GB` for two nodes.

    Raises:
        ValueError: The text is neither, or leaves a run no memory.
    """
    found = _PATTERN.fullmatch(text.replace(" ", ""))
    if found is not None:
        nodes, per_node, gib = found.groups()
        gpus = Gpus(int(nodes or 1), int(per_node), float(gib))
        if 0 < gpus.count <= 1 << 16 and gpus.usable_bytes > 0:
            return gpus
    raise ValueError(
        "must be [NODESx]GPUSxMEMORY with more than 1 GiB each, such as 8x80GB or "
        f"2x8x80GB: got {text}"
    )


class GpusType(click.ParamType[Gpus]):
    """`8x80GB`, or `2x8x80GB` for two nodes."""

    name = "gpus"

    def convert(
        self,
        value: str | Gpus,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Gpus:
        """Read GPUs; anything else is a usage error."""
        if isinstance(value, Gpus):
            return value
        try:
            return parse_gpus(value)
        except ValueError as error:
            return self.fail(str(error), param, ctx)
