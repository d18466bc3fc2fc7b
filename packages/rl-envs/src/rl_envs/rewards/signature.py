"""Inspection of a reward function's signature, which decides how it is called.

| parameter | receives |
|---|---|
| `prompt`, `response` (or `completion`) | one row's text: the function takes one row |
| `prompts`, `responses` (or `completions`) | lists: the function takes the batch |
| `completions` etc. annotated as lists of dicts | messages instead of text |
| `messages` / `message_logs` | the conversation(s) |
| `metadata` / `metadatas` | the row's columns as one mapping, or their list |
| any other name | the data set's column of this name, one value or the list |
| `**anything` | all columns that no parameter names |

Names suffice for nearly all functions. If no parameter is named like a prompt or a
response, the first ones are taken as (prompt, response), or a single one as the
response, unless they have well-known names of columns.

Without annotations, `prompts` and `completions` follow TRL: they receive messages if
the data set's column `prompt` holds messages, and texts otherwise. An annotation takes
precedence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_envs.errors import RewardSignatureError

__all__ = ["RewardFn", "RewardSignature", "fn_name", "inspect_reward_fn"]

RewardFn = Callable[..., Any]

_ROW_ROLES = {
    "prompt": "prompt",
    "response": "response",
    "completion": "response",
    "messages": "messages",
    "message_log": "messages",
    "metadata": "metadata",
}
_BATCH_ROLES = {
    "prompts": "prompt",
    "responses": "response",
    "completions": "response",
    "message_logs": "messages",
    "metadatas": "metadata",
}
_MESSAGES = {"prompt": "prompt_messages", "response": "response_messages"}
# Names whose form follows the data unless they are annotated.
_TRL_NAMES = frozenset({"prompts", "completions"})
# Names that mean a column even at the start of a signature.
_COLUMN_NAMES = frozenset(
    {"answer", "ground_truth", "label", "reference", "solution", "target"}
    | {f"{name}s" for name in ("answer", "label", "reference", "solution", "target")}
)
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def fn_name(fn: RewardFn) -> str:
    """Return the name of a function, or of a callable object's class, for messages."""
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


