"""The folder of a run, determined before anything heavy is imported.

Problems with a folder are then reported at once, rather than after loading the training
libraries, which takes many seconds.
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
        overwrite: Allow a new run to delete the one in its folder.

    Returns:
        The folder of the run to resume, now owned by this process; None for a new run,
        whose folder can be created.

    Raises:
        UserError: There is no run to resume, another process owns it, or a folder
            cannot be written.
    """
    # With another address the session belongs to a cluster that runs already.
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        check_session_folder()
    if overwrite and resume is not None:
        refuse_contradiction(overwrite=True, resumes=True, output_dir=None)
    if resume is not None:
        if config is not None:
            raise ConfigError(
                "--resume continues a run with its original configuration: drop "
                f"--config ({config}), or start a new run."
            )
        folder = RunFolder.find(name, resume)
        folder.source(name, overrides)
        # Last: a refused command must not hold the folder.
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
    """Return the run folder named by the user; None: a new one in `runs`.

    Args:
        data: Contents of a recipe or of an algorithm's file.
        overrides: Overrides of keys.

    Raises:
        ConfigError: An override is malformed.
    """
    found = data.get("output_dir")
    for override in parse_overrides(overrides):
        if override.path == ("output_dir",):
            found = None if override.action == "delete" else override.value
    return None if found is None else str(found)
