"""The assumptions of the pages: a reader's models, rows, files and runs.

A file shown on a page is taken from there. A page gets the files that its commands
name, except those that they write.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.page_commands.pages import ROOT, PageCommand, block

from rl_models import ModelBuildConfig, build_model

__all__ = ["MADE_BY_PAGE", "RUNS", "SORTING", "give", "needed_runs", "write_kit"]

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MODELS = ("model", "base", "path/to/model", "path/to/student", "path/to/teacher",
          "path/or/hub-name")  # fmt: skip
NUM_ROWS = 600
"""More than one step of any algorithm with its defaults."""
GRPO = "rl train grpo policy.model_name=path/to/model data.train=prompts.jsonl"
SMALL = (
    "env.name=sorting policy.generation.max_new_tokens=8 grpo.num_prompts_per_step=8 "
    "grpo.num_generations_per_prompt=4 policy.train_global_batch_size=32"
)
RUNS: Mapping[str, str] = {
    "runs/quickstart-001": (
        "rl train quickstart stages.warmup.sft.max_num_steps=3 "
        "stages.grpo.grpo.max_num_steps=2 common.data.validation.tasks.num_rows=64"
    ),
    "runs/grpo-001": f"{GRPO} {SMALL} grpo.max_num_steps=3",
    "runs/grpo-002": f"{GRPO} {SMALL} grpo.max_num_steps=3 seed=1",
    "runs/a": f"{GRPO} {SMALL} grpo.max_num_steps=1 output_dir=runs/a",
    "runs/lora": (
        "rl train sft policy.model_name=base data.train=rows.jsonl policy.lora.r=4 "
        "sft.max_num_steps=1 output_dir=runs/lora"
    ),
}
"""The commands that make the runs, in this order."""
# The pages name a later step of these runs than a few seconds reach.
STEPS = {"runs/a": "step_100", "runs/lora": "step_100"}
MADE_BY_PAGE: Mapping[str, tuple[str, ...]] = {
    "README.md": ("runs",),
    "packages/rl-cli/README.md": ("runs",),
    "docs/index.md": ("runs",),
    "docs/get-started/first-run.md": ("runs",),
    "docs/guides/checkpoints.md": ("runs",),
    "docs/guides/checkpoint-layouts.md": ("model",),
    "docs/guides/live-updates.md": ("runs",),
    "docs/guides/migrate.md": ("grpo.yaml",),
    "docs/guides/recipes.md": ("mine.yaml",),
    "docs/guides/sharing.md": ("runs",),
}
"""Files written by a page's own commands, or by the helper beside them."""


def _rows(make: Callable[[int], dict[str, Any]], num_rows: int = NUM_ROWS) -> str:
    return "".join(json.dumps(make(number)) + "\n" for number in range(num_rows))


def _row(number: int) -> dict[str, Any]:
    # No prompt contains its answer: a check would find that it earns something.
    first = number + 100
    return {
        "prompt": f"{first}+5=",
        "answer": f"{first + 5}",
        "question": f"What is {first} plus 5?",
        "solution": f"{first + 5}",
        "topic": "sums",
    }


def _sorting(number: int) -> dict[str, Any]:
    digits = f"{number:04d}"
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def _pair(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}+1=", "chosen": f"{number + 1}", "rejected": "0"}


def _problem(number: int) -> dict[str, Any]:
    # "{number} + 2" would be a correct answer, and a check would find it.
    problem = f"Which number is two more than {number}?"
    return {"problem": problem, "answer": f"{number + 2}"}


def _gsm8k(number: int) -> dict[str, Any]:
    return {"question": f"{number} + 1?", "answer": f"#### {number + 1}"}


def _dapo(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} + 2?", "solution": f"{number + 2}"}


def _openmath(number: int) -> dict[str, Any]:
    return {"problem": f"{number} + 4?", "expected_answer": f"{number + 4}"}


def _math(number: int) -> dict[str, Any]:
    return {"problem": f"{number} * 2?", "solution": f"\\boxed{{{2 * number}}}"}


