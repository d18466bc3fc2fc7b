"""`rl recipes`: list recipes and print their files."""

from __future__ import annotations

import json

import click

from rl_cli.console import Terminal, table


@click.group(invoke_without_command=True, short_help="List recipes, or print one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.pass_context
def recipes(ctx: click.Context, as_json: bool) -> None:
    """List the recipes with their algorithm, model, hardware and time.

    `rl plan NAME` estimates the memory of one, `rl config validate NAME` checks it and
    `rl train NAME` runs it. To change more than a few keys, copy its file.

    \b
    Examples:
      rl recipes
      rl recipes --json
      rl recipes show grpo-gsm8k > mine.yaml
    """
    if ctx.invoked_subcommand is not None:
        return
    from rl_cli.recipe_files import recipe_names, summarize  # noqa: PLC0415

    found = [summarize(name) for name in recipe_names()]
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps([recipe.to_dict() for recipe in found]))
        return
    columns = ["recipe", "algorithm", "model", "hardware", "time", "purpose"]
    rows = [tuple(recipe.to_dict().values()) for recipe in found]
    terminal.result(table("Recipes", columns, rows))


@recipes.command(short_help="Print the file of a recipe.")
@click.argument("name", metavar="RECIPE")
def show(name: str) -> None:
    """Print the file of a recipe as written, including comments.

    `rl config show RECIPE` prints it with all defaults instead.

    \b
    Examples:
      rl recipes show quickstart
      rl recipes show dapo-math-7b > mine.yaml
    """
    from rl_cli.recipe_files import found_recipe  # noqa: PLC0415

    Terminal().raw(found_recipe(name).read_text(encoding="utf-8").rstrip())
