"""Roles of observations: none may disappear in a chat template."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from rl_algorithms.rollout.observations import ObservationEncoder, Turn

_spec = importlib.util.spec_from_file_location(
    "agent_rollouts", Path(__file__).with_name("agent_rollouts.py")
)
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

# As in templates of Qwen models: messages with unknown roles are dropped.
SILENT = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}"
    "|{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}|assistant:{% endif %}"
)
# As in templates of Mistral models: they are errors.
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "|{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}|assistant:{% endif %}"
)


def continued(template: str, *roles: str) -> str:
    """Return the text after an answer, with a message of each role."""
    tokenizer = made.overlapping_tokenizer(template)
    log = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "x"}]
    # A whole conversation: it contains an earlier observation too.
    log = [log[0], log[1], {"role": roles[0], "content": "first"}, log[1]]
    said = [{"role": role, "content": f"seen {role}"} for role in roles]
    encoder = ObservationEncoder(tokenizer)
    [found] = encoder.encode([Turn(log, said, 0)])
    assert "first" in tokenizer.decode(encoder.start(log))
    return str(tokenizer.decode(found.tokens))


@pytest.mark.parametrize("template", [SILENT, STRICT])
def test_an_environment_speaks_as_a_user(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = continued(template, "environment")
    assert said == "|user:seen environment|assistant:"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("template", "role", "shown", "warns"),
    [
        (SILENT, "tool", "tool", ""),
        (SILENT, "ipython", "user", "does not show them"),
        (STRICT, "tool", "user", "no role tool"),
        (STRICT, "user", "user", ""),
    ],
)
def test_other_roles_are_kept_where_the_template_shows_them(
    template: str,
    role: str,
    shown: str,
    warns: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        said = continued(template, role, role)
    assert said == f"|{shown}:seen {role}" * 2 + "|assistant:"
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == bool(warns)
    assert all(warns in text and repr(role) in text for text in warned)
