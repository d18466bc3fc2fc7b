"""`run.json` and `config.yaml`: the description of a run, for people and commands."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from rl_algorithms.trainers.run.machine import command_line, machine_facts
from rl_distributed.config.hidden_keys import hide_secrets
from rl_distributed.private_files import write_private_text
from rl_distributed.security.audit import audit_path

__all__ = ["RUN_RECORDS", "installed_versions", "write_run_record"]

RUN_RECORDS = ("run.json", "config.yaml")
"""Names of the two files."""
_PACKAGES = (
    "rl-distributed",
    "rl-envs",
    "rl-models",
    "rl-algorithms",
    "rl-cli",
    "ray",
    "torch",
    "transformers",
    "vllm",
)


def write_run_record(folder: Path, source: Mapping[str, Any]) -> None:
    """Write the description of a run into its folder, without secrets.

    The record adds to `source` the keys `hidden` (keys whose values are secrets),
    `started`, `versions`, `command`, `machine` and `audit_log` (a file or null).

    Args:
        folder: The folder of the run.
        source: `kind` (`trainer` for a run started from Python), `name`, `config`, and
            anything else needed to repeat the run.

    Raises:
        AuditError: `RL_AUDIT_LOG` names a file that cannot be written.
    """
    config, hidden = hide_secrets(source["config"])
    log = audit_path()
    record = {
        **source,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "command": command_line(),
        "machine": machine_facts(),
        "audit_log": None if log is None else str(log),
        "hidden": hidden,
        "config": config,
    }
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_private_text(folder / "config.yaml", text)
    write_private_text(folder / "run.json", json.dumps(record, indent=1) + "\n")


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            # Engines are optional.
            continue
    return found
