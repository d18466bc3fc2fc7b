"""Files written by `rl init`: a run file, example rows, a reward or an environment.

```
Answers -> section by section -> run.yaml
        -> rows.jsonl, held_out.jsonl if the rows are generated
        -> reward.py, test_reward.py  if the reward is the user's own
        -> environment.py, test_environment.py  if the environment is
```
Pure functions that return texts by file name. Imports nothing heavy.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from rl_cli.gpus import parse_gpus
from rl_cli.starter_environments import (
    environment_files,
    needed_characters,
    num_new_tokens,
)
from rl_cli.starter_rewards import reward_files

__all__ = [
    "BUILT",
    "CPU",
    "EXAMPLE",
    "OWN_ENVIRONMENTS",
    "TASKS",
    "Answers",
    "Task",
    "starter_files",
]

Task: TypeAlias = Literal[
    "reward", "turns", "tools", "math", "code", "imitate", "prefer"
]
TASKS: Mapping[Task, str] = {
    "reward": "earn a reward that a function of your own gives",
    "turns": "converse for several turns with an environment of your own",
    "tools": "call tools of your own",
    "math": "find the answer that a column holds",
    "code": "write programs that pass the tests of a row",
    "imitate": "answer as the rows do",
    "prefer": "prefer the better answer of each row to the worse one",
}
BUILT, EXAMPLE, CPU = "small", "example", "cpu"
_RATES = {"grpo": 1e-6, "sft": 1e-5, "dpo": 5e-7}
assert set(TASKS) == set(get_args(Task))
_NUM_HELD_OUT = 64
OWN_ENVIRONMENTS = frozenset({"turns", "tools"})
"""Tasks whose environment is a file of the user."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to the five questions."""

    model: str
    """Folder or hub name; `small`: built by the run."""
    data: str
    """File, folder, hub name or data format; `example`: generated rows."""
    task: Task
    machine: str
    """`cpu`, or GPUs such as `8x80GB`."""
    steps: int
    """Budget: the number of training steps."""
    data_format: str | None = None
    """Name of the data format, if `data` is one."""
    answer_column: str | None = "answer"
    """Column of the final answer, for a reward function; None: there is none."""

    @property
    def algorithm(self) -> str:
        """Algorithm for the task."""
        return {"imitate": "sft", "prefer": "dpo"}.get(self.task, "grpo")

    @property
    def is_sampled(self) -> bool:
        """True if the model is trained on its own answers."""
        return self.algorithm == "grpo"


def starter_files(answers: Answers, folder: Path) -> dict[str, str]:
    """Return the texts to write, by name.

    Args:
        answers: Answers to the questions.
        folder: Destination; paths of data and model become relative to it.
    """
    files = {"run.yaml": _run_file(answers, folder)}
    if answers.task == "reward":
        files |= reward_files(answers.answer_column)
    if answers.task in OWN_ENVIRONMENTS:
        column = answers.answer_column or "answer"
        is_short = answers.model == BUILT
        files |= environment_files(answers.task, column, is_short=is_short)
    if answers.data == EXAMPLE:
        rows = _example_rows(answers.task)
        files["rows.jsonl"] = _lines(rows[:-_NUM_HELD_OUT])
        files["held_out.jsonl"] = _lines(rows[-_NUM_HELD_OUT:])
    return files


