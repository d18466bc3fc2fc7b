"""`AgentSession`: the requests of an agent in one task, under one key."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_algorithms.rollout.agents.choices import AgentChoice, ToolUse
from rl_algorithms.rollout.agents.messages import Heard, hear, histories
from rl_algorithms.rollout.agents.model import ServedModel, Settings
from rl_algorithms.rollout.agents.model_call import ModelCall, Sampled
from rl_algorithms.rollout.agents.recording import Answer, Recording
from rl_algorithms.rollout.observations import Turn
from rl_envs.agents.functions import CONVERSATION_HEADER, conversation_name
from rl_envs.agents.tasks import MAIN
from rl_envs.outcomes import ConversationOutcome
from rl_envs.task_limits import TaskLimits
from rl_models.serving.errors import ApiError
from rl_models.serving.openai_answer import OpenAIAnswer
from rl_models.serving.openai_request import CHAT, OpenAIRequest

__all__ = ["AgentSession", "Asked", "ended"]

_IDEMPOTENCY = ("Idempotency-Key", "X-Request-Id")
_RETRY_COUNT = "X-Stainless-Retry-Count"
# Fields that are read here, and not by `OpenAIRequest`.
_OWN_FIELDS = ("tools", "tool_choice")


@dataclass(eq=False)
class Asked:
    """A request with its finished or pending answer."""

    digest: bytes
    name: str | None
    """The client's name of the request."""
    task: asyncio.Task[OpenAIAnswer]
    answers: list[Answer]
    """Recorded answers, once there are any."""
    num_clients: int = 0
    """Number of requests that wait for the answer, or have received it. 0: all clients
    have disconnected."""

    def join(self) -> None:
        """Count a request that is going to receive the answer."""
        self.num_clients += 1

    def leave(self) -> None:
        """Count out a request whose client disconnected before it had the answer."""
        self.num_clients -= 1
        # A retry may have received what the first request did not.
        for answer in self.answers:
            answer.is_given = self.num_clients > 0


@dataclass(frozen=True)
class _Prompt:
    """The context of a new answer."""

    parent: Answer | None
    new: list[int]
    """Tokens after those of the parent."""
    tokens: list[int]
    """All tokens of the prompt."""
    heard: list[Heard]
    log: list[dict[str, Any]]
    begin: str
    """Seed of the digests of the conversation's prefixes."""
    conversation: str


