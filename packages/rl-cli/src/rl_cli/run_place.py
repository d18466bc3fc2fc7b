"""Where a run is going to be, found out before anything heavy is imported.

What is wrong with a folder is then said at once, and not after the libraries of the
training have been loaded, which takes many seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_cli.recipe_files import recipe_path
from rl_cli.run_folder import RunFolder, check_output_dir, check_writable
from rl_distributed.cluster.session_folder import check_session_folder
from rl_distributed.config import load_config, parse_overrides
from rl_distributed.errors import ConfigError
from rl_distributed.runs.folder import refuse_contradiction

__all__ = ["find_place", "given_output_dir"]


def find_place(
    name: str,
    config: Path | None,
    overrides: Sequence[str],
    resume: str | None,
    *,
    overwrite: bool = False,
) -> RunFolder | None:
    """Check the folders that a run needs.

    Args:
        name: Recipe or algorithm.
        config: YAML file of an algorithm.
        overrides: Overrides of keys.
        resume: None for a new run, "" for the newest of that name, else a folder.
        overwrite: A new run may delete the one that its folder holds.

    Returns:
        The folder of the run to resume, which this process owns then; None for a new
        run, which can be made where it is asked for.

    Raises:
        UserError: There is no run to resume, somebody else carries it out, or a folder
            cannot be written.
    """
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        check_session_folder()
    if overwrite and resume is not None:
        refuse_contradiction(overwrite=True, resumes=True, output_dir=None)
    if resume is not None:
        if config is not None:
            raise ConfigError(
                "--resume goes on with a run as it was configured: leave --config "
                f"({config}) away, or start a new run."
            )
        folder = RunFolder.find(name, resume)
        folder.source(name, overrides)
        folder.own()
        return folder
    path = recipe_path(name)
    if path is None:
        path = config
    data = load_config(path) if path is not None else {}
    given = given_output_dir(data, overrides)
    refuse_contradiction(overwrite=overwrite, resumes=False, output_dir=given)
    if given is not None:
        check_output_dir(given, overwrite=overwrite)
    else:
        check_writable(Path("runs"))
    return None


def given_output_dir(data: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Return the run folder that a user names; None: a new one below `runs`.

    Args:
        data: What a recipe or the file of an algorithm holds.
        overrides: Overrides of keys.

    Raises:
        ConfigError: An override is malformed.
    """
    found = data.get("output_dir")
    for override in parse_overrides(overrides):
        if override.path == ("output_dir",):
            found = None if override.action == "delete" else override.value
    return None if found is None else str(found)
