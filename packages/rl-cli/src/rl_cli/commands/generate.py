"""`rl generate`: sample answers from a model."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from rl_cli.options import LARGEST_SEED, Number, Whole

_LONGEST_ANSWER = 128


@click.command()
@click.argument("model", metavar="MODEL|RUN")
@click.argument("prompts", nargs=-1, metavar="[PROMPT ...]")
@click.option(
    "--file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Text file with one prompt per line.",
)
@click.option("-n", "--num-samples", type=Whole(most=1_000_000), default=1,
              show_default=True, help="Answers per prompt.")  # fmt: skip
@click.option("--max-new-tokens", type=Whole(),
              help="Maximum answer length, in tokens; default: that of the run which "
              "trained the model, else 128, or the rest of the model's context.",
              )  # fmt: skip
@click.option("--greedy", is_flag=True, help="Pick the most probable tokens.")
@click.option("--temperature", type=Number(above=0), default=1.0, show_default=True,
              help="Sampling temperature.")  # fmt: skip
@click.option("--top-p", type=Number(above=0, most=1), default=1.0, show_default=True,
              help="Sample from the most probable tokens up to this total "
              "probability.")  # fmt: skip
@click.option("--top-k", type=Whole(),
              help="Sample from this number of most probable tokens; default: all.",
              )  # fmt: skip
@click.option(
    "--stop", multiple=True, help="String that stops an answer; may be repeated."
)
@click.option("--seed", type=Whole(0, LARGEST_SEED), default=0, show_default=True,
              help="Seed of the samples.")  # fmt: skip
@click.option("--chat/--no-chat", default=None,
              help="Use the chat template; default: if one exists.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    file: Path | None,
    num_samples: int,
    max_new_tokens: int | None,
    greedy: bool,
    chat: bool | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Sample answers from MODEL, a folder or hub name, or from the model of a RUN.

    Prompts come from the arguments, from --file, or from standard input, one per line.
    MODEL may be a checkpoint of a run (its folder `policy/weights`, or the checkpoint).
    RUN, the folder of a run, stands for the best checkpoint of its last stage.

    \b
    Examples:
      rl generate runs/quickstart-001 "314159=" --greedy
      rl generate model "Say hello." -n 4 --temperature 0.7
      cat prompts.txt | rl generate model --json
    """
    from rl_cli.trained_model import weights_of_run  # noqa: PLC0415
    from rl_models import GenerationConfig  # noqa: PLC0415
    from rl_models.checkpoint.hub import check_model  # noqa: PLC0415

    texts = _prompts(prompts, file)
    folder = weights_of_run(model)
    sampling["stop_strings"] = list(sampling.pop("stop")) or None
    # Without the option `sample` shortens this to the rest of the model's context. A
    # model that has learned within a limit need not have learned to stop.
    longest = max_new_tokens or _trained_length(folder) or _LONGEST_ANSWER
    sampling["max_new_tokens"] = longest
    config = GenerationConfig.from_dict(sampling, source="the command line")
    check_model(folder)
    # Imported last, which takes seconds: mistakes are reported at once.
    from rl_cli.console import Terminal  # noqa: PLC0415
    from rl_distributed.process.gc_pause import gc_paused  # noqa: PLC0415

    # Imports create many long-lived objects; collecting meanwhile only costs time.
    with gc_paused():
        from rl_cli.sampling import sample  # noqa: PLC0415

    answers = sample(folder, texts, config, greedy=greedy,
                     num_samples=num_samples, chat=chat,
                     shorten=max_new_tokens is None)  # fmt: skip
    terminal = Terminal()
    for answer in answers:
        if as_json:
            terminal.raw(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
        # With one prompt, a column of prompts would only repeat it.
        elif len(texts) == 1:
            terminal.raw(answer.response)
        else:
            terminal.raw(f"{answer.prompt}\t{answer.response}")


def _prompts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    if prompts and file is not None:
        raise click.UsageError("Give prompts as arguments or in --file, not both.")
    if prompts:
        return list(prompts)
    if file is None and sys.stdin.isatty():
        raise click.UsageError("Give a prompt, --file, or prompts on standard input.")
    try:
        text = sys.stdin.read() if file is None else file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        place = "Standard input" if file is None else str(file)
        raise click.UsageError(f"{place} is not text in UTF-8: {error}.") from error
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise click.UsageError("There is no prompt: the input has only empty lines.")
    return found


def _trained_length(folder: str) -> int | None:
    """Return the longest answer of the run that saved a checkpoint; None: not known."""
    from rl_distributed.config import load_config  # noqa: PLC0415

    weights = Path(folder)
    path = weights.parent.parent / "config.yaml"
    if weights.parts[-2:] != ("policy", "weights") or not path.is_file():
        return None
    # Runs without sampling, such as SFT, have no section `generation`.
    generation = (load_config(path).get("policy") or {}).get("generation") or {}
    return generation.get("max_new_tokens")
