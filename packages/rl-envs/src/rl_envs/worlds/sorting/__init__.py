"""Sorting digits: a small world with exact answers that are cheap to check."""

from __future__ import annotations

from rl_envs.worlds.sorting.environment import SortingConfig, SortingEnvironment
from rl_envs.worlds.sorting.tasks import SortingTasks

__all__ = ["SortingConfig", "SortingEnvironment", "SortingTasks"]
