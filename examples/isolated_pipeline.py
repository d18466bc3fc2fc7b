"""A pipeline of two actors that need different versions of one library.

    python examples/isolated_pipeline.py

`textops` 1 and 2 cannot be installed side by side: both are called `textops`, and what
one calls `clean(text)` the other calls `clean(text, keep=...)`. Each actor gets a
Python environment of its own, with the version that it was written for, and batches go
from one to the other without passing through this program.

It needs no network: it makes the two wheels itself.
"""

from __future__ import annotations

import tempfile
import time
import zipfile
from pathlib import Path

from rl_distributed import (
    BatchedDataDict,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    init_ray,
)
from rl_distributed.actor_environments import OverlayEnvironment

LIBRARY = {
    "1.0": "def clean(text):\n    return ' '.join(text.lower().split())\n",
    "2.0": "def clean(text, keep):\n    return ''.join(c for c in text if c in keep)\n",
}


class Normalizer:
    """Written for textops 1: lower case, single spaces."""

    def __init__(self) -> None:
        # Importable here, and not in the driver.
        import textops  # noqa: PLC0415

        self.textops = textops

    def run(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Add the column `clean`."""
        texts = [self.textops.clean(text) for text in batch["text"]]
        return BatchedDataDict({"text": batch["text"], "clean": texts})


class LetterCounter:
    """Written for textops 2: keeps some characters only."""

    def __init__(self) -> None:
        import textops  # noqa: PLC0415

        self.textops = textops

    def run(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Add the column `vowels`."""
        vowels = [
            len(self.textops.clean(text, keep="aeiou")) for text in batch["clean"]
        ]
        return BatchedDataDict({**batch, "vowels": vowels})


def write_wheel(folder: Path, version: str) -> None:
    """Write a wheel of textops: a zip file with a module and three lines about it."""
    info = f"textops-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: textops\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"textops-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("textops.py", LIBRARY[version])
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", f"textops.py,,\n{info}/RECORD,,\n")


def start(
    cluster: RayVirtualCluster, stage: type, version: str, wheels: Path
) -> RayWorkerGroup:
    """Start one worker of a stage, with its own version of textops."""
    environment = OverlayEnvironment(
        (f"textops=={version}",), find_links=(str(wheels),), no_index=True
    )
    builder = RayWorkerBuilder(stage).with_options(environment=environment)
    begun = time.perf_counter()
    group = RayWorkerGroup(cluster, builder, workers_per_node=1)
    took = time.perf_counter() - begun
    print(f"{stage.__name__} runs with textops {version} (up after {took:.1f} s)")
    return group


def main() -> None:
    """Build both environments, run the pipeline, show what came out."""
    lines = [
        "  To be,   or NOT to be ",
        "That IS the   question",
        "WHETHER 'tis nobler",
    ]
    init_ray(num_cpus=2)
    with (
        tempfile.TemporaryDirectory() as folder,
        RayVirtualCluster(
            [2], use_gpus=False, max_colocated_worker_groups=2
        ) as cluster,
    ):
        for version in LIBRARY:
            write_wheel(Path(folder), version)
        with (
            start(cluster, Normalizer, "1.0", Path(folder)) as first,
            start(cluster, LetterCounter, "2.0", Path(folder)) as second,
        ):
            # A call returns a reference; given to the next stage, the batch goes there.
            batch = BatchedDataDict({"text": lines})
            cleaned = first.run_single_worker_single_data("run", 0, batch=batch)
            counted = second.run_single_worker_single_data("run", 0, batch=cleaned)
            [result] = second.get_all_worker_results([counted])
    for clean, vowels in zip(result["clean"], result["vowels"], strict=True):
        print(f"{vowels} vowels: {clean}")


if __name__ == "__main__":
    main()
