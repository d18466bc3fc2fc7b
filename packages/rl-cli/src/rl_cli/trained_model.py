"""Which weights the folder of a run stands for."""

from __future__ import annotations

from pathlib import Path

from rl_distributed.errors import ConfigError

__all__ = ["model_of_run"]


def model_of_run(name: str) -> str:
    """Return what to evaluate: of a run's folder, the last stage that has weights.

    A stage that has ended is worth its best checkpoint; one that was interrupted is
    worth what it has saved.

    Raises:
        ConfigError: The run has trained nothing yet.
    """
    path = Path(name).expanduser()
    if not (path / "run.json").is_file():
        return name
    # What only names a model is found without these.
    from rl_cli.run_config import run_from_dict  # noqa: PLC0415
    from rl_cli.run_folder import RunFolder  # noqa: PLC0415

    folder = RunFolder(path)
    source = folder.read("run.json")
    if source["kind"] == "trainer":
        return name
    for stage in reversed(run_from_dict(source).stages):
        result = folder.stage_result(stage.name)
        if result is not None:
            return str(result["checkpoint"])
        if any((folder.stage(stage.name) / "checkpoints").glob("step_*")):
            return str(folder.stage(stage.name))
    raise ConfigError(f"the run {name!r} has no checkpoint yet: it was not trained")
