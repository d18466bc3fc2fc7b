"""A run on simulated nodes that come, are lost, and come again; prints what it did.

python elastic_run.py FOLDER RECIPE
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = "0123456789abcdef0123456789abcdef"
sys.path.append(str(Path(__file__).parents[1] / "packages/rl-distributed/tests"))

from rl_distributed_simulated import NODE, QUICK, simulated_nodes

DEADLINE_S = 240.0


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition and return what it found."""
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited in vain for {what}")
        pause.wait(0.1)
    return found


class Run:
    """`rl train` on a cluster that is there."""

    def __init__(self, recipe: str, folder: Path, address: str) -> None:
        self.stage = folder / "out" / "stages" / "grpo"
        self._log_path = folder / "out" / "logs" / "run.jsonl"
        self._console = folder / "console"
        command = [sys.executable, "-m", "rl_cli", "train", recipe]
        with self._console.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"output_dir={folder / 'out'}"],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "RAY_ADDRESS": address},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text() if self._log_path.exists() else ""

    @property
    def console(self) -> str:
        return self._console.read_text()

    def steps(self) -> list[int]:
        """The steps that its metrics name, in their order."""
        path = self.stage / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row["step"] for row in map(json.loads, lines) if "step" in row]

    def wait_for(self, words: str, count: int = 1) -> None:
        """Wait until its log has words so many times."""

        def is_there() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run has ended:\n{self.console}")
            return self.log.count(words) >= count

        wait_until(is_there, words)

    def wait_for_steps(self, more: int) -> int:
        """Wait for further steps; return the last."""
        before = max(self.steps(), default=0)
        wait_until(
            lambda: (
                self.process.poll() is not None
                or max(self.steps(), default=0) >= before + more
            ),
            f"{more} steps after {before}",
        )
        return max(self.steps(), default=0)


def main(folder: Path, recipe: str) -> None:
    cluster, _ = simulated_nodes({**NODE, "_system_config": QUICK})
    found: dict[str, Any] = {}
    run = Run(recipe, folder, cluster.address)
    try:
        run.wait_for("training goes on with 1 of 2 ranks")
        found["alone"] = run.wait_for_steps(3)
        second = cluster.add_node(**NODE)
        run.wait_for("nodes have come: more workers train from here on")
        run.wait_for("generation replica 1 is back")
        found["grown"] = run.wait_for_steps(4)
        os.kill(second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        run.wait_for("training workers are lost in step")
        found["shrunk"] = run.wait_for_steps(4)
        cluster.add_node(**NODE)
        run.wait_for("nodes have come: more workers train from here on", 2)
        found["grown_again"] = run.wait_for_steps(3)
        run.process.send_signal(signal.SIGINT)
        found["code"] = run.process.wait(DEADLINE_S)
        found["steps"] = run.steps()
        found["log"], found["console"] = run.log, run.console
    finally:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            sys.stderr.write(run.console)
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
