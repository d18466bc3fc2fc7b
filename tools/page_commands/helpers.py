"""Processes beside the commands of a page: a run to control, a server to query."""

from __future__ import annotations

import json
import re
import shlex
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from tools.page_commands.kit import GRPO, SMALL, SORTING
from tools.page_commands.pages import ROOT, block
from tools.page_commands.processes import CommandError, ShellCommand

__all__ = ["HELPERS", "Shell"]

START_S = 240.0
LONG = f"{GRPO} {SMALL} grpo.max_num_steps=100000 output_dir=runs/grpo-001"


class Shell(Protocol):
    """Where a page's commands run."""

    folder: Path

    def start(self, line: str) -> ShellCommand:
        """Start a command that continues beside others."""

    def run(self, line: str, deadline_s: float = START_S) -> str:
        """Run a command to completion, and return its output."""


def run_in_progress(shell: Shell) -> dict[str, str]:
    """Train until stopped."""
    _train(shell, LONG)
    return {}


def run_with_control(shell: Shell) -> dict[str, str]:
    """Train a run that listens, with an operator's key."""
    made = shell.run("rl keys create --name trainer --role operator")
    key = re.search(r"rlk_\S+", made)
    if key is None:
        raise CommandError(f"no key in {made!r}")
    control = {
        "host": "0.0.0.0",
        "port": free_port(),
        "keys_file": "~/.config/rl/keys.json",
        "tls": True,
    }
    _train(shell, f"{LONG} control={shlex.quote(json.dumps(control))}")
    said = json.loads((shell.folder / "runs/grpo-001/control.json").read_text())
    address = re.sub(r"//[^:]+:", "//127.0.0.1:", said["url"])
    return {"address": address, "key": key[0]}


def served_model(shell: Shell) -> dict[str, str]:
    """Serve a chat model, with the key in a file."""
    (shell.folder / "key.txt").write_text("secret\n")
    server = shell.start(
        "RL_API_KEY=secret rl serve path/to/model --name my-model --port 0"
    )
    return {"address": server.wait_for(r"http://[\d.]+:\d+", START_S)[0]}


def openenv_server(shell: Shell) -> dict[str, str]:
    """Start the server shown on the page."""
    said = shell.run('rl env build "rl-envs[openenv-server]" --json', 1_200)
    # Progress precedes the list.
    (built,) = json.loads(said.splitlines()[-1])
    port = free_port()
    python = Path(built["path"]) / "bin" / "python"
    server = shell.start(f"{python} {ROOT}/examples/openenv_sums.py {port}")
    server.wait_until(lambda: _listens(port), f"server at port {port}", START_S)
    return {"address": f"http://127.0.0.1:{port}"}


def shared_folder(shell: Shell) -> dict[str, str]:
    """Create the folder that trainer and server share, and its configuration."""
    port = str(free_port())
    (shell.folder / "shared" / "run").mkdir(parents=True)
    shown = block("docs/guides/servers.md", "yaml")
    shown = shown.replace(":8000", f":{port}").replace(
        "/shared", f"{shell.folder}/shared"
    )
    (shell.folder / "grpo.yaml").write_text(f"{shown}{SORTING}")
    return {"port": port}


def _train(shell: Shell, line: str) -> None:
    run = shell.start(line)
    metrics = shell.folder / "runs/grpo-001/metrics.jsonl"
    run.wait_until(
        lambda: metrics.is_file() and metrics.read_text().count("\n") > 2,
        "two steps",
        START_S,
    )


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


HELPERS: Mapping[str, tuple[str, Callable[[Shell], dict[str, str]]]] = {
    "docs/guides/live-updates.md": ("rl ctl", run_in_progress),
    "docs/guides/sharing.md": ("rl watch|rl ctl", run_with_control),
    "docs/guides/test-environments.md": ("--address", served_model),
    "docs/guides/openenv.md": ("address=", openenv_server),
    "docs/guides/servers.md": ("rl serve", shared_folder),
}
"""What to start before the first command of a page that matches a pattern."""
