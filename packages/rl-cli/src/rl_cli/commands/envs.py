"""`rl envs`: list, test, play and measure environments."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.options import LARGEST_SEED, Number, Whole

if TYPE_CHECKING:
    from rl_cli.environment_choice import GivenTasks
    from rl_envs.catalog import CatalogEntry
    from rl_envs.testing import Finding

NAME = click.argument("environment", metavar="NAME|FILE.py:NAME")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with settings; those of the task source are under `tasks`.",
)
DATA = click.option(
    "--data", metavar="FILE", help="Rows to use instead of tasks of a task source."
)
PROMPT = click.option(
    "--prompt", "prompt_column", metavar="COLUMN",
    help="Column of --data with the prompt; default: prompt, question, messages or "
    "another usual name, as in training.",
)  # fmt: skip
WORLD = click.option(
    "--world",
    metavar="NAME|FILE.py:CLASS",
    help="Task source; default: the one with the environment's name.",
)
SEED = click.option("--seed", type=Whole(0, LARGEST_SEED - 1), default=0,
                    show_default=True, help="Seed of the tasks.")  # fmt: skip
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def envs() -> None:
    """List, test, play or measure the environments that score answers.

    A NAME is one of `rl envs list`, or a class or reward function in a Python file. For
    the Python environments of actors, see `rl env`.

    \b
    Examples:
      rl envs list
      rl envs check countdown
      rl envs check my_env.py:MyEnvironment --data rows.jsonl
    """


@envs.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def list_(as_json: bool) -> None:
    """List all environments, including those of other packages.

    Environments that cannot be imported are listed with the reason.

    \b
    Examples:
      rl envs list
      rl envs list --json
    """
    from rl_distributed.extras import leave_torch_out  # noqa: PLC0415
    from rl_envs.catalog import list_environments  # noqa: PLC0415

    leave_torch_out()
    entries = list_environments()
    sandbox = _sandbox_level() if any(each.runs_programs for each in entries) else ""
    if as_json:
        _print_json([{**dataclasses.asdict(each),
                      "sandbox": sandbox if each.runs_programs else ""}
                     for each in entries])  # fmt: skip
        return
    from rl_cli.console import Terminal, table  # noqa: PLC0415

    columns = ["name", "package", "tasks", "turns", "needs", "sandbox", "description"]
    rows = [_cells(each, sandbox) for each in entries]
    Terminal().result(table("Environments", columns, rows))


def _cells(entry: CatalogEntry, sandbox: str) -> tuple[str, ...]:
    state = "" if entry.extra_installed else " (missing)"
    if state and entry.builds_its_extra:
        state = " (installed when first used)"
    return (
        entry.name,
        entry.package,
        "yes" if entry.makes_tasks else "no",
        entry.turns or "unknown",
        entry.extra + state,
        sandbox if entry.runs_programs else "",
        f"broken: {entry.problem}" if entry.problem else entry.description,
    )


def _sandbox_level() -> str:
    """Return the name of the sandbox level available here, or why there is none."""
    from rl_envs.errors import SandboxError  # noqa: PLC0415
    from rl_envs.sandbox import reachable_level  # noqa: PLC0415

    try:
        return reachable_level().name.lower()
    except SandboxError as error:
        return f"none: {error}"


@envs.command(short_help="Test an environment and its tasks.")
@NAME
@OVERRIDES
@CONFIG
@DATA
@PROMPT
@WORLD
@click.option("--tasks", "num_tasks", type=Whole(most=100_000), default=32,
              show_default=True, help="Number of tasks or rows.")  # fmt: skip
@SEED
@click.option("--gold", metavar="COLUMN",
              help="Column with a right answer; default: answer or ground_truth.",
              )  # fmt: skip
@click.option("--full-reward", type=float, default=1.0, show_default=True,
              help="Minimum reward of a right answer.")  # fmt: skip
@click.option("--max-accepted", type=Number(most=1), default=0.05, show_default=True,
              help="Maximum share of gold answers with one changed character that may "
              "be right, too.")  # fmt: skip
@click.option("--max-row-s", type=Number(above=0), default=1.0, show_default=True,
              help="Maximum mean time per row, in seconds.")  # fmt: skip
@click.option("--chance", is_flag=True, help="Random by design: results may differ.")
@click.option("--allow-unscored", is_flag=True, help="Allow NaN rewards.")
@JSON
def check(
    environment: str,
    overrides: tuple[str, ...],
    config: Path | None,
    data: str | None,
    prompt_column: str | None,
    world: str | None,
    num_tasks: int,
    as_json: bool,
    **limits: Any,
) -> int:
    """Test that an environment reliably rewards right answers, and only those.

    Right and wrong answers to tasks are scored: gold answers, empty ones, garbage, the
    prompt, and gold answers with one character changed; then again in other orders and
    batches, and in another process. KEY=VALUE sets a key of the environment,
    tasks.KEY=VALUE one of the task source. Exits with 0 if all checks pass, with 1
    otherwise.

    \b
    Examples:
      rl envs check countdown
      rl envs check sorting tasks.num_digits=4 --tasks 100 --seed 7
      rl envs check my_env.py:MyEnvironment --world my_env.py:MyTasks
      rl envs check my_reward.py --data rows.jsonl --json
    """
    from rl_cli.environment_choice import choose_environment  # noqa: PLC0415
    from rl_distributed.extras import leave_torch_out  # noqa: PLC0415
    from rl_envs.testing import (  # noqa: PLC0415
        Examination,
        examine_environment,
        examine_tasks,
    )

    leave_torch_out()
    chosen = choose_environment(
        environment,
        config=config,
        overrides=overrides,
        world=world,
        data=data,
        prompt_column=prompt_column,
    )
    seed = limits["seed"]
    examination = Examination(
        seed=seed,
        gold_column=limits["gold"],
        full_reward=limits["full_reward"],
        max_accepted_changes=limits["max_accepted"],
        max_row_s=limits["max_row_s"],
        deterministic=not limits["chance"],
        allow_unscored=limits["allow_unscored"],
    )
    tasks = chosen.held_out(num_tasks, seed)
    findings = []
    if data is None and chosen.make_source is not None:
        findings += examine_tasks(chosen.make_source, num_tasks, seed=seed)
    findings += examine_environment(
        chosen.spec, tasks.rows, examination, prompts=tasks.prompts
    )
    passed = all(finding.status != "fail" for finding in findings)
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        _print_json({"environment": environment, "passed": passed, "checks": listed})
    else:
        _show_findings(environment, findings, tasks)
    return 0 if passed else 1


@envs.command(short_help="Answer tasks in the terminal.")
@NAME
@OVERRIDES
@CONFIG
@DATA
@PROMPT
@WORLD
@click.option("--tasks", "num_tasks", type=Whole(most=100_000), default=5,
              show_default=True, help="Number of tasks.")  # fmt: skip
@SEED
@click.option("--show-answer", is_flag=True, help="Show the gold answer afterwards.")
@click.option("--one-line/--lines", default=None,
              help="Each line is an answer, or an empty line ends it; default: lines "
              "where the gold answer has several, or answers are programs.",
              )  # fmt: skip
@click.option("--max-turns", type=Whole(most=100_000), default=50, show_default=True,
              help="Most answers in a conversation.")  # fmt: skip
@click.option("--full-reward", type=float, default=1.0, show_default=True,
              help="Minimum reward of a right answer.")  # fmt: skip
def play(
    environment: str,
    overrides: tuple[str, ...],
    config: Path | None,
    data: str | None,
    prompt_column: str | None,
    world: str | None,
    num_tasks: int,
    seed: int,
    **manner: Any,
) -> None:
    """Answer tasks of an environment yourself, to see what a policy sees.

    The prompt is shown, then each answer is scored, until the conversation ends. An
    answer of several lines ends with an empty line. Answers may be piped in; the
    session ends with the input.

    \b
    Examples:
      rl envs play countdown --show-answer
      rl envs play sorting tasks.num_digits=3 --tasks 10
      rl envs play my_reward.py --data rows.jsonl
      cat answers.txt | rl envs play countdown --seed 7
    """
    from rl_cli.console import Terminal  # noqa: PLC0415
    from rl_cli.environment_choice import choose_environment  # noqa: PLC0415
    from rl_cli.environment_player import EnvironmentPlayer  # noqa: PLC0415
    from rl_distributed.extras import leave_torch_out  # noqa: PLC0415

    leave_torch_out()
    chosen = choose_environment(
        environment,
        config=config,
        overrides=overrides,
        world=world,
        data=data,
        prompt_column=prompt_column,
    )
    tasks = chosen.held_out(num_tasks, seed)
    env = chosen.spec.make()
    terminal = Terminal()
    try:
        score = EnvironmentPlayer(env, terminal, sys.stdin, **manner).play(tasks)
    # An environment may have started processes, also where playing it failed.
    finally:
        env.shutdown()
    terminal.raw(f"score: {score}")


@envs.command(short_help="Measure a model on tasks of an environment.")
@NAME
@OVERRIDES
@click.option("--model", metavar="FOLDER|RUN",
              help="Model folder, hub name, checkpoint or run to measure.",
              )  # fmt: skip
@click.option("--address", metavar="URL",
              help="Chat completions server to measure instead.")  # fmt: skip
@click.option("--served-model", metavar="NAME",
              help="The server's name of the model.")  # fmt: skip
@click.option("--key-file", type=click.Path(path_type=Path, dir_okay=False),
              help="File with the server's API key.")  # fmt: skip
@CONFIG
@DATA
@PROMPT
@WORLD
@click.option("--tasks", "num_tasks", type=Whole(most=1_000_000), default=64,
              show_default=True, help="Number of held-out tasks.")  # fmt: skip
@click.option("-n", "--num-generations", type=Whole(most=1_000_000), default=1,
              show_default=True, help="Answers per task.")  # fmt: skip
@click.option("--temperature", type=Number(above=0), default=1.0, show_default=True,
              help="Sampling temperature.")  # fmt: skip
@click.option("--max-new-tokens", type=Whole(), default=256, show_default=True,
              help="Maximum answer length in tokens.")  # fmt: skip
@click.option("--max-turns", type=Whole(most=100_000),
              help="Maximum number of answers per conversation; default: 1 for "
              "single-turn environments, else 10.")  # fmt: skip
@click.option("--full-reward", type=float, default=1.0, show_default=True,
              help="Minimum reward of a right answer.")  # fmt: skip
@click.option("--deadline-s", type=Number(above=0), default=120.0, show_default=True,
              help="Time limit of a request to the server, in seconds.")  # fmt: skip
@SEED
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
              help="File for the conversations, one JSON object per line.",
              )  # fmt: skip
@JSON
def run(environment: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Measure a model on held-out tasks: rewards, pass@k, length and time.

    Either a model folder is measured, as in `rl eval`, or a server. KEY=VALUE sets a
    key of the environment, tasks.KEY=VALUE one of the task source.

    \b
    Examples:
      rl envs run countdown --model runs/quickstart-001
      rl envs run sorting tasks.num_digits=4 --model path/to/model -n 8 --json
      rl envs run math --data problems.jsonl --address http://127.0.0.1:8000 \\
        --served-model my-model --key-file key.txt -o conversations.jsonl
    """
    from rl_cli.environment_measure import measure  # noqa: PLC0415

    measured = measure(environment, overrides, options)
    if options["output"] is not None:
        measured.save(options["output"])
    if options["as_json"]:
        _print_json(measured.to_dict())
        return 0
    from rl_cli.console import Terminal, table  # noqa: PLC0415

    terminal = Terminal()
    title = f"{measured.model} on {environment}"
    terminal.result(table(title, ["metric", "value", "95 % from", "to"],
                          measured.rows()))  # fmt: skip
    if options["output"] is not None:
        terminal.note(f"written to {options['output']}")
    return 0


def _show_findings(name: str, findings: Sequence[Finding], tasks: GivenTasks) -> None:
    from rl_cli.console import Terminal, table  # noqa: PLC0415

    terminal = Terminal()
    cells = [(each.check, each.status, each.reason) for each in findings]
    columns = ["check", "result", "reason"]
    terminal.result(table(f"Checks of {name}", columns, cells))
    for each in findings:
        if each.status != "fail" or each.row is None or each.response is None:
            continue
        asked = tasks.prompts[each.row][-1].get("content")
        terminal.raw(f"{each.check}: row {each.row}")
        terminal.raw(f"  prompt:   {asked!r}")
        terminal.raw(f"  response: {each.response!r}")
    counts = [sum(f.status == s for f in findings) for s in ("pass", "fail", "skip")]
    terminal.raw("{} passed, {} failed, {} skipped".format(*counts))


def _print_json(value: Any) -> None:
    from rl_cli.console import Terminal  # noqa: PLC0415

    Terminal().raw(json.dumps(value, ensure_ascii=False))