REWARD = '''"""A reward of one's own."""


def score(prompt: str, response: str, answer: str) -> float:
    return float(response.strip() == answer)


reward = score
'''
ENVIRONMENT = '''"""An environment of one's own, and its tasks."""

from rl_envs import SortingEnvironment, SortingTasks


class MyEnvironment(SortingEnvironment):
    """Sort digits."""


class MyTasks(SortingTasks):
    """Digits to sort."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(num_digits=4, seed=seed)
'''
JOB = """
command: [rl, train, quickstart]
job_name: demo
cpus_per_node: 64
gpus_per_node: 8
"""
_DATA = "data: {train: rows.jsonl}\n"
SORTING = "data: {train: prompts.jsonl}\nenv: {name: sorting}\n"
"""Parts left to the reader in files that pages show."""
RUN_FILE = f"policy: {{model_name: path/to/model}}\n{SORTING}"


def _files() -> dict[str, str]:
    """Return the texts of the files by their names."""
    reward_page = "docs/tutorials/reward.md"
    rewards = [block(reward_page, "python", number) for number in range(3)]
    return {
        "rows.jsonl": _rows(_row),
        "prompts.jsonl": _rows(_sorting),
        "pairs.jsonl": _rows(_pair),
        "problems.jsonl": _rows(_problem),
        "test.jsonl": _rows(_problem),
        "data/my-gsm8k/train.jsonl": _rows(_gsm8k),
        "data/my-gsm8k/test.jsonl": _rows(lambda number: _gsm8k(number + NUM_ROWS), 8),
        "data/dapo.jsonl": _rows(_dapo),
        "data/openmath.jsonl": _rows(_openmath),
        "data/math.jsonl": _rows(_math, 8),
        "my_reward.py": REWARD,
        "my_env.py": ENVIRONMENT,
        "reward.py": "\n\n".join(rewards),
        "agent.py": block("docs/guides/agents.md", "python"),
        "environments/two_tries.py": block("docs/guides/verifiers.md", "py"),
        "job.yaml": JOB,
        "sft.yaml": block("docs/guides/lora.md", "yaml") + _DATA,
        "grpo.yaml": RUN_FILE,
        "my.yaml": block("docs/get-started/configuration.md", "yaml"),
        "base.yaml": SORTING,
        "their_grpo.yaml": (
            ROOT / "docs/recordings/inputs/their_grpo.yaml"
        ).read_text(),
    }


# Files needed by other files, and by pages that do not name them.
_WITH: Mapping[str, tuple[str, ...]] = {
    "docs/guides/live-updates.md": ("path/to/model", "prompts.jsonl"),
    "docs/guides/sharing.md": ("path/to/model", "prompts.jsonl"),
    "docs/guides/verifiers.md": ("environments",),
    "my.yaml": ("base.yaml", "path/to/model", "prompts.jsonl"),
    "grpo.yaml": ("path/to/model", "prompts.jsonl"),
    "sft.yaml": ("path/or/hub-name", "rows.jsonl"),
}


def write_kit(folder: Path) -> None:
    """Write all models and files into a folder."""
    characters = "".join(map(chr, range(32, 127))) + "\n"
    config = ModelBuildConfig.from_dict(
        {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 512,
            "tokenizer": {"characters": characters, "chat_template": CHAT},
        }
    )  # fmt: skip
    first, *others = MODELS
    build_model(config, folder / first, seed=1)
    for name in others:
        shutil.copytree(folder / first, folder / name)
    for name, text in _files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def finish_run(folder: Path, name: str) -> None:
    """Give a run's checkpoint the step that the pages name."""
    if step := STEPS.get(name):
        (found,) = (folder / name / "checkpoints").glob("step_*")
        found.rename(found.with_name(step))


def _named(commands: Iterable[PageCommand], names: Sequence[str]) -> list[str]:
    text = "\n".join(command.line for command in commands)
    return [
        name for name in names if re.search(rf"(?<![\w/.-]){re.escape(name)}\b", text)
    ]


def needed_runs(page: str, commands: Sequence[PageCommand]) -> list[str]:
    """Return the runs in `RUNS` that a page assumes."""
    if "runs" in MADE_BY_PAGE.get(page, ()):
        return []
    return _named(commands, list(RUNS))


def give(kit: Path, folder: Path, page: str, commands: Sequence[PageCommand]) -> None:
    """Copy what a page assumes into the folder in which its commands run."""
    made = MADE_BY_PAGE.get(page, ())
    wanted = set(_named(commands, [*MODELS, *_files(), "data/my-gsm8k"]))
    for name in [page, *wanted]:
        wanted |= set(_WITH.get(name, ()))
    wanted |= set(needed_runs(page, commands))
    for name in sorted(wanted - set(made)):
        source, target = kit / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)