def _run_file(answers: Answers, folder: Path) -> str:
    parts = [
        _head(answers),
        _model(answers),
        f"stages:\n  {answers.algorithm}:\n    algorithm: {answers.algorithm}",
        _policy(answers, folder),
        _data(answers, folder),
        _env(answers),
        _settings(answers),
        _machine(answers),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _head(answers: Answers) -> str:
    gpus = "null" if answers.machine == CPU else answers.machine
    own = _notes_on_file(answers)
    return f"""\
# What to do next, in this folder:
#   rl config validate run.yaml    check every key, the data and the reward
#   rl plan run.yaml               the memory that it needs
#   rl train run.yaml              train; the run lies in runs/run-001
#   rl report runs/run-001         see what it learned, and what it wrote
{own}# Every key is explained by `rl config explain {answers.algorithm}`.
title: "{TASKS[answers.task].capitalize()}"
about:
  gpus: {gpus}
seed: 0
"""


def _notes_on_file(answers: Answers) -> str:
    if answers.task == "reward":
        what, name = "The reward is the function in reward.py.", "reward"
    elif answers.task in OWN_ENVIRONMENTS:
        what = "The environment is the class in environment.py."
        name = "environment"
    else:
        return ""
    lines = [
        f"{what} After each change of it:",
        f"  python -m pytest test_{name}.py     (needs pytest)",
    ]
    if answers.data == EXAMPLE:
        thing = {"reward": "reward", "environment": "Environment"}[name]
        lines.append(f"  rl envs check {name}.py:{thing} --data rows.jsonl")
        if name == "environment":
            lines.append("  rl envs play environment.py:Environment --data rows.jsonl")
    return "".join(f"# {line}\n" for line in lines)


def _model(answers: Answers) -> str:
    if answers.model != BUILT:
        return ""
    printable = "".join(map(chr, range(32, 127))) + "\n"
    short = "0123456789max= " + needed_characters(answers.task)
    characters = short if _is_tiny_talk(answers) else printable
    return f"""\
# A small transformer with random weights, built here. For a real one remove this
# section and name it in policy.model_name.
model:
  architecture: llama
  hidden_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
  max_position_embeddings: 512
  # One token for each of these characters; all others are unknown.
  tokenizer: {{characters: {json.dumps(characters)}}}
"""


def _is_tiny_talk(answers: Answers) -> bool:
    """Return True if prompts and answers are just a few digits."""
    # A real model writes more than a few digits where it has several turns.
    if answers.task in OWN_ENVIRONMENTS and answers.model != BUILT:
        return False
    return answers.data == EXAMPLE and answers.task != "code"


def _policy(answers: Answers, folder: Path) -> str:
    is_small, on_gpu = answers.model == BUILT, answers.machine != CPU
    lines = []
    if not is_small:
        lines.append(f"model_name: {_place(answers.model, folder)}")
    if on_gpu:
        lines.append("precision: bfloat16")
    # A conversation of several turns is one row.
    tiny = 48 if answers.task in OWN_ENVIRONMENTS else 16
    length = tiny if _is_tiny_talk(answers) else 256 if is_small else 1024
    lines += [
        "# Longest row: prompt and answer together, in tokens.",
        f"max_total_sequence_length: {length}",
        "# Rows per forward pass; lower it if memory runs out.",
        f"train_micro_batch_size: {64 if is_small else 4}",
    ]
    if not is_small:
        lines.append("dtensor: {activation_checkpointing: true}")
    rate = 1e-3 if is_small else _RATES[answers.algorithm]
    lines.append(f"optimizer: {{kwargs: {{lr: {rate:.1e}, weight_decay: 0.0}}}}")
    if answers.is_sampled:
        lines += ["generation:", *_indented(_generation(answers, length), 1)]
    return "\n".join(_indented(["policy:", *_indented(lines, 1)], 2))


def _generation(answers: Answers, length: int) -> list[str]:
    parts = 4 if answers.task in OWN_ENVIRONMENTS else 2
    most = length // parts
    if _is_tiny_talk(answers):
        most = num_new_tokens(answers.task)
    lines = [
        "# Longest answer, in tokens.",
        f"max_new_tokens: {most}",
    ]
    if answers.machine != CPU:
        lines += [
            "# vLLM, where its environment is built (rl env build).",
            "backend: auto",
            "precision: bfloat16",
            "vllm: {enable_sleep_mode: true, gpu_memory_utilization: 0.5}",
        ]
    return lines


def _data(answers: Answers, folder: Path) -> str:
    if answers.data == EXAMPLE:
        lines = ["train: rows.jsonl", "validation: held_out.jsonl"]
    else:
        source = (
            f"{{format: {answers.data_format}}}"
            if answers.data_format is not None
            else _place(answers.data, folder)
        )
        lines = [
            f"train: {source}",
            "# One row in twenty is held out, to measure with.",
            "split_validation_size: 0.05",
            "# Rows that are too long are left out, and counted.",
            "on_overlong: drop",
        ]
    return "\n".join(_indented(["data:", *_indented(lines, 1)], 2))


def _env(answers: Answers) -> str:
    if not answers.is_sampled:
        return ""
    if answers.task == "reward":
        return "    env: {name: reward, settings: {file: reward.py}}"
    if answers.task in OWN_ENVIRONMENTS:
        return "    env: {name: file, settings: {file: environment.py}}"
    return f"    env: {{name: {answers.task}}}"


def _settings(answers: Answers) -> str:
    lines = [f"max_num_steps: {answers.steps}"]
    if answers.is_sampled:
        lines += [
            "# Answers to one prompt are compared with each other.",
            "num_prompts_per_step: 16",
            "num_generations_per_prompt: 8",
        ]
        if answers.task in OWN_ENVIRONMENTS:
            lines += [
                "# Longest conversation, in answers of the model.",
                "max_rollout_turns: 3",
            ]
        if answers.task in {"reward", *OWN_ENVIRONMENTS}:
            lines += [
                "# A held-out answer with at least this reward counts as right.",
                f"accuracy_threshold: {0.5 if answers.task == 'turns' else 1.0}",
            ]
    lines += [
        f"val_period: {max(1, answers.steps // 10)}",
        "val_at_start: true",
        "val_at_end: true",
    ]
    section = _indented([f"{answers.algorithm}:", *_indented(lines, 1)], 2)
    if answers.is_sampled:
        section.append("    loss_fn: {reference_policy_kl_penalty: 0.0}")
    return "\n".join(section)


def _machine(answers: Answers) -> str:
    nodes, per_node, on_gpu = 1, 1, answers.machine != CPU
    if on_gpu:
        gpus = parse_gpus(answers.machine)
        nodes, per_node = gpus.num_nodes, gpus.per_node
    period = max(1, answers.steps // 10)
    return f"""\
    cluster:
      num_nodes: {nodes}
      workers_per_node: {per_node}
      use_gpus: {str(on_gpu).lower()}
    checkpointing: {{save_period: {period}, keep_latest_k: 2}}"""


def _place(name: str, folder: Path) -> str:
    """Return a path relative to the folder; leave a name on the hub unchanged."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    # An absolute path stays as the user gave it; only relative ones are converted.
    if path.is_absolute():
        return json.dumps(str(path))
    return json.dumps(os.path.relpath(path, folder))


def _indented(lines: Sequence[str], levels: int) -> list[str]:
    return [f"{'  ' * levels}{line}" for line in lines]


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _example_rows(task: Task) -> list[dict[str, object]]:
    """Return all tasks "which of three digits is the largest", in a fixed order."""
    rows: list[dict[str, object]] = []
    for digits in itertools.product("0123456789", repeat=3):
        prompt, answer = f"max {''.join(digits)} = ", max(digits)
        if task == "prefer":
            # Equal digits have no worse answer.
            worse = min(digits)
            if worse != answer:
                rows.append({"prompt": prompt, "chosen": answer, "rejected": worse})
        elif task == "code":
            test = f"assert largest({', '.join(digits)}) == {answer}"
            rows.append({"prompt": f"def largest(a, b, c):  # {test}", "tests": [test]})
        else:
            rows.append({"prompt": prompt, "answer": answer})
    # Shuffled, as the last rows are held out and must be like the others; by a fixed
    # seed, so that the files are the same each time.
    random.Random(0).shuffle(rows)
    return rows
