"""What the processes of a run, its files and the object store occupy at a moment.

Memory is what a process has to itself in RAM: the anonymous pages of its address space,
from `/proc/PID/smaps_rollup`. RSS counts the object store once for each process that
has read from it, and private memory (USS) the pages of shared libraries that no other
program on the machine happens to use. What the processes of the run share, the object
store and the segments that weights pass through, is counted once, as `shared memory`,
by the proportional share of each process (`Pss_Shmem`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.recipe import STAGE

# At the end of the metrics file; more than its longest line.
TAIL_BYTES = 65_536
RAY_NAMES = ("raylet", "gcs_server", "log_monitor.py", "monitor.py")


class Sampler:
    """Takes samples of a run while it goes on.

    Args:
        run: Folder of the run.
        driver: Process that makes it.
        others: Further processes by name, such as the server of its page.
    """

    def __init__(
        self, run: Path, driver: psutil.Process, others: Mapping[str, psutil.Process]
    ) -> None:
        self._run, self._driver, self._others = run, driver, others
        self._roles: dict[tuple[int, float], str] = {}
        self._session: Path | None = None
        self._store_bytes: float | None = None

    def sample(self) -> dict[str, Any] | None:
        """Return a sample, or None if the run has not made a step yet, or has ended."""
        metrics = self._run / "stages" / STAGE / "metrics.jsonl"
        step, store_bytes = last_values(metrics)
        if not step:
            return None
        # Read less often than samples are taken.
        if store_bytes is not None:
            self._store_bytes = store_bytes
        processes: dict[str, dict[str, int]] = {}
        shared_bytes = 0
        for name, process in self._processes():
            with suppress(psutil.Error, OSError):
                usage = process_usage(process)
                shared_bytes += usage.pop("shared_bytes")
                # Two of one name, such as short-lived helpers, are one role.
                merged = processes.setdefault(name, dict.fromkeys(usage, 0))
                for key, value in usage.items():
                    merged[key] += value
        if "driver" not in processes:
            return None
        parts = folder_parts(self._run)
        session = {} if self._session is None else folder_parts(self._session)
        return {
            "time": time.time(),
            "step": step,
            "processes": processes,
            "shared_bytes": shared_bytes,
            "object_store_bytes": self._store_bytes,
            "run_files": sum(files for files, _ in parts.values()),
            "run_parts": {name: size for name, (_, size) in parts.items()},
            "session_files": sum(files for files, _ in session.values()),
            "session_bytes": sum(size for _, size in session.values()),
        }

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "driver", self._driver
        yield from self._others.items()
        try:
            children = self._driver.children(recursive=True)
        except psutil.Error:
            return
        for child in children:
            with suppress(psutil.Error):
                yield self._role(child), child

    def _role(self, process: psutil.Process) -> str:
        key = process.pid, process.create_time()
        if key not in self._roles:
            name = self._new_role(process)
            if name is None:
                # It may be a worker that has not said yet whose it is.
                return "other"
            self._roles[key] = name
        return self._roles[key]

    def _new_role(self, process: psutil.Process) -> str | None:
        worker = worker_names(self._run / "logs").get(process.pid)
        if worker is not None:
            return worker
        arguments = process.cmdline()
        title = arguments[0] if arguments else ""
        for name in RAY_NAMES:
            if any(Path(argument).name == name for argument in arguments[:3]):
                if name == "gcs_server":
                    self._session = session_folder(arguments)
                return name.removesuffix(".py")
        if title.startswith("ray::") and title.endswith("Agent"):
            return title.removeprefix("ray::")
        return None


def process_usage(process: psutil.Process) -> dict[str, int]:
    """Return memory, shared memory, open files and threads of a process."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE))
    return {
        "memory_bytes": 1024 * int(sizes["Anonymous"]),
        "shared_bytes": 1024 * int(sizes["Pss_Shmem"]),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def worker_names(logs: Path) -> dict[int, str]:
    """Return the names of workers by process, as `policy[0]`, from a run's logs."""
    names: dict[int, str] = {}
    for path in sorted(logs.glob("run-*.jsonl")):
        for text in path.read_text().splitlines():
            # The last line may be half written.
            with suppress(ValueError):
                line = json.loads(text)
                if line.get("rank") is not None:
                    names[line["pid"]] = f"{line['actor']}[{line['rank']}]"
    return names


def session_folder(arguments: list[str]) -> Path:
    """Return the folder of Ray's session from the arguments of its server."""
    option = "--log_dir="
    (logs,) = [a.removeprefix(option) for a in arguments if a.startswith(option)]
    return Path(logs).parent


def last_values(metrics: Path) -> tuple[int, float | None]:
    """Return a run's step, and the last reading of the bytes in the object store."""
    if not metrics.is_file():
        return 0, None
    with metrics.open("rb") as file:
        file.seek(max(metrics.stat().st_size - TAIL_BYTES, 0))
        tail = file.read().decode(errors="replace").splitlines()
    step, store_bytes = 0, None
    for text in tail:
        with suppress(ValueError):
            line = json.loads(text)
            step = line.get("step", step)
            found = line.get("metrics", {})
            store_bytes = found.get("system/object_store_used_bytes", store_bytes)
    return step, store_bytes


def folder_parts(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the number of files and bytes of a folder, by what they are.

    The files of a stage count by the first name below its folder: `checkpoints`,
    `metrics.jsonl`, `rollouts`; the others of the run by the first name below its own.
    """
    found: dict[str, tuple[int, int]] = {}
    # Not by `rglob`, which fails where a checkpoint is deleted meanwhile.
    for place, _, files in os.walk(folder):
        for path in map(Path(place).joinpath, files):
            with suppress(OSError):
                names = path.relative_to(folder).parts
                name = names[2] if names[0] == "stages" and len(names) > 2 else names[0]
                num_files, size = found.get(name, (0, 0))
                found[name] = num_files + 1, size + path.lstat().st_size
    return found