class AgentSession:
    """Requests and recording of one key; used in the event loop of `PolicyServer`.

    Args:
        model: The policy.
        settings: Sampling parameters of the answers.
        seed_of: Function of an answer's number in the task that returns its seed.
        ask: Function that passes rows to the generator.
        on_version: Called with the weight version of an answer.
        limits: Limits of the task.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: Settings,
        seed_of: Callable[[int], int],
        ask: Callable[[Sequence[ModelCall]], None],
        on_version: Callable[[int], None],
        limits: TaskLimits | None = None,
    ) -> None:
        self._limits = limits or TaskLimits()
        self.key = secrets.token_urlsafe(24)
        self.recording = Recording()
        self.met_limit = ""
        """The limit that a request exceeded, or ""."""
        self.limited_by: ConversationOutcome | None = None
        """Kind of that limit."""
        self.failure: Exception | None = None
        """Reason why the newest answer could not be sampled, or None."""
        self.is_closed = False
        self._model, self._settings = model, settings
        self._seed_of, self._ask, self._on_version = seed_of, ask, on_version
        self._asked: list[Asked] = []
        self._num_requests = self._num_seeds = 0

    def ask(
        self, fields: dict[str, Any], body: bytes, headers: Mapping[str, str]
    ) -> Asked:
        """Start to answer a request, or return the one that it repeats.

        Raises:
            ApiError: The request cannot be answered.
        """
        if self.is_closed:
            raise ended()
        header = _text_of(headers.get(CONVERSATION_HEADER, MAIN))
        conversation = conversation_name(header)
        # With the conversation: two of them may send the same messages.
        digest = hashlib.sha256(conversation.encode() + b"\0" + body).digest()
        name = next((headers[n] for n in _IDEMPOTENCY if headers.get(n)), None)
        known = self._repeated(digest, name, headers.get(_RETRY_COUNT, "0"))
        if known is not None:
            return known
        self._count()
        use = ToolUse.read(fields)
        prompt = self._prompt(fields, use, conversation)
        request = OpenAIRequest.read(
            CHAT,
            self._model.without_sampling(fields),
            self._model.tokenizer,
            self._model.row_limit,
            prompts=[prompt.tokens],
            others=_OWN_FIELDS,
            refuse=_unsupported,
        )
        calls = self._calls(request, prompt)
        answers: list[Answer] = []
        task = asyncio.ensure_future(self._answer(request, prompt, use, calls, answers))
        asked = Asked(digest, name, task, answers)
        self._asked.append(asked)
        task.add_done_callback(lambda done: self._forget_failed(asked))
        self._ask(calls)
        return asked

    def close(self) -> None:
        """Accept no more requests, and end pending ones."""
        self.is_closed = True
        for asked in self._asked:
            asked.task.cancel()
        # Digests and request bodies are no longer needed, unlike the recording.
        self._asked = []

    def _repeated(self, digest: bytes, name: str | None, retries: str) -> Asked | None:
        """Return the request that this one retries, or None.

        A client that received no answer sends the same request again. Without an
        idempotency key, such a retry differs from a request for a second answer in that
        all its clients have disconnected, or is marked as one.
        """
        # The newest first: a retry repeats the latest request with this body.
        for asked in reversed(self._asked):
            if asked.digest != digest:
                continue
            if name is not None and asked.name is not None:
                if name == asked.name:
                    return asked
            elif not asked.num_clients or retries != "0":
                return asked
        return None

    def _forget_failed(self, asked: Asked) -> None:
        task = asked.task
        if task.cancelled() or task.exception() is not None:
            # A failed answer is forgotten, so that a retry samples it again.
            self._asked = [other for other in self._asked if other is not asked]

    def _count(self) -> None:
        limit, own = self._model.limits.max_calls, self._limits.turns
        name = "env.settings.max_calls"
        if own is not None and own < limit:
            limit, name = own, "the turns of its task_limits"
        if self._num_requests >= limit:
            self.met_limit = f"the task made {limit} requests ({name})"
            self.limited_by = ConversationOutcome.OUT_OF_TURNS
            raise ApiError(
                400, f"No further answer: {self.met_limit}.", "too_many_calls"
            )
        if self._tokens_left() <= 0:
            self.met_limit = (
                f"the task sampled {self._limits.tokens} tokens (the tokens of its "
                "task_limits)"
            )
            self.limited_by = ConversationOutcome.OUT_OF_TOKENS
            raise ApiError(
                400, f"No further answer: {self.met_limit}.", "too_many_tokens"
            )
        self._num_requests += 1

    def _tokens_left(self) -> int:
        """Return how many tokens the task may still sample."""
        if self._limits.tokens is None:
            return sys.maxsize
        used = sum(len(answer.tokens) for answer in self.recording.answers)
        return self._limits.tokens - used

    def _prompt(
        self, fields: dict[str, Any], use: ToolUse, conversation: str
    ) -> _Prompt:
        """Find the answer that a request continues, and tokenise the new messages."""
        heard = hear(fields.get("messages"))
        begin = f"{conversation}\0{use.key}"
        parent, count = self.recording.find(
            histories(begin, [message.key for message in heard])
        )
        logged = [message.logged for message in heard]
        encoder = self._model.encoder(use)
        if parent is None:
            log, before = logged, []
            new = encoder.start(log)
        else:
            # The client continues it, so it must have arrived.
            parent.is_given = True
            log, before = [*parent.log, *logged[count:]], parent.row()
            turn = Turn(parent.log, logged[count:], before[-1])
            [after] = encoder.encode([turn])
            new = after.tokens
            # The template rewrote the past, so sampled tokens cannot be continued.
            if after.is_branch:
                parent, before = None, []
        if use.forced:
            new = [*new, *encoder.follow(use.forced)]
        tokens = [*before, *new]
        self._check_length(len(tokens))
        return _Prompt(parent, new, tokens, heard, log, begin, conversation)

    def _check_length(self, length: int) -> None:
        limit = self._model.row_limit
        if limit is not None and length >= limit:
            self.limited_by = ConversationOutcome.OUT_OF_TOKENS
            self.met_limit = (
                f"a prompt of {length} tokens left no room in rows of {limit} "
                "(policy.max_total_sequence_length)"
            )
            raise ApiError(
                400,
                f"The messages have {length} tokens, and the longest row of the "
                f"policy is {limit}, answer included: send fewer.",
                "context_length_exceeded",
                param="messages",
            )

    def _calls(self, request: OpenAIRequest, prompt: _Prompt) -> list[ModelCall]:
        limits = [
            request.sampling.max_new_tokens,
            self._settings.base.max_new_tokens,
        ]
        if self._model.row_limit is not None:
            limits.append(self._model.row_limit - len(prompt.tokens))
        # A share for each answer of the request, as they are sampled together.
        limits.append(max(1, self._tokens_left() // request.n))
        sampling = self._settings.limited(min(n for n in limits if n is not None))
        calls = []
        for _ in range(request.n):
            # Numbered within the task, so that the seeds do not depend on other tasks.
            seed = self._seed_of(self._num_seeds)
            self._num_seeds += 1
            calls.append(
                ModelCall(prompt.tokens, seed, request.stop, sampling, self._on_version)
            )
        return calls

    async def _answer(
        self,
        request: OpenAIRequest,
        prompt: _Prompt,
        use: ToolUse,
        calls: Sequence[ModelCall],
        answers: list[Answer],
    ) -> OpenAIAnswer:
        try:
            sampled = await asyncio.gather(*(call.future for call in calls))
        except Exception as error:
            self.failure = error
            raise ApiError(
                500, f"The policy could not be sampled: {error}", "sampling_failed"
            ) from error
        self.failure = None
        tokenizer = self._model.tokenizer
        choices = [AgentChoice(tokenizer, request.stop, use) for _ in sampled]
        for choice, found in zip(choices, sampled, strict=True):
            choice.take(found.tokens, found.logprobs or [], cut=found.is_cut)
            answers.append(self._record(prompt, choice, found))
        answer = OpenAIAnswer(request, self._model.limits.model_name, list(choices))
        # The oldest version counts, as in the staleness of a row.
        answer.version = min(min(one.versions) for one in sampled if one.versions)
        return answer

    def _record(self, prompt: _Prompt, choice: AgentChoice, found: Sampled) -> Answer:
        said = Heard({"role": "assistant", **choice.message()})
        first = prompt.parent.num_questions if prompt.parent else len(prompt.log)
        answer = Answer(
            parent=prompt.parent,
            conversation=prompt.conversation,
            prompt=prompt.new,
            log=[*prompt.log, {"role": "assistant", "content": choice.raw}],
            tokens=found.tokens,
            logprobs=found.logprobs,
            versions=found.versions,
            is_cut=found.is_cut,
            num_questions=first,
            is_given=False,
        )
        keys = [message.key for message in prompt.heard]
        self.recording.add(answer, histories(prompt.begin, [*keys, said.key])[-1])
        return answer


def ended() -> ApiError:
    """Return the error about a request after the end of its task."""
    return ApiError(
        410,
        "The task of this key has ended: its agent returned, raised or met its time "
        "limit.",
        "task_ended",
    )


def _text_of(header: str) -> str:
    """Return the text of a header, which clients write as UTF-8 or as Latin-1."""
    # The server decodes UTF-8, and has other bytes as lone surrogates.
    written = header.encode("utf-8", "surrogateescape")
    try:
        return written.decode()
    except UnicodeDecodeError:
        return written.decode("latin-1")


def _unsupported(name: str) -> ApiError:
    return ApiError(
        400,
        f"The address of a training run has no {name}; leave it out.",
        "not_supported",
        param=name.split()[0],
    )
