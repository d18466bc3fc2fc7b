"""What tasks and judges of Reasoning Gym ask its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rl_envs.limited_calls import Server

__all__ = ["COLUMNS", "SERVER", "TaskSpec", "read_task", "task_columns"]

TaskSpec: TypeAlias = dict[str, Any]
"""What a task is made of: `family`, `level`, `levels`, `settings` and `seed`."""

SERVER = Server(
    Path(__file__).with_name("family_process.py"),
    "makes and scores tasks of Reasoning Gym",
    "environment 'reasoning_gym' needs the package reasoning-gym, which cannot be "
    "imported",
    "pip install 'rl-envs[reasoning-gym]'",
    # Several families draw from sets of texts, in an order that depends on it.
    {"PYTHONHASHSEED": "0"},
)
COLUMNS = ("family", "family_seed", "family_task", "question_digest")


def task_columns(task: TaskSpec, digest: str) -> dict[str, Any]:
    """Return the columns of a row that say how its task is made."""
    made = {key: value for key, value in task.items() if key not in ("family", "seed")}
    return {
        "family": task["family"],
        "family_seed": task["seed"],
        "family_task": json.dumps(made, sort_keys=True),
        "question_digest": digest,
    }


def read_task(columns: Mapping[str, Any]) -> TaskSpec | None:
    """Return what a row's task is made of; None: its columns do not say."""
    family, seed = columns.get("family"), columns.get("family_seed")
    text, digest = columns.get("family_task"), columns.get("question_digest")
    # Not isinstance: a bool would count as an int.
    if not isinstance(family, str) or type(seed) is not int:
        return None
    if not isinstance(text, str) or not isinstance(digest, str):
        return None
    try:
        made = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(made, dict) or set(made) != {"level", "levels", "settings"}:
        return None
    return {"family": family, "seed": seed, **made}
