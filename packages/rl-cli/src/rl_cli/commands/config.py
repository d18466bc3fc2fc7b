"""`rl config`: what a run would be, without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.console import Terminal, table

if TYPE_CHECKING:
    from rl_cli.run_config import Run
    from rl_distributed.config.explain import ConfigRow


@click.group()
def config() -> None:
    """Show, check or explain the configuration of a run.

    \b
    Examples:
      rl config show quickstart
      rl config validate grpo --config my.yaml policy.model_name=model
      rl config explain grpo
    """


CONFIG_OPTION = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the algorithm's configuration.",
)


@config.command()
@click.argument("name", metavar="RECIPE|ALGORITHM|PRESET")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@CONFIG_OPTION
@click.option("--source", is_flag=True, help="As written, before defaults are added.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(
    name: str,
    overrides: tuple[str, ...],
    path: Path | None,
    source: bool,
    as_json: bool,
) -> None:
    """Print the whole configuration, every default included.

    A key that is required and not set is shown as ???.

    \b
    Examples:
      rl config show quickstart
      rl config show dapo
      rl config show quickstart --source > my.yaml
      rl config show dapo policy.model_name=model --json
    """
    from rl_cli.required import mark_required  # noqa: PLC0415
    from rl_cli.run_config import load_run  # noqa: PLC0415
    from rl_cli.run_folder import to_yaml  # noqa: PLC0415

    run = load_run(name, path, overrides, complete=False)
    data = dict(run.source["config"])
    if run.source["kind"] == "recipe" and not source:
        data["common"] = {}
        data["stages"] = {
            stage.name: {"algorithm": stage.algorithm, **stage.config.to_dict()}
            for stage in run.stages
        }
    Terminal().raw(
        json.dumps(data) if as_json else mark_required(to_yaml(data)).rstrip()
    )


@config.command()
@click.argument("name", metavar="RECIPE|ALGORITHM|PRESET")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@CONFIG_OPTION
def validate(name: str, overrides: tuple[str, ...], path: Path | None) -> None:
    """Check all that `rl train` checks first; leaves with 0 or, if it fails, 2.

    That is every key and value, the model folder, the data with their columns (of a
    file the first 1,000 rows), what scores the answers, batch sizes and lengths, and
    the run folder. What is set although another key turns it off is named.

    \b
    Examples:
      rl config validate quickstart seed=3
      rl config validate my-recipe.yaml
    """
    from rl_algorithms.trainers.unread import idle_lines  # noqa: PLC0415
    from rl_cli.run_config import check_run, load_run  # noqa: PLC0415
    from rl_cli.run_place import find_place  # noqa: PLC0415

    find_place(name, path, overrides, None)
    run = load_run(name, path, overrides)
    check_run(run)
    terminal = Terminal()
    terminal.raw(f"{_described(run)} is valid")
    for stage in run.stages:
        for line in idle_lines(stage.config, stage.config.idle()):
            terminal.raw(f"{stage.name}: {line}")


def _described(run: Run) -> str:
    """Name a run: a recipe with its stages, or an algorithm with its model."""
    if run.source["kind"] != "recipe":
        return run.title
    stages = (
        stage.name
        if stage.name == stage.algorithm
        else f"{stage.name} by {stage.algorithm}"
        for stage in run.stages
    )
    return f"{run.name} ({', then '.join(stages)})"


@config.command()
@click.argument("algorithm")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def explain(algorithm: str, as_json: bool) -> None:
    """List every key of an algorithm or preset: its type, its default, its meaning.

    \b
    Examples:
      rl config explain grpo
      rl config explain dapo
      rl config explain sft --json
    """
    from rl_algorithms.registry import (  # noqa: PLC0415
        algorithm_settings,
        get_config_class,
    )
    from rl_distributed.config import explain_config  # noqa: PLC0415

    found = explain_config(get_config_class(algorithm))
    preset = algorithm_settings(algorithm)
    rows = [(row.path, row.type, _default(row, preset), row.doc) for row in found]
    terminal = Terminal()
    if as_json:
        names = ("path", "type", "default", "doc")
        terminal.raw(
            json.dumps([dict(zip(names, map(str, r), strict=True)) for r in rows])
        )
    else:
        terminal.result(table(algorithm, ["key", "type", "default", "meaning"], rows))


def _default(row: ConfigRow, preset: Mapping[str, Any]) -> str:
    """Return a key's default, that of the preset if it has one."""
    value: Any = preset
    for key in row.path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return row.default
        value = value[key]
    return row.default if isinstance(value, Mapping) else json.dumps(value)
