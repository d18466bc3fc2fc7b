"""A request of OpenAI's interface, checked for the backend `huggingface`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rl_distributed.errors import ConfigError
from rl_models.serving.errors import ApiError
from rl_models.tokens.chat import encode_messages
from rl_models.types import SamplingParams

__all__ = ["CHAT", "COMPLETIONS", "OpenAIRequest", "content_text", "prompt_ids"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_COMPLETION_TOKENS, _MOST_CHOICES = 16, 128

# Fields that change nothing about an answer, whatever their value.
_IGNORED = frozenset(
    [
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    ]
)
# Fields that are refused unless they have a value that changes nothing: ignoring others
# would give an answer to another question.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_KNOWN = frozenset(
    [
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
    ]
)


@dataclass(frozen=True)
class OpenAIRequest:
    """A checked request."""

    is_chat: bool
    prompts: list[list[int]]
    n: int
    sampling: SamplingParams
    greedy: bool
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool

    @classmethod
    def read(
        cls,
        path: str,
        fields: dict[str, Any],
        tokenizer: Any,
        context: int | None,
        vocab_size: int | None = None,
        *,
        prompts: list[list[int]] | None = None,
        others: Collection[str] = (),
        refuse: Callable[[str], ApiError] | None = None,
    ) -> OpenAIRequest:
        """Check the fields of a request.

        Args:
            path: Its route.
            fields: The body.
            tokenizer: The model's tokenizer.
            context: Longest prompt and answer together.
            vocab_size: Ids that the model has; None: those of the tokenizer.
            prompts: Tokens of the prompts, where the caller knows them already.
            others: Fields that the caller reads.
            refuse: Makes the error about a field that is not supported.

        Raises:
            ApiError: A field is wrong, or the backend cannot do what it asks for.
        """
        is_chat = path == CHAT
        given = {name: value for name, value in fields.items() if value is not None}
        refuse = refuse or _unsupported
        _refuse_others(given, others, refuse)
        name = "messages" if is_chat else "prompt"
        if name not in given:
            raise _bad(f"{name} is missing", name)
        if prompts is None:
            prompts = prompt_ids(given, tokenizer, vocab_size)
        room = (context or 1 << 20) - max(map(len, prompts))
        default = room if is_chat else _COMPLETION_TOKENS
        limit = given.get("max_completion_tokens", given.get("max_tokens", default))
        given["max_tokens"] = limit
        if is_chat and context is None and limit == room:
            given["max_tokens"] = 1_024
        temperature = _number(given, "temperature", 1.0, lambda v: v >= 0, "be >= 0")
        logprobs = given.get("logprobs", False)
        if not isinstance(logprobs, bool) and logprobs != 0:
            raise refuse("logprobs above 0")
        top_k = _integer(given, "top_k", 0, -1)
        options = given.get("stream_options", {})
        return cls(
            is_chat=is_chat,
            prompts=prompts,
            n=_integer(given, "n", 1, 1, _MOST_CHOICES),
            sampling=SamplingParams(
                temperature=temperature or 1.0,
                top_p=_number(
                    given, "top_p", 1.0, lambda v: 0 < v <= 1, "lie in (0, 1]"
                ),
                top_k=top_k if top_k > 0 else None,
                max_new_tokens=_integer(given, "max_tokens", limit, 1),
            ),
            greedy=temperature == 0,
            seed=_integer(given, "seed", 0, -(1 << 63), (1 << 63) - 1)
            if "seed" in given
            else None,
            stop=_stops(given.get("stop", [])),
            stream=_truth(given, "stream"),
            include_usage=isinstance(options, dict)
            and bool(options.get("include_usage")),
            # In completions it is the number of alternatives, so 0 asks for the sampled
            # token's log-prob as well.
            logprobs=logprobs is True or (not is_chat and "logprobs" in given),
            return_token_ids=_truth(given, "return_token_ids"),
        )


def prompt_ids(
    fields: Mapping[str, Any], tokenizer: Any, vocab_size: int | None = None
) -> list[list[int]]:
    """Return the token ids of the messages or prompts of a body.

    Args:
        fields: The body.
        tokenizer: The model's tokenizer.
        vocab_size: Size of the model's vocabulary, which may be padded beyond the
            tokenizer's; None: that of the tokenizer.

    Raises:
        ApiError: They have no form of the interface, or are empty.
    """
    if "messages" in fields:
        return [_chat_ids(fields["messages"], tokenizer)]
    prompt = fields.get("prompt")
    if isinstance(prompt, str) or _are_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad("prompt must be a text, token ids, or a list of those", "prompt")
    found = []
    for one in prompt:
        if isinstance(one, str):
            one = list(tokenizer(one)["input_ids"])
        elif not _are_ids(one):
            raise _bad("prompt must be a text, token ids, or a list of those", "prompt")
        if not one:
            raise _bad("prompt must have at least one token", "prompt")
        size = max(len(tokenizer), vocab_size or 0)
        if max(one) >= size:
            raise _bad(
                f"prompt must have ids below {size}, the size of the vocabulary: got "
                f"{max(one)}",
                "prompt",
            )
        found.append(one)
    return found


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(entry) is int and entry >= 0 for entry in value)
    )


def _chat_ids(messages: Any, tokenizer: Any) -> list[int]:
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message", "messages")
    for message in messages:
        if not isinstance(message, dict):
            raise _bad("messages must hold objects with role and content", "messages")
    plain = [{**one, "content": content_text(one.get("content"))} for one in messages]
    try:
        return encode_messages(tokenizer, plain)
    except ConfigError as error:
        raise _bad(str(error).rstrip("."), "messages") from error


def content_text(content: Any) -> str:
    """Return the text of a message's content, whichever form it has.

    Raises:
        ApiError: It has parts that are no text.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ]
        if texts and all(texts):
            return "".join(str(part.get("text", "")) for part in content)
    if content is None:
        return ""
    raise _bad("content must be a text or a list of texts", "messages")


def _refuse_others(
    given: Mapping[str, Any],
    others: Collection[str],
    refuse: Callable[[str], ApiError],
) -> None:
    for name, value in given.items():
        if name in _KNOWN or name in _IGNORED or name in others:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise refuse(name)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(
        isinstance(stop, str) and stop for stop in stops
    ):
        raise _bad("stop must be a text or a list of texts", "stop")
    return stops


def _number(
    given: Mapping[str, Any],
    name: str,
    default: float,
    holds: Callable[[float], bool],
    rule: str,
) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(f"{name} must be a number: got {value!r}", name)
    # NaN fails every comparison. JSON as Python reads it may hold Infinity, and
    # integers that no float can hold.
    if not holds(value) or abs(value) > sys.float_info.max:
        raise _bad(f"{name} must {rule}: got {value!r:.40}", name)
    return float(value)


def _truth(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    # A text such as "false" would count as true.
    if not isinstance(value, bool):
        raise _bad(f"{name} must be true or false: got {value!r:.40}", name)
    return value


def _integer(
    given: Mapping[str, Any],
    name: str,
    default: int,
    least: int,
    most: int = (1 << 31) - 1,
) -> int:
    value = given.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise _bad(
            f"{name} must be a whole number from {least} to {most}: got {value!r}", name
        )
    return value


def _bad(message: str, param: str) -> ApiError:
    return ApiError(400, f"{message}.", "bad_request", param=param)


def _unsupported(name: str) -> ApiError:
    return ApiError(
        400,
        f"The engine huggingface has no {name}; the engine vllm may: start the server "
        "with --engine vllm, or leave it out.",
        "not_supported",
        param=name.split()[0],
    )
