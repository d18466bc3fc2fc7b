"""How each command of the pages is tried: verbatim, except for the rules here.

Exactly one rule matches a command. A rule may append words to the command (a run of one
step), replace an address by one of this machine, and define how the command ends: by
itself, or by Ctrl-C once it has printed an address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tools.page_commands.pages import PageCommand

__all__ = ["QUICKSTART_TO_STOP", "RULES", "Ending", "Rule", "rule_of"]


class Ending(Enum):
    """How a command ends."""

    ITSELF = "itself"
    """It finishes its work."""
    CTRL_C = "ctrl-c"
    """It serves or shows something: it gets Ctrl-C once it has printed an address."""
    PAGE = "page"
    """It serves the following commands: it gets Ctrl-C after the page's last one."""


@dataclass(frozen=True)
class Rule:
    """How the commands that match a pattern are tried."""

    pattern: str
    """Regular expression searched in `PAGE: COMMAND`."""
    add: str = ""
    """Words appended to the command."""
    replace: tuple[tuple[str, str], ...] = ()
    """Replacements: `{name}` is what the page's helper has printed."""
    settings: tuple[tuple[str, str], ...] = ()
    """Variables, beside those that the page exports."""
    ending: Ending = Ending.ITSELF
    says: str = r"https?://[\w.]+:\d+"
    """Output that precedes Ctrl-C."""
    exit_code: int = 0
    """Its exit code."""
    typed: str = ""
    """Its input, in printf's format, followed by the end of input."""
    in_terminal: bool = False
    """Whether it needs a terminal for its output."""
    interrupted: bool = False
    """Whether it needs a run that was ended by Ctrl-C, and no other."""
    deadline_s: float = 240.0
    """Time limit in seconds."""
    is_quick: bool = False
    """Whether it needs neither workers nor weights: a test runs it in-process."""
    left_out: str = ""
    """Why it cannot be run here; empty if it is run."""


GRPO = "grpo.max_num_steps=1 policy.generation.max_new_tokens=4"
VALIDATION = "common.data.validation.tasks.num_rows=64"
QUICKSTART = (
    f"stages.warmup.sft.max_num_steps=3 stages.grpo.grpo.max_num_steps=2 {VALIDATION}"
)
QUICKSTART_TO_STOP = (
    "rl train quickstart stages.warmup.sft.max_num_steps=3 "
    f"stages.grpo.grpo.max_num_steps=40 {VALIDATION}"
)
"""A run long enough to be interrupted."""
# Only the sizes of a recipe, its model and its data.
SHORT_RECIPE = (
    "policy.model_name={kit}/model policy.precision=float32 "
    "policy.max_total_sequence_length=384 policy.train_global_batch_size=8 "
    "policy.train_micro_batch_size=2 "
    "policy.generation.backend=huggingface policy.generation.precision=float32 "
    "policy.generation.max_new_tokens=8 grpo.num_prompts_per_step=4 "
    "grpo.num_generations_per_prompt=2 grpo.max_num_steps=1 grpo.val_at_end=false "
    "cluster.workers_per_node=1 cluster.use_gpus=false "
)
GSM8K = (
    SHORT_RECIPE + "grpo.drop_zero_variance_groups=false "
    "data.validation.path={kit}/data/my-gsm8k "
)
DAPO = (
    SHORT_RECIPE + "data.train.path={kit}/data/dapo.jsonl "
    "data.validation.path={kit}/data/math.jsonl data.max_input_seq_length=256 "
    "policy.sequence_packing.train_mb_tokens=384 grpo.use_dynamic_sampling=false "
    "env.settings.num_workers=1"
)
THEIRS = (
    SHORT_RECIPE + "data.train.path={kit}/data/openmath.jsonl data.train.split=train "
    "logger.sinks=[jsonl] env.settings.num_workers=1"
)


def _staged(keys: str, stage: str = "grpo") -> str:
    return " ".join(f"stages.{stage}.{key}" for key in keys.split())


GSM8K_TRAIN = _staged(
    GSM8K + "data.train.path={kit}/data/my-gsm8k generation_cluster=null"
)


# "port 0": the usual one may be in use here.
ANY_PORT = "--port 0"
TRAINER = (("https://trainer:9500", "{address}"),)
OPERATOR = (("RL_KEY", "{key}"),)
QUICK_COMMANDS = (
    r"recipes|plan|config (show|schema|import|validate)|keys|envs list|runs|report"
    r"|dashboard|cluster slurm|init .*--yes"
)

