"""Wrong input to the `rl` command: what is typed, what is said, and the page of it.

`python tests/bad_inputs.py --write` writes `docs/reference/messages.md`, with the time
of each command as a process of its own. `test_bad_input.py` checks the page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from small_run import recipe

from rl_cli.main import _run
from rl_models import ModelBuildConfig, build_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "messages.md"
ROW = '{"prompt": "312=", "answer": "123"}\n'
FILES = {
    "rows.jsonl": ROW * 64,
    "empty.jsonl": "",
    "broken.jsonl": ROW + '{"prompt": "1=",\n',
    "long.jsonl": '{"prompt": "1234567890123=", "answer": "1"}\n' * 64,
    "questions.jsonl": '{"qestion": "1=", "answer": "1"}\n' * 64,
    "notes.txt": "hello\n",
    "rewards.py": "def reward(prompt, response):\n    return 1.0\n",
    "broken.yaml": "policy: [1,\n",
    "twice.yaml": "seed: 1\nseed: 2\n",
    "list.yaml": "- 1\n",
    "finished/run.json": "{}",
    "finished/result.json": "{}",
    "nothing/notes.txt": "hello\n",
}
GRPO = {
    "policy": {
        "model_name": "model",
        "max_total_sequence_length": 12,
        "generation": {"max_new_tokens": 5},
    },
    "env": {"name": "sorting"},
    "data": {"train": "rows.jsonl"},
}


_LOCAL, _MARK = "127.0.0.1", "LOCALHOST"


@dataclass(frozen=True)
class BadInput:
    """One mistake."""

    what: str
    """The mistake, in a few words; it names the case."""
    command: str
    """The arguments of `rl`; `PORT` is a port that is taken."""
    core: str
    """What the message must say."""
    code: int = 2


def _grpo(what: str, arguments: str, core: str) -> BadInput:
    return BadInput(what, f"train grpo --config grpo.yaml {arguments}", core)


CASES = (
    BadInput("unknown command", "trian quickstart", "did you mean 'train'"),
    BadInput("no recipe", "train", "Missing argument 'RECIPE|ALGORITHM|PRESET'"),
    BadInput("typo in a recipe", "train quikstart", "did you mean 'quickstart'"),
    BadInput("typo in an algorithm", "train gpro", "did you mean 'grpo'"),
    BadInput("recipe file missing", "train gone.yaml", "no recipe file gone.yaml"),
    BadInput(
        "file of an algorithm missing",
        "train grpo --config gone.yaml",
        "gone.yaml does not exist",
    ),
    BadInput(
        "broken YAML", "train grpo --config broken.yaml", "broken.yaml:2 is not valid"
    ),
    BadInput(
        "key written twice",
        "train grpo --config twice.yaml",
        "key 'seed' is written twice",
    ),
    BadInput(
        "YAML that is a list", "train grpo --config list.yaml", "must hold a mapping"
    ),
    BadInput("required key", "train grpo", "grpo needs policy.model_name"),
    BadInput("file for a recipe", "train quickstart --config grpo.yaml", "is a recipe"),
    BadInput(
        "key as an option", "train quickstart --seed=3", "have no dashes: seed=VALUE"
    ),
    BadInput("override without a value", "train quickstart seed", "has no '='"),
    BadInput(
        "key without its stage",
        "train quickstart grpo.val_period=3",
        "stages.grpo.grpo.val_period=...",
    ),
    BadInput(
        "typo in a stage",
        "train quickstart stages.gpro.seed=1",
        "there is no stage 'gpro'; did you mean 'grpo'",
    ),
    BadInput(
        "typo in a recipe file", "train typo.yaml", "did you mean 'grpo.val_period'"
    ),
    _grpo(
        "typo in a key",
        "grpo.num_promts_per_step=2",
        "did you mean 'grpo.num_prompts_per_step'",
    ),
    _grpo(
        "typo in a deep key",
        "policy.optimizer.kwarg.lr=1",
        "did you mean 'policy.optimizer.kwargs'",
    ),
    _grpo(
        "wrong type",
        "grpo.num_prompts_per_step=lots",
        'must be an integer: got "lots"',
    ),
    _grpo("negative seed", "seed=-1", "seed must be at least 0: got -1"),
    _grpo(
        "huge number",
        "grpo.num_prompts_per_step=100000000000000000000",
        "must be at most 2147483647 in size",
    ),
    _grpo("out of range", "policy.generation.top_p=2", "top_p must be at most 1"),
    _grpo("not a rate", "policy.optimizer.kwargs.lr=-1", "policy.optimizer.kwargs.lr"),
    _grpo(
        "group of one",
        "grpo.num_generations_per_prompt=1",
        "grpo.num_generations_per_prompt must be at least 2",
    ),
    _grpo(
        "weights between tokens of vLLM's synchronous engine",
        "grpo.asynchronous.weight_updates=between_tokens "
        "loss_fn.use_importance_sampling_correction=true "
        "policy.generation.backend=vllm",
        "policy.generation.vllm.async_engine=false loads weights between two calls",
    ),
    _grpo(
        "weights between tokens without sampling ahead",
        "grpo.asynchronous.weight_updates=between_tokens "
        "grpo.asynchronous.max_staleness=0",
        "needs max_staleness above 0: got 0",
    ),
    _grpo(
        "answers longer than the context",
        "policy.generation.max_new_tokens=12",
        "must leave room for the prompt",
    ),
    _grpo(
        "longer than the model's context",
        "policy.max_total_sequence_length=4000",
        "must not exceed the context of model",
    ),
    _grpo(
        "batch that does not divide",
        "policy.train_global_batch_size=30 cluster.workers_per_node=4",
        "policy.train_global_batch_size must",
    ),
    _grpo("no workers", "cluster.workers_per_node=0", "must be greater than 0"),
    _grpo(
        "model folder missing",
        "policy.model_name=no/such/folder",
        "the model folder 'no/such/folder' does not exist",
    ),
    _grpo(
        "model that is a file",
        "policy.model_name=notes.txt",
        "the model 'notes.txt' is a file",
    ),
    _grpo(
        "folder without a model",
        "policy.model_name=nothing",
        "the model folder nothing has no config.json",
    ),
    _grpo("no data", "data.train=null", "data.train is not set"),
    _grpo("data file missing", "data.train=gone.jsonl", "'gone.jsonl' does not exist"),
    _grpo("empty data", "data.train=empty.jsonl", "'empty.jsonl' is empty"),
    _grpo("broken data", "data.train=broken.jsonl", "line 2: not valid JSON"),
    _grpo("unknown kind of file", "data.train=notes.txt", "unknown ending '.txt'"),
    _grpo(
        "wrong column", "data.input_key=question", "has no such column; it has 'prompt'"
    ),
    _grpo("no column", "data.train=questions.jsonl", "has no column for the prompt"),
    _grpo(
        "two sources of data",
        "'data.train={path: rows.jsonl, tasks: {world: sorting, part: train, "
        "num_rows: 8}}'",
        "data.train: give either path, tasks or mixture",
    ),
    _grpo(
        "two sources of validation",
        "data.validation=rows.jsonl data.split_validation_size=8",
        "data.split_validation_size and validation exclude each other",
    ),
    _grpo(
        "unknown world",
        "'data.train={tasks: {world: srting, part: train, num_rows: 8}}'",
        "did you mean 'sorting'",
    ),
    _grpo(
        "template missing", "data.prompt_file=gone.txt", "data.prompt_file: cannot read"
    ),
    _grpo("no reward", "env=null", "nothing rewards the answers"),
    _grpo("unknown reward", "env.name=sortng", "did you mean 'sorting'"),
    _grpo("setting of a reward", "+env.settings.credits=exact", "did you mean"),
    _grpo("secret that is not set", "env.pass_env=[NO_SUCH_KEY]", "names NO_SUCH_KEY"),
    _grpo("unknown backend", "policy.backend=dtensr", "did you mean 'dtensor'"),
    _grpo(
        "layout that needs other workers",
        "policy.parallelism.tensor=2",
        "needs a multiple of 2 workers: got 1",
    ),
    _grpo(
        "layout that cuts heads in two",
        "policy.parallelism.tensor=3 cluster.workers_per_node=3",
        "must divide what model has",
    ),
    _grpo(
        "stages whose workers share tokens",
        "policy.parallelism.pipeline=2 policy.parallelism.context=2 "
        "cluster.workers_per_node=4",
        "context must be 1 with policy.parallelism.pipeline 2",
    ),
    _grpo(
        "tokens shared by more workers than heads",
        "policy.parallelism.context=3 cluster.workers_per_node=3",
        "context must divide what model has",
    ),
    _grpo(
        "experts of a model that has none",
        "policy.parallelism.expert=2 cluster.workers_per_node=2",
        "expert must be 1 with model, which has no experts",
    ),
    _grpo(
        "adapters of another backend",
        "policy.lora.r=4 policy.backend=megatron",
        "which trains no adapters",
    ),
    _grpo(
        "adapters for a generator that takes none",
        "policy.lora.sync=adapter policy.generation.backend=openai",
        "lora.sync must be 'merged' with policy.generation.backend 'openai'",
    ),
    _grpo("rank of adapters", "policy.lora.r=0", "greater than 0"),
    _grpo(
        "unknown sampler",
        "policy.generation.backend=hugingface",
        "did you mean 'huggingface'",
    ),
    _grpo(
        "path of a class that is not there",
        "policy.optimizer.name=torch.optim.Adamm",
        "there is no class 'torch.optim.Adamm'",
    ),
    _grpo(
        "path of a module that is not there",
        "policy.optimizer.name=my_optimizers.Lion",
        "policy.optimizer.name",
    ),
    _grpo(
        "argument of an optimizer",
        "policy.optimizer.kwargs.lrr=1",
        "has lrr, which torch.optim.AdamW does not take",
    ),
    BadInput(
        "pairs are missing",
        "train dpo policy.model_name=model data.train=rows.jsonl "
        "policy.max_total_sequence_length=12",
        "dataset 'rows.jsonl' has no pairs",
    ),
    BadInput(
        "key of another algorithm",
        "train sft policy.model_name=model data.chosen_key=x",
        "data.chosen_key is not read here",
    ),
    BadInput(
        "reward where nothing is sampled",
        "train sft policy.model_name=model env.name=sorting",
        "env scores the answers of validations",
    ),
    BadInput(
        "sampling ahead where nothing is sampled",
        "train distillation policy.model_name=model teacher.model_name=model "
        "distillation.on_policy=false distillation.asynchronous.max_staleness=1",
        "with on_policy=false nothing is sampled: leave it out",
    ),
    _grpo("run folder that is a file", "output_dir=notes.txt", "notes.txt is a file"),
    _grpo("run folder in use", "output_dir=finished", "finished"),
    BadInput("resume of nothing", "train quickstart --resume", "There is no run"),
    BadInput(
        "resume of another folder", "train quickstart --resume nothing", "nothing"
    ),
    BadInput(
        "check of what cannot start",
        "config validate grpo --config grpo.yaml data.train=null",
        "data.train is not set",
    ),
    BadInput("explain a typo", "config explain num_promts_per_step", "did you mean"),
    BadInput("no prompt", "generate model ''", "The prompt '' has no tokens"),
    BadInput(
        "answer too long",
        "generate model 1= --max-new-tokens 99999999999999999999",
        "must be an integer from 1 to",
    ),
    BadInput("option that is no number", "generate model 1= --top-p much", "--top-p"),
    BadInput("typo in an option", "generate model 1= --gredy", "'--greedy'"),
    BadInput(
        "prompts given twice",
        "generate model 1= --file rows.jsonl",
        "Give prompts as arguments or in --file, not both",
    ),
    BadInput("no chat template", "generate model 1= --chat", "has no chat template"),
    BadInput("eval without a reward", "eval model --data rows.jsonl", "reward"),
    BadInput(
        "eval with too few answers",
        "eval model --data rows.jsonl --env sorting -k 8",
        "-k 8 needs at least 8 answers per prompt",
    ),
    BadInput(
        "two datasets of one name",
        "eval model --data rows.jsonl --data rows.jsonl --env sorting",
        "two datasets are called 'rows'",
    ),
    BadInput("port that is no port", "serve model --port 99999", "from 0 to 65,535"),
    BadInput("port in use", "serve model --port PORT", "PORT"),
    BadInput(
        "setting given twice",
        "serve model --max-model-len 8 max_model_len=8",
        "max_model_len is given twice",
    ),
    BadInput("unknown environment", "env build rl-models[vlm]", "has no extra 'vlm'"),
    BadInput(
        "options that exclude each other",
        "env prune --all --unused-days 3",
        "--all and --unused-days are mutually exclusive",
    ),
    BadInput(
        "report of no run", "report nothing", "'nothing' is not the folder of a run"
    ),
    BadInput("report without a run", "report", "Missing argument"),
    BadInput(
        "watching no run", "watch nothing", "'nothing' is not the folder of a run"
    ),
    BadInput("pausing no run", "ctl pause gone", "there is no run in gone"),
    BadInput(
        "stopping a run that ended", "ctl stop finished", "it has reached its end"
    ),
    BadInput("changing no key", "ctl set finished", "Missing argument 'KEY=VALUE"),
    BadInput("key without a value", "ctl set finished lr", "has no '='"),
    BadInput("missing audit log", "audit verify gone.jsonl", "cannot be read"),
    BadInput("audit log of no run", "audit verify nothing", "is not the folder of a"),
    BadInput("run without an audit log", "audit verify finished", "RL_AUDIT_LOG=FILE"),
    BadInput("list of no runs", "runs gone", "there is no folder 'gone'"),
    BadInput(
        "typo in a setting",
        "envs check countdown credt=graded",
        "did you mean 'credit'",
    ),
    BadInput("nobody to answer", "envs run countdown", "give either --model or"),
    BadInput(
        "server without a name",
        "envs run countdown --address http://127.0.0.1:8000",
        "needs --served-model",
    ),
    BadInput("environment without tasks", "envs check math", "--data FILE"),
    BadInput(
        "tasks without a size", "envs check sorting", "Settings of tasks are given as"
    ),
    BadInput(
        "no such class",
        "envs check rewards.py:Rewards --data rows.jsonl",
        "name one as rewards.py:NAME",
    ),
    BadInput(
        "a seed given twice", "envs check countdown tasks.seed=3", "drop tasks.seed"
    ),
    BadInput("no command for the nodes", "cluster slurm", "command is required"),
)


def make_files(folder: Path) -> None:
    """Write what the commands name."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "grpo.yaml").write_text(yaml.safe_dump(GRPO))
    data = recipe()
    data["stages"]["grpo"]["grpo"]["val_perod"] = 3
    (folder / "typo.yaml").write_text(yaml.safe_dump(data))
    build_model(ModelBuildConfig.from_dict(recipe()["model"]), folder / "model", seed=0)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def said(case: BadInput, folder: Path, port: int) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its message."""
    err = io.StringIO()
    arguments = shlex.split(case.command.replace("PORT", str(port)))
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(err),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = _run(arguments, False)
    return code, message_of(err.getvalue(), folder, port)


def message_of(err: str, folder: Path, port: int) -> str:
    """Return the message without progress and usage, and what differs each time."""
    text = err[err.index("Error: ") :] if "Error: " in err else err
    text = re.sub(r"\b\d+\.\d+\.\d+(?!\.|\d)", "VERSION", text.replace(_LOCAL, _MARK))
    text = text.replace(_MARK, _LOCAL)
    return (
        text.removeprefix("Error: ")
        .replace(str(folder.resolve()), "FOLDER")
        .replace(str(folder), "FOLDER")
        .replace(f":{port}", ":PORT")
        .replace(f" {port}", " PORT")
        .strip()
    )


def row_of(case: BadInput, code: int, message: str) -> str:
    """Return the row of the page, without the time."""
    shown = "<br>".join(map(_escaped, message.splitlines()))
    return f"| {case.what} | {_code(f'rl {case.command}')} | {shown} | {code} |"


def _code(text: str) -> str:
    return f"<code>{_escaped(text)}</code>"


def _escaped(text: str) -> str:
    """Return a text as it looks, where Markdown would take signs for its own."""
    escaped = text.strip().replace("&", "&amp;").replace("<", "&lt;")
    for sign in ">|*_`[]{}~":
        escaped = escaped.replace(sign, f"&#{ord(sign)};")
    return escaped


def page_rows() -> list[str]:
    """Return the rows of the page, without their times."""
    lines = PAGE.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    return [re.sub(r" [0-9.]+ s \|$", "", row) for row in rows if row.endswith(" s |")]


HEAD = """# Messages

