"""`rl diff`: show where two runs begin to differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rl_cli.console import Terminal
from rl_cli.options import Number
from rl_cli.run_diff.difference import PARTS, Rules


@click.command(short_help="Show where two runs begin to differ.")
@click.argument("first", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("second", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--tolerance", default=0.0, type=Number(),
              help="Largest difference of two numbers that counts as none, relative "
              "to the larger one, absolute below 1; default: 0, bitwise.")  # fmt: skip
@click.option("--ignore", "ignored", metavar="KEY", multiple=True,
              help="Key, metric, field of an answer or tensor to leave out; * is a "
              "wildcard, a section stands for its keys. Repeatable.")  # fmt: skip
@click.option("--skip", "skipped", metavar="PART", multiple=True,
              type=click.Choice(PARTS),
              help="Part not to compare: configuration, environment, data, events, "
              "answers, rows, metrics, checkpoints or length. Repeatable.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff(
    first: Path,
    second: Path,
    tolerance: float,
    ignored: tuple[str, ...],
    skipped: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show the first step and the first thing in which two runs differ.

    Compares what both RUN folders hold: configuration, versions and machine, data
    fingerprints, event logs of asynchronous training, kept answers, recorded training
    rows, metrics, and checkpoints with weights and training state. Times, rates and
    the load of the machine are left out, as no seed determines them; so are the folders
    of the runs and secrets. Runs may be in progress, failed or cut short.

    Exit codes: 0 the runs are the same, 1 they differ, 2 wrong input.

    \b
    Examples:
      rl diff runs/grpo-001 runs/grpo-002
      rl diff runs/grpo-001 runs/grpo-002 --tolerance 1e-5
      rl diff runs/a runs/b --ignore seed --ignore 'policy.generation'
      rl diff runs/a runs/b --skip checkpoints --json
    """
    from rl_cli.report.run_reader import read_run  # noqa: PLC0415
    from rl_cli.run_diff.run_comparison import compare_runs  # noqa: PLC0415
    from rl_cli.run_diff.text import comparison_text  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    runs = [read_run(folder) for folder in (first, second)]
    if first.resolve() == second.resolve():
        raise ConfigError(
            f"the two runs must be different folders: got {first} twice; `rl runs` "
            "lists those below runs/"
        )
    found = compare_runs(runs[0], runs[1], Rules(tolerance, ignored), skipped)
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps(found.to_dict()))
    else:
        terminal.raw(comparison_text(found))
    return 0 if found.is_same else 1
