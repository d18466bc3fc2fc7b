"""Metrics of all replicas as a single text in the format of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["merged_metrics"]

_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.*)")


def merged_metrics(texts: Mapping[int, str], own: Mapping[str, float]) -> str:
    """Join the texts of replicas; each sample gets a label `replica`.

    Args:
        texts: The text of each replica, by number.
        own: Gauges of the router, by name.
    """
    # The format allows each comment once, and wants the samples of a metric together.
    comments: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if comment := _COMMENT.match(line):
                family = comment[1]
                comments.setdefault(family, {})[line] = None
            elif sample := _SAMPLE.match(line):
                name, labels, value = sample.groups()
                label = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(family or name, []).append(
                    f"{name}{{{label}}} {value}"
                )
    lines = []
    for name, number in own.items():
        lines += [f"# TYPE {name} gauge", f"{name} {number:g}"]
    for family, rows in samples.items():
        lines += [*comments.get(family, ()), *rows]
    return "\n".join(lines) + "\n"
