"""A library in two versions, environments with it, and workers that use it.

Run as a script, it builds the environment of the library:
`python rl_distributed_sample_environments.py ROOT WHEELS LOG [VERSION]`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import sys
import zipfile
from pathlib import Path

from rl_distributed.actor_environments import EnvironmentStore, OverlayEnvironment

LIBRARY = "isolation_sample"
DECLARED = OverlayEnvironment((LIBRARY,))
WHEELHOUSE = Path(__file__).parents[3] / "wheelhouse"


def write_wheel(folder: Path, version: str, *, name: str = LIBRARY) -> Path:
    """Write a wheel of a library that reports its version."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n\n\ndef scale():\n"
        f"    return {int(version.split('.')[0])}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        lines.append(f"{path},sha256={digest.decode().rstrip('=')},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


@dataclasses.dataclass(frozen=True)
class LoggedOverlay(OverlayEnvironment):
    """Logs the start and end of its build to the file named by BUILD_LOG."""

    def build(self, folder, deadline_s):
        with open(os.environ["BUILD_LOG"], "a") as log:
            log.write(f"begin {os.getpid()}\n")
        super().build(folder, deadline_s)
        with open(os.environ["BUILD_LOG"], "a") as log:
            log.write(f"end {os.getpid()}\n")


def overlay(wheels, version="1.0", cls=OverlayEnvironment, **options):
    return cls(
        (f"{LIBRARY}=={version}",), find_links=(wheels,), no_index=True, **options
    )


class Scaler:
    """Multiplies a column by a factor from its version of the library."""

    def __init__(self, name="scaler"):
        import isolation_sample  # noqa: PLC0415

        self.library = isolation_sample
        self.name = name

    def version(self):
        return self.library.VERSION

    def packages(self):
        import numpy  # noqa: PLC0415
        import torch  # noqa: PLC0415

        return sys.prefix, torch.__file__, numpy.__file__

    def leak(self):
        return os.environ.get("PYTHONPATH"), os.environ.get("DRIVER_ONLY")

    def apply(self, batch):
        from rl_distributed import BatchedDataDict  # noqa: PLC0415

        by = f"{self.name} {self.version()}"
        return BatchedDataDict(
            {
                "values": batch["values"] * self.library.scale(),
                "seen": [[*seen, by] for seen in batch["seen"]],
            }
        )


if __name__ == "__main__":
    root, wheels, log, *rest = sys.argv[1:]
    os.environ["BUILD_LOG"] = log
    wanted = overlay(wheels, *rest, cls=LoggedOverlay)
    stored, waited = EnvironmentStore(Path(root)).ensure(wanted)
    sys.stdout.write(f"{stored.key} {stored.state}\n")
