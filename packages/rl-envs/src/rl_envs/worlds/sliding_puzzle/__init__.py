"""The sliding puzzle, with many turns and exact distances to the goal."""

from __future__ import annotations

from rl_envs.worlds.sliding_puzzle.environment import (
    SlidingPuzzleConfig,
    SlidingPuzzleEnvironment,
)
from rl_envs.worlds.sliding_puzzle.tasks import SlidingPuzzleTasks

__all__ = ["SlidingPuzzleConfig", "SlidingPuzzleEnvironment", "SlidingPuzzleTasks"]
