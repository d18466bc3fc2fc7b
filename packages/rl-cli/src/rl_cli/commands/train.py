"""`rl train`: train with a recipe or an algorithm's configuration."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

OVERRIDES_HELP = (
    "key=value changes a key, +key=value adds one to a mapping, ~key removes"
)


@click.command(
    context_settings={"ignore_unknown_options": False},
    short_help="Train with a recipe or an algorithm.",
)
@click.argument("name", metavar="RECIPE|ALGORITHM|PRESET")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the algorithm's configuration.",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[FOLDER]",
    help="Continue an interrupted run: the newest of this name, or the given folder.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Delete the run in output_dir, if there is one, and start over.",
)
@click.option(
    "--supervise",
    type=click.IntRange(min=1),
    metavar="N",
    help="Restart the run from its last checkpoint when it dies, at most N times in a "
    "row without new progress.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.pass_obj
def train(
    obj: dict[str, bool],
    name: str,
    overrides: tuple[str, ...],
    *,
    config: Path | None,
    resume: str | None,
    overwrite: bool,
    supervise: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train with a RECIPE (a name or a .yaml file), an ALGORITHM or a PRESET of one.

    KEY=VALUE changes a key of the configuration, +KEY=VALUE adds one to a mapping, ~KEY
    removes one. `rl config show NAME` lists them all. With --json the last line of
    standard output is one JSON object: measure, start, best, end, steps, wall_s,
    best_checkpoint and more, as in result.json.
    A run without output_dir gets a new folder runs/NAME-NNN. A named folder belongs to
    a single run: another command must continue it (--resume) or delete it
    (--overwrite), and is refused otherwise.
    With --supervise the run is a separate process. It is restarted after a crash, but
    not after a mistake in its configuration or a signal that stops it. If output_dir
    has the same run, unfinished, it is continued, so that the same command works for a
    job that its batch system restarts.

    \b
    Examples:
      rl train quickstart
      rl train quickstart seed=7 stages.grpo.grpo.num_prompts_per_step=32
      rl train quickstart --resume
      rl train quickstart output_dir=runs/mine --supervise 5
      rl train grpo --config my.yaml policy.model_name=path/to/model
      rl train dapo policy.model_name=model data.train=rows.jsonl env.name=math
      rl train sft policy.model_name=path/to/model data.train=rows.jsonl
    """
    if supervise is not None:
        from rl_cli import supervision  # noqa: PLC0415

        flags = {"--json": as_json, "--quiet": quiet, "--debug": obj["debug"]}
        run = supervision.SupervisedRun(
            name,
            config,
            overrides,
            resume=resume,
            overwrite=overwrite,
            flags=[flag for flag, is_set in flags.items() if is_set],
        )
        return supervision.supervise(
            run, supervise, lambda text: click.echo(text, err=True)
        )
    began_s = time.monotonic()
    from rl_algorithms.trainers.run.signals import SignalGuard  # noqa: PLC0415

    # Signals wait: an exception inside an import or the start of Ray leaves a mess.
    with SignalGuard() as guard:
        guard.hold()
        from rl_cli.run_place import find_place  # noqa: PLC0415

        found = find_place(name, config, overrides, resume, overwrite=overwrite)
        guard.raise_pending()
        from rl_cli.console import Terminal  # noqa: PLC0415

        terminal = Terminal(quiet=quiet)
        terminal.note(f"{name}: loading the libraries")
        from rl_cli.commands.train_run import run_and_report  # noqa: PLC0415

        summary = run_and_report(
            name,
            config,
            overrides,
            guard,
            found=found,
            overwrite=overwrite,
            terminal=terminal,
            as_json=as_json,
            debug=obj["debug"],
        )
    summary["wall_s"] = round(time.monotonic() - began_s, 2)
    if as_json:
        click.echo(json.dumps(summary))
    return 0
