"""A run of `rl` on a host of its own, and what can be seen of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file
from two_hosts import HEAD, PORT, Host, wait_until

__all__ = ["HostRun", "final_weights"]

STEP_S = 180.0


class HostRun:
    """A command on a host, with the address of the cluster in `RAY_ADDRESS`.

    Args:
        host: Where it runs.
        arguments: Of Python.
        folder: For its console.
        stage: Folder of the stage that is watched.
    """

    def __init__(
        self, host: Host, arguments: list[str], folder: Path, stage: Path
    ) -> None:
        self.stage = stage
        self._console = folder / "console"
        with self._console.open("w") as console:
            self.process = host.start(
                [sys.executable, *arguments],
                cwd=folder,
                stdout=console,
                stderr=console,
                env={"RAY_ADDRESS": f"{HEAD}:{PORT}"},
            )

    @classmethod
    def train(cls, host: Host, recipe: str) -> HostRun:
        """Start `rl train RECIPE`, with its output beside the recipe."""
        folder = Path(recipe).parent
        out = folder / "out"
        arguments = ["-m", "rl_cli", "train", recipe, f"output_dir={out}"]
        return cls(host, arguments, folder, out / "stages" / "grpo")

    @property
    def console(self) -> str:
        return self._console.read_text()

    def log(self, name: str = "run") -> list[dict[str, Any]]:
        """Return the records of a log of `rl train`, in order."""
        return _records(self.stage.parents[1] / "logs" / f"{name}.jsonl")

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def steps(self) -> list[int]:
        """The steps that its metrics name, in order."""
        records = _records(self.stage / "metrics.jsonl")
        return [record["step"] for record in records if "step" in record]

    @property
    def step(self) -> int:
        """The last step that is done; -1: none."""
        return max(self.steps, default=-1)

    @property
    def is_saved(self) -> bool:
        """Whether it has a checkpoint."""
        return any((self.stage / "checkpoints").glob("step_*"))

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done; fail if the run ends before."""
        wait_until(lambda: self.is_over or self.step >= step, f"step {step}", STEP_S)
        assert self.step >= step, f"ended after step {self.step}\n{self.console}"

    def wait_for_checkpoint(self) -> None:
        """Wait until there is a checkpoint; fail if the run ends before."""
        wait_until(lambda: self.is_over or self.is_saved, "a checkpoint", STEP_S)
        assert not self.is_over, self.console

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Wait until so many lines of its log match; fail if the run ends before."""

        def has_come() -> bool:
            found = [re.search(pattern, record["message"]) for record in self.log()]
            return self.is_over or len(list(filter(None, found))) >= count

        try:
            wait_until(has_come, repr(pattern), STEP_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.console}") from None
        assert not self.is_over, self.console

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        (program,) = psutil.Process(self.process.pid).children()
        program.send_signal(signal.SIGINT)

    def end(self, deadline_s: float) -> int:
        """Wait for its end; return the exit status."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"did not end within {deadline_s:g} s\n{self.console}"
            ) from None


def _records(path: Path) -> list[dict[str, Any]]:
    found = []
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            # The last line may be half written.
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def final_weights(stage: Path, step: int) -> dict[str, bytes]:
    """Return the weights of a checkpoint as bytes, by name."""
    folder = stage / "checkpoints" / f"step_{step}" / "policy" / "weights"
    arrays = load_file(folder / "model.safetensors")
    return {name: array.tobytes() for name, array in arrays.items()}
