"""Function-based agents, a rule-based generator, and a tokenizer for both."""

from __future__ import annotations

import importlib.util
import string
from pathlib import Path

from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_envs import AgentEnvironment
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

_spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}|{{ m['role'][0] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}|a:{% endif %}"
)
# As thinking models do: earlier answers lose their reasoning.
FORGETFUL = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('>')[-1] }}{% else %}{{ m['content'] }}{% endif %}",
)


def overlapping_tokenizer(template=TEMPLATE):
    """Return a tokenizer under which a text has several tokenizations."""
    return build_tokenizer(
        TokenizerBuildConfig(
            kind="vocabulary",
            vocabulary=[
                *string.digits,
                *string.ascii_letters,
                *string.punctuation,
                " ",
                "\n",
                *("ab", "abc", "bc", "aa", "<tool_call>", "</tool_call>"),
            ],
            chat_template=template,
        )
    )


def engine_of(tokenizer, agent, say, *, limits=None, versions=None, **rollout):
    """Return an engine whose policy emits `say(call, row)`; `$` ends a turn.

    `agent` is a function, or an environment of agents.
    """
    generation = scripted.TokenGenerator(
        getattr(say, "sample", None) or scripted.texts_of(tokenizer, say),
        versions or (lambda call: 0),
    )
    environment = agent
    if not isinstance(agent, AgentEnvironment):
        environment = AgentEnvironment(agent, **(limits or {}))
    config = RolloutConfig(**{"on_environment_error": "drop", **rollout})
    return RolloutEngine(generation, environment, tokenizer, config), generation


def parts_of(rows, row=0):
    """Return all rows of a conversation as (tokens, mask), the main one last."""
    length = int(rows["input_lengths"][row])
    main = (
        rows["input_ids"][row, :length].tolist(),
        rows["token_mask"][row, :length].tolist(),
    )
    others = [
        (part.input_ids.tolist(), part.token_mask.tolist())
        for part in rows["branches"][row]
    ]
    return [*others, main]
