"""The event log of an asynchronous run: what it trained on, and of which weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["entries", "trained"]


def entries(log: Path) -> list[dict[str, Any]]:
    """Return settings and events of a log; a kill may have cut off its last line."""
    return [
        json.loads(line)
        for line in log.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def trained(
    log: Sequence[dict[str, Any]], before: int | None = None
) -> dict[int, list[tuple[int, int]]]:
    """Return each completed step's prompts, with the oldest version of their tokens.

    Steps whose weights were lost are left out.

    Args:
        log: What `entries` returns.
        before: Step from which on to leave out all; None for none.
    """
    versions: dict[int, int] = {}
    for group in (log[0]["state"] or {"groups": ()})["groups"]:
        for answer in filter(None, group.get("answers", ())):
            versions[answer["rows"]] = answer["oldest_version"]
    asked: dict[int, list[Any]] = {}
    done: dict[int, list[tuple[int, int]]] = {}
    for entry in log[1:]:
        event = entry["event"]
        if event["type"] == "Answered":
            versions[event["task"]] = event["oldest_version"]
        elif event["type"] == "TrainerReady" and event["incarnation"]:
            back_to = event["state"]["step"] if event["state"] else 0
            done = {step: done[step] for step in done if step < back_to}
        elif event["type"] == "StepTrained" and (
            before is None or event["step"] < before
        ):
            done[event["step"]] = [
                (number, min(versions[task] for task in rows))
                for number, rows in asked[event["step"]]
            ]
        for action in entry["actions"]:
            if action["type"] == "Train":
                # JSON turns a named tuple into a list: its number, its rows.
                asked[action["step"]] = action["groups"]
    return done
