"""Encoding of an environment's messages into tokens that continue a conversation.

With a chat template a message is more than its text: the end of the policy's turn, the
header of the message and the header of the next answer belong to it. To find them, the
conversation is rendered with a marker after the policy's answer, and the text after the
marker is tokenized. The sampled tokens themselves never change.

Messages of the role `environment` are rendered as those of a user, and so are those of
any other role that the template does not show.

This works as long as the template leaves the text before the marker alone:

    rendered so far | answer | MARKER | end of turn, observation, next header
    ^ must be equal   ^ must be equal   ^ tokenized and appended

If it does not (it strips the reasoning, or moves the system prompt), sampled tokens and
text would diverge: that is an error, or the start of a new branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_algorithms.data.encoding import TextEncoder
from rl_algorithms.data.types import LLMMessageLogType, Tokenizer
from rl_algorithms.errors import RolloutError
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_models.tokens.chat import has_chat_template, render_chat

__all__ = ["Continuation", "ObservationEncoder", "Turn"]

_logger = get_logger(__name__)
_BASIC_ROLES = ("system", "user", "assistant")
# Control pictures, which neither templates nor answers contain by chance.
_MARKER = "\u2402answer\u2403"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation that continues."""

    log: LLMMessageLogType
    """The conversation, ending with the policy's latest answer."""
    observation: Sequence[Mapping[str, str]]
    """Messages of the environment that follow."""
    last_token: int
    """The last sampled token."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that continue a conversation."""

    tokens: list[int]
    """Tokens to append; for a branch, all tokens of the new row."""
    is_branch: bool = False
    """Whether the template rewrote earlier messages, so that a new row starts."""


class ObservationEncoder:
    """Tokenizes environment messages in the format of the conversation.

    Args:
        tokenizer: The policy's tokenizer.
        use_chat_template: Whether the chat template formatted the prompts; by default,
            if the tokenizer has one.
        tools: Schemas of the tools, passed to the template.
        branch: Whether a template that rewrites the past starts a branch instead of
            raising an error.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        use_chat_template: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        branch: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._use_template = (
            has_chat_template(tokenizer)
            if use_chat_template is None
            else use_chat_template
        )
        self._variables: dict[str, Any] = (
            {"tools": [dict(tool) for tool in tools]} if tools else {}
        )
        self._branch = branch
        # Its texts continue others, or have been rendered with a BOS token.
        self._encoder = TextEncoder(tokenizer, add_bos=False)
        self._ends: dict[int, str] = {}
        # Chat models know no such role, and many templates leave its messages out.
        self._roles = {"environment": "user"}

    def prompts(self, logs: Sequence[LLMMessageLogType]) -> list[list[int]] | None:
        """Return the tokens of prompts with descriptions of the tools.

        Return None without tools or without a template that shows them: the prompts of
        the data set then stay as they are.
        """
        if not self._variables or not self._use_template or not logs:
            return None
        # Templates ignore variables that they do not know, so only a comparison shows
        # whether this one describes tools.
        if self._render(logs[0]) == render_chat(self._tokenizer, logs[0]):
            _logger.warning(
                "the chat template does not show tools to the model; use one that "
                "does, or describe them in the system prompt"
            )
            # Reset, so that the comparison and the warning come only once.
            self._variables = {}
            return None
        return self._encoder.continuations([self._render(log) for log in logs])

    def start(self, log: LLMMessageLogType) -> list[int]:
        """Return the tokens of a conversation that begins with these messages."""
        if self._use_template:
            return self._encoder.continuations([self._render(log)])[0]
        text = "\n".join(str(message["content"]) for message in log)
        return TextEncoder(self._tokenizer).starts([text])[0]

    def follow(self, text: str) -> list[int]:
        """Return the tokens of a text that follows others."""
        return self._encoder.continuations([text])[0]

    def encode(self, turns: Sequence[Turn]) -> list[Continuation]:
        """Return the continuation of each conversation.

        Raises:
            RolloutError: The template renders earlier messages differently.
        """
        if not turns:
            return []  # tokenizers may refuse a batch without a text
        texts, branches = [], []
        for turn in turns:
            text = self._continuation(turn) if self._use_template else _plain(turn)
            branches.append(text is None)
            texts.append(self._rewritten(turn) if text is None else text)
        return [
            Continuation(tokens, is_branch)
            for tokens, is_branch in zip(
                self._encoder.continuations(texts), branches, strict=True
            )
        ]

    def _render(self, log: Sequence[Mapping[str, Any]]) -> str:
        shown = [
            {**m, "role": self._role(str(m["role"]))} if "role" in m else m for m in log
        ]
        return render_chat(self._tokenizer, shown, **self._variables)

    def _role(self, role: str) -> str:
        """Return a role with which the template shows a message."""
        if role not in self._roles:
            shows = role in _BASIC_ROLES or self._shows(role)
            self._roles[role] = role if shows else "user"
        return self._roles[role]

    def _shows(self, role: str) -> bool:
        """Return whether the template shows messages of a role, and warn if not.

        A template may leave out what it does not know, without an error.
        """
        asked = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": role, "content": _MARKER},
        ]
        try:
            if _MARKER in render_chat(self._tokenizer, asked, **self._variables):
                return True
            reason = "does not show them"
        except ConfigError as error:
            reason = str(error)
        _logger.warning(
            "messages of the role %r become those of a user, as the chat template does "
            "not take them (%s); use one that does (policy.tokenizer.chat_template)",
            role,
            reason,
        )
        return False

    def _continuation(self, turn: Turn) -> str | None:
        """Return the text after the answer, or None if the text before it changed."""
        answer = str(turn.log[-1]["content"])
        before = self._render(turn.log[:-1])
        marked = {**turn.log[-1], "content": answer + _MARKER}
        rendered = self._render([*turn.log[:-1], marked, *turn.observation])
        head, found, tail = rendered.partition(_MARKER)
        kept = head.removeprefix(before) if head.startswith(before) else None
        # Many templates trim blanks around an answer, which does not change the text.
        if found and kept is not None and kept.strip() == answer.strip():
            return tail.removeprefix(self._end_text(turn.last_token))
        if not self._branch:
            raise RolloutError(_rewrite_message(before + answer, head, len(turn.log)))
        return None

    def _rewritten(self, turn: Turn) -> str:
        return self._render([*turn.log, *turn.observation])

    def _end_text(self, token: int) -> str:
        """Return the text of a token that ends a turn, or "" for any other token.

        If the policy ended its turn itself, the template's own end must be left out.
        """
        if token not in self._ends:
            plain = self._tokenizer.decode([token], skip_special_tokens=True)
            self._ends[token] = "" if plain else str(self._tokenizer.decode([token]))
        return self._ends[token]


def _plain(turn: Turn) -> str:
    return "\n".join(str(message["content"]) for message in turn.observation)


def _rewrite_message(expected: str, got: str, num_messages: int) -> str:
    same = (a == b for a, b in zip(expected, got, strict=False))
    place = next((i for i, equal in enumerate(same) if not equal), len(got))
    return (
        f"the chat template writes the first {num_messages} messages of a conversation "
        f"differently once others follow: {expected[place:][:60]!r} became "
        f"{got[place:][:60]!r} at character {place}, so the next answer would not "
        "continue the tokens that were sampled. Set "
        "rollout.on_template_rewrite=branch (each rewritten part becomes a training "
        "row of its own), use a chat template that leaves earlier messages alone "
        "(policy.tokenizer.chat_template), or allow only one turn"
    )