RULES: Sequence[Rule] = (
    # Training. Only the number of steps and the answer length are reduced.
    Rule(r": rl train (grpo|drgrpo|gspo|cispo|rloo|reinforce\+\+) policy", GRPO),
    # An untrained model earns nothing, so no group would have variance.
    Rule(r": rl train dapo policy", f"{GRPO} env.settings.credit=random"),
    Rule(r": rl train ppo ",
         "ppo.max_num_steps=1 policy.generation.max_new_tokens=4"),
    Rule(r": rl train distillation ",
         "distillation.max_num_steps=1 policy.generation.max_new_tokens=4"),
    Rule(r": rl train (?P<name>sft|dpo|rm) policy", "{name}.max_num_steps=1"),
    Rule(r": rl train sft --config sft.yaml", "sft.max_num_steps=1"),
    Rule(r": rl train grpo --config (my|grpo).yaml", GRPO),
    Rule(r"migrate.md: rl train grpo.yaml", _staged(THEIRS)),
    Rule(r": rl train quickstart(?! .*(--resume|backend=vllm|~stages))", QUICKSTART),
    Rule(r": rl train quickstart --resume", interrupted=True),
    Rule(r": rl train quickstart ~stages.grpo",
         f"stages.warmup.sft.max_num_steps=6 {VALIDATION}"),
    Rule(r": rl train quickstart .*backend=vllm", QUICKSTART, deadline_s=600),
    Rule(r"README.md: rl train run.yaml", "stages.grpo.grpo.max_num_steps=2"),
    Rule(r": rl train dapo-math-7b", _staged(DAPO, "dapo")),
    Rule(r": rl train grpo-gsm8k", _staged(GSM8K)),
    Rule(r": rl train (agents-gsm8k|mine.yaml)", GSM8K_TRAIN),
    Rule(r": rl replay "),
    # Models.
    Rule(r": rl eval ", "--max-samples 8 generation.max_new_tokens=8"),
    Rule(r": rl generate "),
    Rule(r": rl checkpoint (inspect|convert) "),
    # Servers.
    Rule(r"(serve|sharing).md: (\w+=\w+ )?rl serve (?!.*(--port|root /))", ANY_PORT,
         ending=Ending.CTRL_C),
    Rule(r": rl serve .* --port 0", ending=Ending.CTRL_C),
    Rule(r": rl serve model --weights-root /runs", ANY_PORT,
         replace=(("/runs", "{folder}/runs"),), ending=Ending.CTRL_C),
    Rule(r": rl serve path/to/model --weights-root /shared/run", "--port {port}",
         replace=(("/shared", "{folder}/shared"),), ending=Ending.PAGE),
    Rule(r": rl watch (?!.*--terminal)", ANY_PORT, ending=Ending.CTRL_C),
    Rule(r": rl watch .*--terminal", says="quickstart-001", in_terminal=True,
         ending=Ending.CTRL_C),
    # A run in progress.
    Rule(r": rl ctl \w+ runs/"),
    Rule(r": rl ctl (pause|set|stop|status) https://trainer", replace=TRAINER,
         settings=OPERATOR),
    # Environments of RL.
    Rule(r": rl envs check (?!openenv)"),
    Rule(r": rl envs check openenv", replace=(("http://127.0.0.1:8000", "{address}"),)),
    # There is no answer: the input is at its end.
    Rule(r": rl envs play "),
    Rule(r": rl envs run .*--model path/to/model", "--max-new-tokens 8"),
    Rule(r": rl envs run .*--address",
         "--max-new-tokens 8", replace=(("http://127.0.0.1:8000", "{address}"),)),
    # Environments of actors.
    Rule(r": rl env (build|check) ", deadline_s=1_200),
    Rule(r": rl env (list|prune)"),
    # Commands that take a second.
    Rule(r": rl doctor"),
    # Enter answers a question with its default.
    Rule(r": rl init my-run$", typed="\\n" * 5, in_terminal=True),
    # 1: the runs differ.
    Rule(r": rl diff ", exit_code=1, is_quick=True),
    Rule(rf": rl ({QUICK_COMMANDS})( |$)", is_quick=True),
)  # fmt: skip


def rule_of(command: PageCommand) -> Rule:
    """Return the rule of a command.

    Raises:
        ValueError: No rule matches, or several do.
    """
    found = [rule for rule in RULES if re.search(rule.pattern, command.title)]
    if len(found) != 1:
        patterns = [rule.pattern for rule in found]
        raise ValueError(f"{command.title} needs one rule, not {patterns}")
    return found[0]
