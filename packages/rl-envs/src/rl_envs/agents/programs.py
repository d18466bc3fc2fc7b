"""Programs with a command line as agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_envs.agents.functions import RunAgent
from rl_envs.agents.tasks import AgentTask
from rl_envs.errors import AgentError

__all__ = ["ProgramOutput", "build_program"]

_MOST_BYTES = 1 << 20
_TAIL = 2000
_GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """What a program left."""

    exit_code: int
    text: str
    """Its standard output, no more than the last megabyte."""
    errors: str
    """The end of its standard error."""

    def reward(self, source: str) -> float:
        """Return the reward that the program gives itself.

        Args:
            source: `last_line` or `exit_code`.

        Raises:
            AgentError: The last line is no number, or the program failed.
        """
        if source == "exit_code":
            return float(self.exit_code == 0)
        self.check()
        lines = self.text.strip().splitlines()
        try:
            # No line at all is handled as a line that is no number.
            return float(lines[-1]) if lines else float("x")
        except ValueError:
            said = f"got {lines[-1]!r:.80}" if lines else "it wrote nothing"
            raise AgentError(
                "the last line that the program writes must be its reward, a number: "
                f"{said}; write it, or set env.settings.reward_from=exit_code or "
                f"env.settings.reward_file{self._shown()}"
            ) from None

    def check(self) -> None:
        """Refuse a program that failed.

        Raises:
            AgentError: Its exit code is not 0.
        """
        if self.exit_code:
            raise AgentError(
                f"the program ended with exit code {self.exit_code}{self._shown()}"
            )

    def _shown(self) -> str:
        return f". It wrote:\n{self.errors}" if self.errors else ""


def build_program(command: Sequence[str]) -> RunAgent:
    """Return how to run a program as an agent; it gives a `ProgramOutput`."""

    async def run(task: AgentTask, base_url: str, api_key: str) -> ProgramOutput:
        variables = {
            **os.environ,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": task.model,
            # The address is on this machine.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=variables,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                # So that what it starts can be ended with it.
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(
                f"the program {command[0]!r} cannot be started: {error.strerror}"
            ) from error
        try:
            return await _finished(process, _as_json(task))
        finally:
            await _end(process)

    return run


def _as_json(task: AgentTask) -> bytes:
    known: dict[str, Any] = {
        "prompt": task.prompt,
        "messages": task.messages,
        "model": task.model,
    }
    # A column that is no JSON, such as an image, is shown as text.
    return json.dumps({**task.columns, **known}, default=str).encode()


async def _finished(process: asyncio.subprocess.Process, given: bytes) -> ProgramOutput:
    # All at once: a program blocks once a pipe that nobody reads is full, and it may
    # write before it reads, or read nothing.
    _, text, errors = await asyncio.gather(
        _give(process.stdin, given), _tail(process.stdout), _tail(process.stderr)
    )
    return ProgramOutput(await process.wait(), text, errors[-_TAIL:])


async def _give(stream: asyncio.StreamWriter | None, given: bytes) -> None:
    assert stream is not None
    # A program that reads no input may have ended already.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(given)
        await stream.drain()
    stream.close()


async def _tail(stream: asyncio.StreamReader | None) -> str:
    kept = b""
    while stream is not None and (part := await stream.read(1 << 16)):
        # The end is kept, because the reward stands in the last line.
        kept = (kept + part)[-_MOST_BYTES:]
    return kept.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program and everything that it has started and left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # The group, after a normal end as well: children may have been left running.
        # Its number is the program's, which leads the session.
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        # A process in disk wait does not react to the signal; do not wait for it for
        # ever.
        async with asyncio.timeout(_GONE_S):
            await process.wait()