What the `rl` command says to wrong input, before it starts anything: the message on
standard error, and exit code 2. The tests run every command of this table and compare
what it says. `python tests/bad_inputs.py --write` writes the page; the times are those
of one machine with two cores, from the start of the process to its end. They are not
tested.

`grpo.yaml` names a model with a context of {context} tokens, 64 rows and a reward:

```yaml
{grpo}
```

| mistake | command | message | exit code | time |
|---|---|---|---|---|
"""


def write() -> None:
    """Write the page."""
    rows = []
    with tempfile.TemporaryDirectory() as name, taken_port() as port:
        folder = Path(name)
        make_files(folder)
        for case in CASES:
            began_s = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "rl_cli",
                 *shlex.split(case.command.replace("PORT", str(port)))],
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            took_s = time.monotonic() - began_s
            message = message_of(done.stderr, folder, port)
            row = row_of(case, done.returncode, message)
            rows.append(f"{row} {took_s:.1f} s |")
    context = json.dumps(recipe()["model"]["max_position_embeddings"])
    grpo = yaml.safe_dump(GRPO, sort_keys=False).rstrip()
    PAGE.write_text(HEAD.format(context=context, grpo=grpo) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="Write the page.")
    if parser.parse_args().write:
        os.environ.pop("COLUMNS", None)
        write()