@dataclass(frozen=True, slots=True)
class RewardSignature:
    """Calling convention of one reward function."""

    batched: bool
    """True if it takes lists and returns one."""
    roles: Mapping[str, str]
    """Parameter name -> prompt, response, prompt_messages, response_messages, messages
    or metadata."""
    required_columns: tuple[str, ...]
    """Parameters without a default that are columns of the data set."""
    optional_columns: tuple[str, ...]
    """Parameters with a default that are filled if the column exists."""
    all_columns: bool
    """True if it takes every other column by `**`."""
    positional: tuple[str, ...]
    """Positional-only parameters, in order."""
    follows_data: tuple[str, ...] = ()
    """Parameters that take messages if the data set's prompts are messages."""

    @property
    def needs_messages(self) -> bool:
        """True if a parameter may need messages instead of texts."""
        roles = {"messages", *_MESSAGES.values()}
        return bool(self.follows_data) or not roles.isdisjoint(self.roles.values())

    def for_messages(self) -> RewardSignature:
        """Return the signature to use if the data set's prompts are messages."""
        changed = {name: _MESSAGES[self.roles[name]] for name in self.follows_data}
        return replace(self, roles={**self.roles, **changed})

    def uses(self, role: str) -> bool:
        """Return True if a parameter has this role, as text or as messages."""
        return not {role, _MESSAGES.get(role)}.isdisjoint(self.roles.values())

    def bind(
        self, values: Mapping[str, Any], columns: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments for one call.

        Args:
            values: One row's values, or lists, by role.
            columns: One row's values, or lists, by column; no required one is missing.
        """
        named = {name: values[role] for name, role in self.roles.items()}
        for name in (*self.required_columns, *self.optional_columns):
            if name in columns:
                named[name] = columns[name]
        if self.all_columns:
            named = {
                **{k: v for k, v in columns.items() if k not in named},
                **named,
            }
        places = [named.pop(name) for name in self.positional if name in named]
        return places, named


def _annotated_as_list(parameter: inspect.Parameter) -> bool:
    # As text: annotations are strings under `from __future__ import annotations`, and
    # may name types that cannot be resolved here.
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else repr(annotation)
    text = text.removeprefix("typing.").removeprefix("collections.abc.").lower()
    return text.startswith(("list", "sequence", "<class 'list'>"))


def _annotated_as_messages(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return any(word in text.lower() for word in ("dict", "mapping", "message"))


def _guess_by_place(
    fn: RewardFn, parameters: Sequence[inspect.Parameter], roles: dict[str, str]
) -> list[inspect.Parameter]:
    """Assign roles by position to leading parameters with unknown names."""
    # A named response means that the other parameters are columns, whatever their
    # place.
    if "response" in roles.values():
        return []
    unknown = [
        parameter
        for parameter in parameters
        if parameter.kind in _POSITIONAL
        and parameter.name not in roles
        and parameter.name not in _COLUMN_NAMES
        and parameter.default is inspect.Parameter.empty
    ]
    free = ["response"] if "prompt" in roles.values() else ["prompt", "response"]
    if len(unknown) < len(free):
        # A single parameter is the response, as a reward without it is useless.
        free = free[-len(unknown) :] if unknown else []
    if "response" not in free and "messages" not in roles.values():
        names = ", ".join(parameter.name for parameter in parameters) or "none"
        raise RewardSignatureError(
            f"reward function {fn_name(fn)!r} takes no response: its parameters are "
            f"{names}; call one of them `response` (one row) or `responses` (a batch)"
        )
    guessed = unknown[: len(free)]
    roles.update(zip((p.name for p in guessed), free, strict=True))
    return guessed


def _signature_of(fn: RewardFn) -> inspect.Signature:
    if not callable(fn):
        raise RewardSignatureError(
            f"a reward function must be callable: got {type(fn).__name__} {fn!r:.60}"
        )
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        # Some builtins have no signature; assume fn(prompt, response).
        kind = inspect.Parameter.POSITIONAL_ONLY
        return inspect.Signature(
            [inspect.Parameter(name, kind) for name in ("prompt", "response")]
        )


def _is_batched(
    fn: RewardFn,
    parameters: Sequence[inspect.Parameter],
    guessed: Sequence[inspect.Parameter],
) -> bool:
    row = [p.name for p in parameters if p.name in _ROW_ROLES]
    batch = [p.name for p in parameters if p.name in _BATCH_ROLES]
    text_row = [name for name in row if _ROW_ROLES[name] in ("prompt", "response")]
    if batch and text_row:
        raise RewardSignatureError(
            f"reward function {fn_name(fn)!r} mixes parameters for one row "
            f"({', '.join(text_row)}) and for a batch ({', '.join(batch)}); "
            "use `prompt, response` or `prompts, responses`"
        )
    named = [p for p in parameters if p.name in row]
    return bool(batch) or (
        # A name such as `response` decides; annotations only decide where names do not.
        not text_row
        and bool(guessed)
        and all(_annotated_as_list(p) for p in [*guessed, *named])
    )


def inspect_reward_fn(fn: RewardFn, *, batched: bool | None = None) -> RewardSignature:
    """Determine how to call a reward function.

    Args:
        fn: A function, method, coroutine function or callable object.
        batched: True if it takes lists; None: decided by the names of its parameters,
            then by annotations such as `list[str]`.

    Raises:
        RewardSignatureError: It takes no response, or mixes rows and batches.
    """
    parameters = list(_signature_of(fn).parameters.values())
    open_places = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    all_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
    parameters = [
        p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if open_places and not parameters:
        # fn(*args, **kwargs), typically left behind by a decorator.
        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(name, kind) for name in ("prompt", "response")]
    known = {**_ROW_ROLES, **_BATCH_ROLES}
    roles = {p.name: known[p.name] for p in parameters if p.name in known}
    guessed = _guess_by_place(fn, parameters, roles)
    columns = [p for p in parameters if p.name not in roles]
    empty = inspect.Parameter.empty
    batched = _is_batched(fn, parameters, guessed) if batched is None else batched
    follows_data = []
    for parameter in parameters:
        name = parameter.name
        if roles.get(name) not in _MESSAGES:
            continue
        if _annotated_as_messages(parameter):
            roles[name] = _MESSAGES[roles[name]]
        elif name in _TRL_NAMES and parameter.annotation is empty:
            follows_data.append(name)
    if "completions" not in follows_data:
        # Without `completions` this is not TRL's convention, and prompts are text.
        follows_data = []
    return RewardSignature(
        batched=batched,
        follows_data=tuple(follows_data),
        roles=roles,
        required_columns=tuple(p.name for p in columns if p.default is empty),
        optional_columns=tuple(p.name for p in columns if p.default is not empty),
        all_columns=all_columns,
        positional=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
    )
