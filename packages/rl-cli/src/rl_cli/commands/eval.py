"""`rl eval`: evaluate a model on held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.options import LARGEST_SEED, Number, Whole

if TYPE_CHECKING:
    from rl_algorithms.evaluation import EvaluationResult

SHOWN = ("reward", "pass@", "cons@", "truncation_rate", "env/")


@click.command("eval", short_help="Evaluate a model on held-out prompts.")
@click.argument("model", metavar="MODEL|RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--data",
    "sources",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Prompts: a file, folder or hub name; may be repeated.",
)
@click.option("--env", metavar="NAME", help="Environment that scores the answers.")
@click.option("-n", "--num-generations", type=Whole(most=1_000_000),
              help="Answers per prompt; default 1.")  # fmt: skip
@click.option("-k", "ks", type=Whole(most=1_000_000), multiple=True,
              help="Report pass@K and cons@K; may be repeated.")  # fmt: skip
@click.option("--greedy/--sample", default=None,
              help="Default: greedy for one answer per prompt.")  # fmt: skip
@click.option("--temperature", type=Number(above=0),
              help="Sampling temperature; default 1, or the run's.")  # fmt: skip
@click.option(
    "--max-new-tokens", type=Whole(), help="Maximum answer length, in tokens."
)
@click.option("--max-samples", type=Whole(),
              help="Maximum number of prompts per dataset.")  # fmt: skip
@click.option("--seed", type=Whole(0, LARGEST_SEED),
              help="Seed of the samples; default 0.")  # fmt: skip
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file for the results and all answers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: str,
    overrides: tuple[str, ...],
    sources: tuple[str, ...],
    env: str | None,
    ks: tuple[int, ...],
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Evaluate MODEL, a model folder, hub name or checkpoint, or the folder of a RUN.

    A run stands for the best checkpoint of its last stage; its validation data,
    environment and sampling settings are used unless given. KEY=VALUE sets any key of
    the configuration: data.input_key, generation.top_p, env.settings.x, cluster...

    \b
    Examples:
      rl eval runs/quickstart-001
      rl eval runs/quickstart-001 -n 8 -k 1 -k 8 --temperature 0.7 --json
      rl eval path/to/model --data math=test.jsonl --env math -o result.json
      rl eval model --data a.jsonl --data b.jsonl --env sorting data.input_key=q
    """
    from rl_algorithms.evaluation.preflight import (  # noqa: PLC0415
        check_evaluation,
    )
    from rl_cli.console import Terminal  # noqa: PLC0415
    from rl_cli.eval_config import eval_config  # noqa: PLC0415
    from rl_cli.trained_model import model_of_run  # noqa: PLC0415
    from rl_distributed.logs import configure_logging  # noqa: PLC0415

    configure_logging("warning")
    target = model_of_run(model)
    # Without options that were not given: settings of the run or defaults hold there.
    given = {key: value for key, value in options.items() if value is not None}
    if ks:
        given["ks"] = list(ks)
    config = eval_config(target, sources, env, given, overrides)
    check_evaluation(config)
    terminal = Terminal(quiet=as_json)
    terminal.note(f"{target}: {', '.join(config.datasets)}")
    # Imported last, which takes seconds: mistakes are reported at once.
    from rl_algorithms.evaluation import evaluate as run  # noqa: PLC0415

    result = run(target, config=config, output=output)
    if as_json:
        terminal.raw(json.dumps(result.to_dict(samples=False), ensure_ascii=False))
    else:
        _show(terminal, result)
    if output is not None:
        terminal.note(f"written to {output}")
    return 0


def _show(terminal: Any, result: EvaluationResult) -> None:
    from rl_cli.console import table  # noqa: PLC0415

    rows: list[tuple[Any, ...]] = []
    for name, found in result.datasets.items():
        rows.append((name, "prompts", found.num_prompts, "", ""))
        rows.append((name, "answers per prompt", found.num_generations, "", ""))
        for key, value in found.metrics.items():
            # Bounds are shown in the row of their metric.
            if key.endswith(("_low", "_high")) or not key.startswith(SHOWN):
                continue
            ends = [found.metrics.get(f"{key}_{end}") for end in ("low", "high")]
            low, high = ("" if end is None else f"{end:.3g}" for end in ends)
            rows.append((name, key, f"{value:.4g}", low, high))
    columns = ["dataset", "metric", "value", "95 % from", "to"]
    terminal.result(table(f"Evaluation of {result.model}", columns, rows))
