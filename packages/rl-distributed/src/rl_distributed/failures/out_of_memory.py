"""Summarise Ray's message about a process that it ended for lack of memory.

Ray's own text is forty lines long, ends with the address of a page, and names processes
by their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["OUT_OF_MEMORY", "MemoryReport", "MemoryUse", "read_memory_report"]

OUT_OF_MEMORY = "memory ran out on node "
"""How the cause of such a failure begins."""

_MOST_NAMED = 4
_MIB_PER_GB = 1024  # Ray writes GB and means GiB.
_NODE = re.compile(
    r"low on memory\. Memory on the node \(IP: (?P<node>[^,]+), .*? was "
    r"(?P<used>[\d.]+)GB used / (?P<total>[\d.]+)GB"
)
_LIMIT = re.compile(r"exceeded threshold of \d+B \((?P<percent>[\d.]+)%")
_KILLED = re.compile(
    r"Selected to kill: \((?:Actor\((?P<actor>\w+)\))?.*?pid=(?P<pid>\d+), "
    r"actual memory used=(?P<used>[\d.]+)GB"
)
_USER = re.compile(r"^(?P<pid>\d+)\t(?P<used>[\d.]+)\t(?P<command>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What one process used."""

    pid: int
    mib: int
    command: str = ""
    actor_id: str = ""
    """Ray's id of the actor in it; empty: not known, or none."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Why and what Ray has ended."""

    node: str
    """Address of the node."""
    used_gib: float
    total_gib: float
    limit_percent: float | None
    """Share of the memory beyond which Ray ends processes; None: it did not say."""
    killed: tuple[MemoryUse, ...]
    users: tuple[MemoryUse, ...]
    """Those that used most of the node's memory, first the largest."""

    def describe(self, name_of: Callable[[int], str]) -> str:
        """Say it in one line.

        Args:
            name_of: What messages call the worker with this pid; empty: it is none.
        """
        limit = ""
        if self.limit_percent is not None:
            limit = f", and Ray's limit is {self.limit_percent:g} %"
        # Ray names the command of a process only in its list of the largest ones.
        commands = {use.pid: use.command for use in self.users}

        def shown(use: MemoryUse) -> str:
            name = name_of(use.pid) or commands.get(use.pid) or "a process"
            return f"{name} (pid {use.pid}, {use.mib} MiB)"

        killed = ", ".join(map(shown, self.killed))
        users = "; ".join(map(shown, self.users[:_MOST_NAMED]))
        return (
            f"{OUT_OF_MEMORY}{self.node} ({self.used_gib:g} of {self.total_gib:g} GiB "
            f"were in use{limit}), so Ray ended {killed or 'a process'}"
            + (f". Most was used by {users}" if users else "")
            + ". Have the workers hold less at a time, start fewer of them on a node, "
            "make Ray's object store smaller (object_store_bytes), or use a node with "
            "more memory"
        )


def read_memory_report(text: str) -> MemoryReport | None:
    """Read Ray's message; None: it is about something else.

    Args:
        text: Of an error of Ray.
    """
    node = _NODE.search(text)
    if node is None:
        return None
    limit = _LIMIT.search(text)
    return MemoryReport(
        node["node"],
        float(node["used"]),
        float(node["total"]),
        None if limit is None else float(limit["percent"]),
        tuple(
            MemoryUse(int(m["pid"]), _mib(m["used"]), actor_id=m["actor"] or "")
            for m in _KILLED.finditer(text)
        ),
        tuple(
            MemoryUse(int(m["pid"]), _mib(m["used"]), m["command"].strip())
            for m in _USER.finditer(text)
        ),
    )


def _mib(gib: str) -> int:
    return round(float(gib) * _MIB_PER_GB)
