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

    async def _ask_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        stops: Sequence[Sequence[str] | None],
        seeds: Sequence[int],
    ) -> list[Reply]:
        room = asyncio.Semaphore(self.max_requests)
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        try:
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                asyncio.TaskGroup() as group,
            ):
                tasks = [
                    group.create_task(self._ask_one(session, room, self._body(*each)))
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

    async def _ask_one(
        self,
        session: aiohttp.ClientSession,
        room: asyncio.Semaphore,
        body: Mapping[str, Any],
    ) -> Reply:
        problem = ""
        async with room:
            # Timed from here: waiting for a free slot is not the server's delay.
            began = time.perf_counter()
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
            content = choice["message"]["content"] or ""
            tokens = (found.get("usage") or {}).get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.address} must answer with a chat completion: got "
                f"{text.strip()[:_SHOWN]!r}; is this the address of such a server?"
            ) from None
        return Reply(content, choice.get("finish_reason") == "length", tokens, time_s)
