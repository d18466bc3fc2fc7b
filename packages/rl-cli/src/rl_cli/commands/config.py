"""`rl config`: show and check the configuration of a run without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_cli.console import Terminal

if TYPE_CHECKING:
    from rl_cli.run_config import Run


@click.group()
def config() -> None:
    """Show, check or explain the configuration of a run.

    \b
    Examples:
      rl config show quickstart
      rl config validate grpo --config my.yaml policy.model_name=model
      rl config explain grpo policy.optimizer
      rl config schema grpo > grpo.schema.json
      rl config import their_grpo.yaml -o grpo.yaml
      rl config migrate their_script.py
    """


CONFIG_OPTION = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the algorithm's configuration.",
)


@config.command(short_help="Print the whole configuration.")
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
    """Print the whole configuration, including all defaults.

    A required key without a value is shown as ???.

    \b
    Examples:
      rl config show quickstart
      rl config show dapo
      rl config show quickstart --source > my.yaml
      rl config show dapo policy.model_name=model --json
    """
    from rl_cli.missing_keys import mark_required  # noqa: PLC0415
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


@config.command(short_help="Check a configuration like `rl train`.")
@click.argument("name", metavar="RECIPE|ALGORITHM|PRESET")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@CONFIG_OPTION
def validate(name: str, overrides: tuple[str, ...], path: Path | None) -> None:
    """Run the checks that `rl train` runs first; exits with 0 or, on failure, 2.

    These cover every key and value, the model folder, the data and its columns (the
    first 1,000 rows of a file), the environment or reward, batch sizes and lengths, and
    the run folder. Keys without an effect, because another one disables them, are
    listed.

    \b
    Examples:
      rl config validate quickstart seed=3
      rl config validate my-recipe.yaml
    """
    from rl_algorithms.trainers.settings.unused_keys import idle_lines  # noqa: PLC0415
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
    """Describe a run: a recipe with its stages, or an algorithm with its model."""
    if run.source["kind"] != "recipe":
        return run.title
    stages = (
        stage.name
        if stage.name == stage.algorithm
        else f"{stage.name} by {stage.algorithm}"
        for stage in run.stages
    )
    return f"{run.name} ({', then '.join(stages)})"


@config.command("import", short_help="Convert a NeMo RL recipe to a run file.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; default: print the run file.",
)
def import_recipe(file: Path, output: Path | None) -> None:
    """Convert a NeMo RL recipe, a YAML file with its `defaults`, to a run file.

    Every key that is dropped, or has a different value or meaning here, is listed with
    the reason. The result is checked; `rl train OUTPUT` runs it.

    \b
    Examples:
      rl config import their_grpo.yaml
      rl config import their_grpo.yaml -o grpo.yaml
    """
    from rl_cli.nemo_rl.recipe_import import import_recipe  # noqa: PLC0415
    from rl_cli.run_folder import to_yaml  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    # Before the import, which reads and checks the whole recipe.
    if output is not None and output.exists():
        raise ConfigError(f"{output} already exists; name another file, or delete it")
    imported = import_recipe(file)
    lines = [str(entry) for entry in imported.left_out]
    text = to_yaml(imported.run)
    head = "dropped, or different here:"
    if output is None:
        Terminal().raw(text.rstrip())
        # To standard error: standard output is the run file, and may be redirected.
        click.echo("\n".join([head, *(f"  {line}" for line in lines)]), err=True)
        return
    comments = "".join(f"#   {line}\n" for line in lines)
    written = f"# From {file.name} of NeMo RL; {head}\n{comments}{text}"
    try:
        output.write_text(written, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror or error}; name another file"
        ) from error
    terminal = Terminal()
    terminal.raw("\n".join([head, *(f"  {line}" for line in lines)]))
    terminal.raw(f"wrote {output}; check it with: rl config validate {output}")


@config.command(short_help="Rewrite the imports of a NeMo RL script.")
@click.argument("script", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--write", is_flag=True, help="Change the file; default: show a diff.")
@click.pass_context
def migrate(ctx: click.Context, script: Path, write: bool) -> None:
    """Rewrite the imports of a script written for NeMo RL.

    Names are imported from their place here, or from `rl_algorithms.compat.nemo_rl`
    with their old arguments; differences in behavior are listed. Exits with 1 if
    anything still needs nemo_rl, else with 0.

    \b
    Examples:
      rl config migrate train_my_way.py
      rl config migrate train_my_way.py --write
    """
    from rl_cli.nemo_rl.script_imports import rewrite_imports  # noqa: PLC0415

    result = rewrite_imports(script)
    terminal = Terminal()
    if result.before == result.after:
        terminal.raw(f"{script}: no import to rewrite")
    elif write:
        # As bytes: text mode would translate the line ends of the user's file.
        script.write_bytes(result.after.encode())
        terminal.raw(f"rewrote the imports of {script}")
    else:
        terminal.raw(result.diff().rstrip())
    for title, lines in (
        ("note:", result.notes),
        ("still needs nemo_rl:", result.remaining),
    ):
        if lines:
            click.echo("\n".join([title, *(f"  {line}" for line in lines)]), err=True)
    if result.remaining:
        ctx.exit(1)


@config.command(short_help="Explain a key, a section or every key.")
@click.argument("names", nargs=-1, required=True, metavar="[NAME] [KEY ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def explain(names: tuple[str, ...], as_json: bool) -> None:
    """Explain keys: type, limits, default, meaning, and the algorithms that have them.

    NAME is an algorithm, a preset or a recipe; alone, all of its keys are listed. KEY
    is a key or a whole section, given by its path or the end of its path.

    \b
    Examples:
      rl config explain grpo
      rl config explain grpo policy.optimizer
      rl config explain quickstart val_period
      rl config explain num_prompts_per_step
      rl config explain sft --json
    """
    from rl_cli.config_help import Explained, find_entries  # noqa: PLC0415

    entries = find_entries(names)
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps([entry.to_dict() for entry in entries]))
        return
    owners = {owner for entry in entries for owner in entry.owners}
    # Of no use where all keys belong to the one algorithm that was named.
    with_owners = len(owners) > 1 or names[0] not in owners
    terminal.result(Explained(entries, with_owners=with_owners))


@config.command(short_help="Print a JSON Schema for editors.")
@click.argument("name", metavar="recipe|RECIPE|ALGORITHM|PRESET")
def schema(name: str) -> None:
    """Print a JSON Schema that lets editors complete and check YAML files.

    Start a file with `# yaml-language-server: $schema=grpo.schema.json`.

    \b
    Examples:
      rl config schema grpo > grpo.schema.json
      rl config schema recipe > recipe.schema.json
    """
    from rl_cli.config_schema import schema_of  # noqa: PLC0415

    Terminal().raw(json.dumps(schema_of(name), indent=2))
