"""Place of a recording in the folder of a run; it loads no torch."""

from __future__ import annotations

from pathlib import Path

__all__ = ["RECORDING", "STEPS", "has_recording"]

RECORDING = "recording"
"""Name of the folder in the run folder."""
STEPS = "steps.jsonl"
"""Name of the file of steps in it."""


def has_recording(run_dir: Path) -> bool:
    """Return whether a run has recorded what it trains on."""
    return (run_dir / RECORDING / STEPS).is_file()
