"""`rl plan`: estimate the memory and layout of a run before starting it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rl_cli.commands.config import CONFIG_OPTION
from rl_cli.console import Terminal
from rl_cli.gpus import Gpus, GpusType
from rl_cli.options import Whole


@click.command(short_help="Estimate the memory and layout of a run.")
@click.argument("name", metavar="RECIPE|ALGORITHM|PRESET")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@CONFIG_OPTION
@click.option(
    "--gpus",
    type=GpusType(),
    metavar="[NODESx]GPUSxMEMORY",
    help="GPUs to plan for, such as 8x80GB; default: those named by the recipe, or "
    "else the section cluster with any memory.",
)
@click.option(
    "--generator-gpus",
    type=Whole(0, 1 << 16),
    metavar="N",
    help="Number of GPUs that only sample; default: those of the section "
    "generation_cluster, or none, and all train and sample in turn.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    name: str,
    overrides: tuple[str, ...],
    path: Path | None,
    gpus: Gpus | None,
    generator_gpus: int | None,
    as_json: bool,
) -> int:
    """Estimate a run's memory by phase, its batches, and the layouts that fit.

    Only configurations and the model's config.json are read, not the weights: a folder
    with just that file is enough. No GPU is needed. Exits with 2 if a size is not
    divisible, or if the run does not fit into the planned GPUs.

    \b
    Examples:
      rl plan quickstart
      rl plan dapo-math-7b
      rl plan grpo policy.model_name=path/to/model --gpus 8x80GB
      rl plan sft policy.model_name=path policy.parallelism.tensor=2 --gpus 2x80GB
      rl plan my-recipe.yaml --gpus 2x8x80GB --json
    """
    from rl_cli.plan_run import plan_run  # noqa: PLC0415
    from rl_cli.plan_tables import print_stage, stage_to_dict  # noqa: PLC0415
    from rl_cli.run_config import load_run  # noqa: PLC0415

    # Not complete: memory depends on no data, reward or folder that is still unset.
    run = load_run(name, path, overrides, complete=False)
    gpus = gpus or run.about.planned_for
    found = plan_run(run, gpus, generator_gpus)
    terminal = Terminal()
    if as_json:
        stages = [stage_to_dict(p.plan, p.layouts, p.remedies) for p in found]
        known = None if gpus is None else all(stage["fits"] for stage in stages)
        can_run = not any(stage["cannot_run"] for stage in stages)
        fits = known if can_run else False
        terminal.raw(json.dumps({"name": run.name, "fits": fits, "stages": stages}))
    else:
        for one in found:
            print_stage(terminal, one.plan, one.layouts, one.remedies)
    failing = [p.plan for p in found if p.plan.fits is False or p.plan.layout.missing]
    if failing:
        click.echo(f"Error: {failing[0].refusal()}", err=True)
        return 2
    return 0
