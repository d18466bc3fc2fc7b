"""Load balancing: a request goes to the replica with the fewest outstanding tokens.

Everything here runs in the router's event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Balancer", "Endpoint", "estimated_tokens"]

# The default of `max_tokens` in OpenAI's completions interface.
_DEFAULT_NEW_TOKENS = {"/v1/completions": 16}
# Used if the request leaves the length of the answer to the model.
_USUAL_ANSWER = 256
_CHARACTERS_PER_TOKEN = 4


@dataclass(eq=False)
class Endpoint:
    """One process of a replica, as the router sees it."""

    replica: int
    """Number of the replica; a process that replaces another has the same."""
    url: str
    """Address of its server."""
    num_requests: int = 0
    """Number of requests in progress."""
    num_tokens: int = 0
    """Estimated tokens of these requests."""
    num_served: int = 0
    """Number of requests so far."""


class Balancer:
    """Knows the replicas that are up, and the load of each."""

    def __init__(self) -> None:
        self._up: dict[int, Endpoint] = {}
        self._changed = asyncio.Condition()
        self.is_hopeless = False
        """Whether no replica will ever come up again."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """The replicas that take requests, by number."""
        return [self._up[number] for number in sorted(self._up)]

    @property
    def num_requests(self) -> int:
        """Requests that replicas work on."""
        return sum(endpoint.num_requests for endpoint in self._up.values())

    async def put(self, endpoint: Endpoint) -> None:
        """Let a replica take requests from now on."""
        async with self._changed:
            self._up[endpoint.replica] = endpoint
            self._changed.notify_all()

    def take_out(self, endpoint: Endpoint) -> bool:
        """Give a replica no more requests; False if it gets none already."""
        # By identity: a process that has replaced this one has the same number.
        if self._up.get(endpoint.replica) is not endpoint:
            return False
        del self._up[endpoint.replica]
        return True

    async def give_up(self) -> None:
        """Tell all requests that wait for a replica that there will be none."""
        async with self._changed:
            self.is_hopeless = True
            self._changed.notify_all()

    def choose(self, avoid: Collection[Endpoint] = ()) -> Endpoint | None:
        """Return the least loaded replica; one to avoid only if there is no other."""
        up = self.endpoints
        fit = [endpoint for endpoint in up if endpoint not in avoid] or up
        if not fit:
            return None
        # Among idle replicas the one that served least, so that they take turns.
        return min(
            fit, key=lambda e: (e.num_tokens, e.num_requests, e.num_served, e.replica)
        )

    async def wait_for_one(self, avoid: Collection[Endpoint] = ()) -> Endpoint | None:
        """Wait for a replica and return the least loaded; None if none will come."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._up) or self.is_hopeless)
        return self.choose(avoid)

    @contextmanager
    def load(self, endpoint: Endpoint, tokens: int) -> Iterator[None]:
        """Count a request as work of a replica for as long as the block runs."""
        endpoint.num_requests += 1
        endpoint.num_tokens += tokens
        endpoint.num_served += 1
        try:
            yield
        finally:
            endpoint.num_requests -= 1
            endpoint.num_tokens -= tokens


def estimated_tokens(path: str, body: Mapping[str, Any]) -> int:
    """Estimate the tokens of a request: its prompts and its longest answers.

    Args:
        path: Path of the request.
        body: The request; malformed fields count as nothing, and are refused later.
    """
    # Without a tokenizer, which would cost more than an estimate is worth.
    prompt = body.get("messages", body.get("prompt", ""))
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    longest = _count(limit, _DEFAULT_NEW_TOKENS.get(path, _USUAL_ANSWER))
    samples = _count(body.get("n"), 1)
    num_prompts = 1
    if path == "/v1/completions" and _is_batch(prompt):
        num_prompts = len(prompt)
    return _size(prompt) + longest * samples * num_prompts


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _is_batch(prompt: Any) -> bool:
    return (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    )


def _size(value: Any) -> int:
    """Return the tokens of a prompt: ids count one each, text by its length."""
    if isinstance(value, str):
        return len(value) // _CHARACTERS_PER_TOKEN + 1
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return len(value)
        return sum(_size(item) for item in value)
    if isinstance(value, Mapping):
        return sum(_size(item) for item in value.values())
    return 0
