"""The model for which the folder of a run stands."""

from __future__ import annotations

from pathlib import Path

from rl_distributed.errors import ConfigError

__all__ = ["is_run", "model_of_run", "weights_of_run"]


def is_run(name: str) -> bool:
    """Return whether a name is the folder of a run."""
    return (Path(name).expanduser() / "run.json").is_file()


def model_of_run(name: str) -> str:
    """Return the model to evaluate; for a run's folder, that of its latest stage.

    A finished stage stands for its best checkpoint, an interrupted one for its newest.

    Raises:
        ConfigError: The run has trained nothing yet.
    """
    if not is_run(name):
        return name
    path = Path(name).expanduser()
    # Not needed for the name of a model, which is the usual case.
    from rl_cli.run_config import run_from_dict  # noqa: PLC0415
    from rl_cli.run_folder import RunFolder  # noqa: PLC0415

    folder = RunFolder(path)
    source = folder.read("run.json")
    # Runs from Python have no stages; the evaluation finds their checkpoints itself.
    if source["kind"] == "trainer":
        return name
    for stage in reversed(run_from_dict(source).stages):
        result = folder.stage_result(stage.name)
        if result is not None:
            return str(result["checkpoint"])
        # From the last stage back: the first with a checkpoint is where the run
        # stopped.
        if any((folder.stage(stage.name) / "checkpoints").glob("step_*")):
            return str(folder.stage(stage.name))
    raise ConfigError(f"the run {name!r} has no checkpoint yet: it was not trained")


def weights_of_run(name: str) -> str:
    """Return the model folder in the folder of a run or of a checkpoint.

    Any other folder, and the name of a model, is returned as it is.

    Raises:
        ConfigError: The run has trained nothing yet.
    """
    path = Path(model_of_run(name))
    steps = {
        int(number): folder
        for folder in path.glob("checkpoints/step_*")
        if (number := folder.name.removeprefix("step_")).isdigit()
    }
    # An unfinished stage: use its newest checkpoint.
    if steps:
        path = steps[max(steps)]
    inner = path / "policy" / "weights"
    if inner.is_dir():
        return str(inner)
    return str(path) if path.is_dir() else name
