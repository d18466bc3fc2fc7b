"""Client of a server with chat completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rl_distributed.errors import ConfigError
from rl_models.errors import GenerationError

__all__ = ["ChatServer", "Reply"]

_ROLES = frozenset({"system", "user", "assistant"})
_SHOWN = 200
# Replies arrive whole, one per request.
_NOT_FORWARDED = ("stream", "stream_options", "n", "max_completion_tokens")
# Pause between two attempts, doubled each time up to the second.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the server to one conversation."""

    text: str | None
    """Text of the reply; None: there was none."""
    is_truncated: bool = False
    """True if it was cut off at the token limit."""
    num_tokens: int | None = None
    """Number of tokens reported by the server; None: not reported."""
    time_s: float = 0.0
    """Seconds from the first attempt to the reply."""
    problem: str = ""
    """Reason for a missing reply."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """The whole message, perhaps with tool calls; {} without a reply."""


@dataclass(frozen=True)
class ChatServer:
    """A server and the settings of requests to it.

    Raises:
        ConfigError: The address is invalid.
    """

    address: str
    """Address such as `http://127.0.0.1:8000`, with or without `/v1`."""
    model: str
    """Name of the model in requests."""
    # Shown nowhere: dataclasses appear in tracebacks and logs.
    key: str | None = field(default=None, repr=False)
    """API key sent with every request; None: no key."""
    temperature: float = 1.0
    max_new_tokens: int = 256
    deadline_s: float = 120.0
    """Time limit of one attempt, including the whole reply, in seconds."""
    num_attempts: int = 3
    """Number of attempts if the server cannot be reached or fails."""
    max_requests: int = 16
    """Maximum number of concurrent requests."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "--address must be an address such as http://127.0.0.1:8000: got "
                f"{self.address!r}"
            )

    def ask(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        stops: Sequence[Sequence[str] | None],
        seeds: Sequence[int],
    ) -> list[Reply]:
        """Ask for the next message of each conversation, and wait for all.

        Args:
            conversations: Messages; roles unknown to chat models become `user`.
            stops: Strings that stop the reply, for each conversation.
            seeds: Seed for each conversation, which a server may ignore.

        Raises:
            ConfigError: The server refuses a request: its key, model or size is wrong.
            GenerationError: No conversation got a reply.
        """
        replies = asyncio.run(self._ask_all(conversations, stops, seeds))
        if replies and all(reply.text is None for reply in replies):
            raise GenerationError(
                f"{self.address} answered none of {len(replies)} requests, each tried "
                f"{self.num_attempts} times ({replies[0].problem}); start the server, "
                "correct --address, or raise --deadline-s"
            )
        return replies

    async def complete(self, fields: Mapping[str, Any], seed: int) -> Reply:
        """Have the server answer a request of another client.

        Args:
            fields: Body of the request; its model and sampling settings are replaced by
                those of this object, and a smaller `max_tokens` counts.
            seed: Seed, which a server may ignore.

        Raises:
            ConfigError: The server refuses the request.
        """
        kept = {name: v for name, v in fields.items() if name not in _NOT_FORWARDED}
        asked = fields.get("max_completion_tokens") or fields.get("max_tokens")
        most = self.max_new_tokens
        body = {
            **kept,
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": min(asked, most) if isinstance(asked, int) else most,
            "seed": seed,
        }
        async with aiohttp.ClientSession(headers=self._headers) as session:
            return await self._ask_one(session, body)

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    async def _ask_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        stops: Sequence[Sequence[str] | None],
        seeds: Sequence[int],
    ) -> list[Reply]:
        room = asyncio.Semaphore(self.max_requests)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers) as session,
                asyncio.TaskGroup() as group,
            ):
                tasks = [
                    group.create_task(self._ask_in(room, session, self._body(*each)))
                    for each in zip(conversations, stops, seeds, strict=True)
                ]
        except* ConfigError as refusals:
            # A refusal concerns all requests; the first has cancelled the others.
            raise refusals.exceptions[0] from None
        return [task.result() for task in tasks]

    def _body(
        self, log: Sequence[Mapping[str, Any]], stop: Sequence[str] | None, seed: int
    ) -> dict[str, Any]:
        messages = [
            {
                "role": m["role"] if m["role"] in _ROLES else "user",
                "content": m["content"],
            }
            for m in log
        ]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": self.max_new_tokens,
            "seed": seed,
        }
        return {**body, "stop": list(stop)} if stop else body

    async def _ask_in(
        self,
        room: asyncio.Semaphore,
        session: aiohttp.ClientSession,
        body: Mapping[str, Any],
    ) -> Reply:
        async with room:
            return await self._ask_one(session, body)

    async def _ask_one(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any]
    ) -> Reply:
        problem, began = "", time.perf_counter()
        for attempt in range(self.num_attempts):
            if attempt:
                pause_s = _FIRST_PAUSE_S * 2 ** (attempt - 1)
                await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
            try:
                status, text = await self._send(session, body)
            except TimeoutError:
                problem = f"no reply within {self.deadline_s:g} s"
                continue
            except aiohttp.ClientError as error:
                problem = f"no connection: {error}"
                continue
            # Overload and failures of the server may pass; other errors will not.
            if status >= 500 or status == 429:
                problem = f"status {status}"
                continue
            return self._read(status, text, time.perf_counter() - began)
        return Reply(None, time_s=time.perf_counter() - began, problem=problem)

    async def _send(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any]
    ) -> tuple[int, str]:
        # Both forms are in use among clients of this interface.
        base = self.address.rstrip("/").removesuffix("/v1")
        async with session.post(
            f"{base}/v1/chat/completions",
            json=body,
            timeout=aiohttp.ClientTimeout(total=self.deadline_s),
        ) as answer:
            return answer.status, (await answer.read()).decode(errors="replace")

    def _read(self, status: int, text: str, time_s: float) -> Reply:
        """Parse a reply; a refusal concerns all requests, so it raises."""
        if status >= 400:
            raise ConfigError(
                f"{self.address} refuses a request with status {status}: "
                f"{text.strip()[:_SHOWN]}; correct --served-model, --key-file or "
                "--max-new-tokens"
            )
        try:
            found = json.loads(text)
            choice = found["choices"][0]
            message = dict(choice["message"])
            content = message.get("content") or ""
            tokens = (found.get("usage") or {}).get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.address} must answer with a chat completion: got "
                f"{text.strip()[:_SHOWN]!r}; is this the address of such a server?"
            ) from None
        is_cut = choice.get("finish_reason") == "length"
        return Reply(content, is_cut, tokens, time_s, message=message)
