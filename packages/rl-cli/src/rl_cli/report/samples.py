"""Held-out prompts with answers from before and after training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms.data.loading import load_sources
from rl_cli.run_config import Run
from rl_cli.run_folder import RunFolder
from rl_cli.run_stages import RunOutcome
from rl_cli.sampling import sample

__all__ = ["Answer", "answer"]


@dataclass(frozen=True)
class Answer:
    """One prompt, answered by the model before and after the last stage."""

    prompt: str
    before: str
    after: str
    expected: str | None


def answer(run: Run, folder: RunFolder, outcome: RunOutcome) -> list[Answer]:
    """Answer the first held-out prompts of the last stage, and write `samples.json`.

    Returns:
        The answers; [] if the last stage has no held-out prompts, does not sample, or
        there is no local model from before it.
    """
    if not run.report.num_samples:
        return []
    config = run.stages[-1].config
    before = _model_before(run, folder, outcome)
    source = config.data.validation
    generation = config.policy.generation
    if before is None or source is None or generation is None:
        return []
    first, *_ = load_sources(None, source)
    rows = list(first.first(run.report.num_samples).rows)
    key = config.data.input_key or "prompt"
    prompts = [row[key] for row in rows if isinstance(row.get(key), str)]
    # Only prompts that are texts can be shown.
    if len(prompts) < len(rows) or not prompts:
        return []
    texts = [
        # Greedy, so that the difference comes from the training and not from the draw.
        [s.response for s in sample(model, prompts, generation, greedy=True)]
        for model in (before, outcome.checkpoint)
    ]
    answers = [
        Answer(prompt, old, new, _expected(row, config.data.output_key))
        for prompt, old, new, row in zip(prompts, *texts, rows, strict=True)
    ]
    listed = {"samples": [dataclasses.asdict(found) for found in answers]}
    folder.write("samples.json", listed)
    return answers


def _model_before(run: Run, folder: RunFolder, outcome: RunOutcome) -> Path | None:
    if len(run.stages) > 1:
        return Path(outcome.stages[run.stages[-2].name]["model"])
    if run.model is not None:
        return folder.model
    path = Path(run.stages[0].config.policy.model_name)
    return path if path.is_dir() else None


def _expected(row: dict[str, Any], key: str | None) -> str | None:
    found = row.get(key or "answer")
    return found if isinstance(found, str) else None
