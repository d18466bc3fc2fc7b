"""Concurrent requests to the judge's server, each with a deadline.

```
questions --> kept? --no--> at most max_requests in progress --> replies, kept
                                        |
                 num_attempts each, deadline each, budget of all
```
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_distributed.errors import ConfigError, MissingExtraError
from rl_envs.errors import JudgeError
from rl_envs.worlds.judge.config import JudgeConfig
from rl_envs.worlds.judge.kept_replies import KeptReplies, key_of
from rl_envs.worlds.judge.questions import Question

if TYPE_CHECKING:
    import openai

__all__ = ["Chat", "Costs"]

# Pause between two attempts, doubled each time up to the second.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


@dataclass(slots=True)
class Costs:
    """Counters of the cost of judging."""

    calls: int = 0
    """Replies received from the server."""
    kept: int = 0
    """Questions answered from kept replies."""
    retries: int = 0
    failures: int = 0
    """Questions without a reply after the last attempt."""
    tokens: int = 0
    """Tokens of questions and replies together, as reported by the server."""


class Chat:
    """Client of a model on a server.

    Args:
        config: The settings.
        role: What the model is called in errors.

    Raises:
        MissingExtraError: The package `openai` is missing.
        ConfigError: The variable of the key is not set.
        JudgeError: Replies cannot be kept.
    """

    def __init__(self, config: JudgeConfig, role: str = "judge") -> None:
        self._config, self._role = config, role
        self._openai = _import_openai(role)
        self._key = _key_of_server(config)
        self._kept = KeptReplies(config.cache_folder)
        self.costs = Costs()
        """Costs since the process started."""

    def ask(self, questions: Sequence[Question]) -> list[list[str | None]]:
        """Ask all questions and wait for the replies.

        Returns:
            For each question, one reply per vote; None if the server failed.

        Raises:
            JudgeError: No question has a reply, the server refuses them, or the budget
                is too small. Replies received so far are kept.
        """
        votes = self._config.votes
        keys = [
            key_of(self._request(question), vote)
            for question in questions
            for vote in range(votes)
        ]
        # Keyed, so that a repeated question is asked only once.
        missing = {
            key: questions[index // votes]
            for index, key in enumerate(keys)
            if self._kept.get(key) is None
        }
        self.costs.kept += len(keys) - len(missing)
        # Before the first request: half a batch of verdicts would be paid for and
        # useless.
        self._check_budget(len(missing))
        if missing:
            # The caller's thread, such as a notebook's, may already run an event loop.
            with ThreadPoolExecutor(1) as thread:
                asked = self._ask_all(missing, keep=self._kept.keep)
                thread.submit(asyncio.run, asked).result()
        found = [self._kept.get(key) for key in keys]
        return [found[at : at + votes] for at in range(0, len(found), votes)]

    def replies_to(self, questions: Sequence[Question]) -> list[str | None]:
        """Ask all questions once, keeping no reply; None where the server failed.

        Raises:
            JudgeError: No question has a reply, the server refuses them, or the budget
                is too small.
        """
        self._check_budget(len(questions))
        numbered = {str(number): each for number, each in enumerate(questions)}
        if not numbered:
            return []
        with ThreadPoolExecutor(1) as thread:
            replies = thread.submit(asyncio.run, self._ask_all(numbered)).result()
        return [replies.get(number) for number in numbered]

    def close(self) -> None:
        """Close the table of replies."""
        self._kept.close()

    def _check_budget(self, needed: int) -> None:
        limit = self._config.max_calls
        if limit is not None and self.costs.calls + needed > limit:
            raise JudgeError(
                f"max_calls must cover all questions to the judge: got {limit}, with "
                f"{self.costs.calls} replies used and {needed} more needed; raise it, "
                "keep replies in a cache_folder, or lower votes or opponents"
            )

    def _request(self, question: Question) -> dict[str, Any]:
        config = self._config
        return {
            "address": config.address,
            "model": config.model,
            "messages": question,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }

    async def _ask_all(
        self,
        missing: dict[str, Question],
        keep: Callable[[dict[str, str]], None] | None = None,
    ) -> dict[str, str]:
        slots = asyncio.Semaphore(self._config.max_requests)
        failures: list[str] = []
        client = self._openai.AsyncOpenAI(
            base_url=self._config.address,
            api_key=self._key,
            timeout=self._config.request_deadline_s,
            # Retries are made and counted here, each with its own deadline.
            max_retries=0,
        )
        replies: dict[str, str] = {}
        try:
            async with client, asyncio.TaskGroup() as group:
                for key, question in missing.items():
                    group.create_task(
                        self._ask_one(client, key, question, slots, replies, failures)
                    )
        except* JudgeError as refusals:
            # A refusal concerns all questions; the first has cancelled the others.
            raise refusals.exceptions[0] from None
        finally:
            # Also after an error: these replies are paid for.
            if keep is not None:
                keep(replies)
            self.costs.calls += len(replies)
            self.costs.failures += len(failures)
        # A few failures leave rows unscored; none at all means that the judge is down.
        if not replies:
            raise JudgeError(
                f"the {self._role} at {self._config.address} must answer: "
                f"{len(missing)} questions, each tried {self._config.num_attempts} "
                f"times, got no reply ({failures[0]}); start it, or correct address or "
                "request_deadline_s"
            )
        return replies

    async def _ask_one(
        self,
        client: openai.AsyncOpenAI,
        key: str,
        question: Question,
        slots: asyncio.Semaphore,
        replies: dict[str, str],
        failures: list[str],
    ) -> None:
        """Add a reply, or the reason why the last attempt failed.

        Raises:
            JudgeError: The server refuses the request.
        """
        # Held during pauses, too, so that a busy server gets fewer requests.
        async with slots:
            for attempt in range(self._config.num_attempts):
                if attempt:
                    self.costs.retries += 1
                    pause = _FIRST_PAUSE_S * 2 ** (attempt - 1)
                    await asyncio.sleep(min(pause, _LONGEST_PAUSE_S))
                reply, reason = await self._try(lambda: self._send(client, question))
                if reply is not None:
                    replies[key] = reply
                    return
        failures.append(reason)

    async def _send(self, client: openai.AsyncOpenAI, question: Question) -> str:
        request = self._request(question)
        # Part of the key of kept replies, but no argument of the server.
        del request["address"]
        answer = await client.chat.completions.create(**request)
        if answer.usage is not None:
            self.costs.tokens += answer.usage.total_tokens
        # None for a reply without text, which is then one without a verdict.
        return answer.choices[0].message.content or ""

    async def _try(self, send: Callable[[], Awaitable[str]]) -> tuple[str | None, str]:
        """Return the reply to one attempt, or the reason for its failure."""
        errors = self._openai
        deadline_s = self._config.request_deadline_s
        try:
            # The client's own timeout applies to each read, so a server that sends a
            # byte now and then would never reach it.
            async with asyncio.timeout(deadline_s):
                return await send(), ""
        except (TimeoutError, errors.APITimeoutError):
            return None, f"no reply within {deadline_s:g} s"
        except (errors.RateLimitError, errors.InternalServerError) as error:
            return None, f"status {error.status_code}"
        except errors.APIConnectionError as error:
            return None, f"no connection: {error.__cause__ or error}"
        except errors.APIStatusError as error:
            raise JudgeError(
                f"the {self._role} at {self._config.address} refuses a request with "
                f"status {error.status_code}: {str(error)[:300]}; correct model, "
                "api_key_variable or address"
            ) from None
        except (errors.OpenAIError, ValueError, IndexError, TypeError) as error:
            return None, f"no completion: {type(error).__name__} {str(error)[:200]}"


def _key_of_server(config: JudgeConfig) -> str:
    name = config.api_key_variable
    if name is None:
        # The client requires a key; servers without keys ignore it.
        return "none"
    key = os.environ.get(name)
    if not key:
        raise ConfigError(
            f"api_key_variable must name an environment variable that holds the key of "
            f"the judge: got {name!r}, which is not set; export it where the "
            "environment runs"
        )
    return key


def _import_openai(role: str) -> Any:
    try:
        import openai  # noqa: PLC0415 - only a judge needs it
    except ImportError as error:
        raise MissingExtraError(
            f"the {role} needs the package openai, which cannot be imported "
            f"({error}); pip install 'rl-envs[judge]'"
        ) from error
    return openai
