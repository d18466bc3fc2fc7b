"""Playing an environment by hand: shows tasks, reads answers, shows rewards.

```
task -> show prompt -> read answer -> step --continues--> show observation -+
                            ^                                               |
                            +-----------------------------------------------+
                                       --ends--> show reward and score
```
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rl_cli.console import Terminal
from rl_cli.environment_choice import GivenTasks
from rl_distributed.batch.arrays import to_numpy
from rl_envs.agents.tasks import MAIN, AgentHost, agent_limits_of
from rl_envs.errors import AgentError
from rl_envs.interfaces import (
    EnvironmentInterface,
    as_columns,
    has_own,
    observation_messages,
    total_reward,
)
from rl_envs.testing.responses import gold_of

if TYPE_CHECKING:
    from rl_envs.agents.stand_in import AgentQuestion

__all__ = ["EnvironmentPlayer", "Score"]


@dataclass(slots=True)
class Score:
    """Score so far."""

    num_tasks: int = 0
    """Finished conversations, including unscored ones."""
    num_full: int = 0
    """Conversations with the full reward."""
    num_scored: int = 0
    total: float = 0.0

    def add(self, reward: float, full_reward: float) -> None:
        """Count a conversation; NaN: it is not scored."""
        self.num_tasks += 1
        if math.isnan(reward):
            return
        self.num_scored += 1
        self.total += reward
        self.num_full += reward >= full_reward

    def __str__(self) -> str:
        """Describe the score in one line."""
        mean = self.total / self.num_scored if self.num_scored else 0.0
        return (
            f"{self.num_full} of {self.num_tasks} with the full reward, "
            f"mean reward {mean:.3g}"
        )


class _InputEndedError(Exception):
    """There is nobody to answer the request of an agent any more."""


class EnvironmentPlayer:
    """Plays tasks with a person at the terminal, or with what is piped in.

    Args:
        env: The environment.
        terminal: Terminal for prompts, observations and rewards.
        answers: Input with the answers; a terminal gets a prompt sign.
        full_reward: Minimum reward of a right answer.
        max_turns: Maximum number of answers per conversation.
        one_line: True if each line is an answer; False if an empty line ends one; None:
            one line if the gold answer has one and answers are not run as programs.
        show_answer: Show the gold answer at the end of a task.
    """

    def __init__(
        self,
        env: EnvironmentInterface[Any],
        terminal: Terminal,
        answers: IO[str],
        *,
        full_reward: float = 1.0,
        max_turns: int = 50,
        one_line: bool | None = None,
        show_answer: bool = False,
    ) -> None:
        self.env, self.terminal, self.answers = env, terminal, answers
        self.full_reward, self.max_turns = full_reward, max_turns
        self.one_line, self.show_answer = one_line, show_answer
        self.score = Score()

    def play(self, tasks: GivenTasks) -> Score:
        """Play tasks in order until the last one or the end of the input.

        Raises:
            AgentError: An agent of the environment raised, or met its time limit.
        """
        runs_agents = agent_limits_of(self.env) is not None
        play_one = self._play_agent if runs_agents else self._play_one
        for number, row in enumerate(tasks.rows):
            self.terminal.raw(f"--- task {number + 1} of {len(tasks.rows)}")
            if not play_one(row, tasks.prompts[number], number):
                self.terminal.raw("the input has ended")
                break
        return self.score

    def _play_one(
        self,
        row: Mapping[str, Any],
        prompt: Sequence[Mapping[str, Any]],
        number: int,
    ) -> bool:
        """Play a conversation to its end; return False if the input ends first."""
        log = [dict(message) for message in prompt]
        gold = gold_of(row)
        for message in log:
            self._show(message)
        columns: Any = dict(row)
        if has_own(self.env, "reset"):
            [columns] = self.env.reset([columns], [number])
        try:
            return self._play_turns(log, columns, gold)
        finally:
            if has_own(self.env, "close"):
                self.env.close([self._columns])

    def _play_turns(
        self, log: list[dict[str, Any]], columns: Any, gold: str | None
    ) -> bool:
        self._columns, earned = columns, 0.0
        for turn in range(self.max_turns):
            answer = self._read(self._is_one_line(gold))
            if answer is None:
                return False
            log.append({"role": "assistant", "content": answer})
            # What is typed is on the screen already.
            if not self.answers.isatty():
                self._show(log[-1])
            result = as_columns(self.env.step([log], [columns]))
            columns = self._columns = result.metadata[0]
            reward = float(to_numpy(total_reward(result.rewards))[0])
            earned += reward
            for message in observation_messages(result.observations[0]):
                log.append(message)
                self._show(message)
            if bool(to_numpy(result.terminateds)[0]) or turn + 1 == self.max_turns:
                break
            if reward:
                self.terminal.raw(f"reward {reward:g}, {earned:g} so far")
        earned += self._of_group(log, columns)
        self._end(earned, gold)
        return True

    def _play_agent(
        self,
        row: Mapping[str, Any],
        prompt: Sequence[Mapping[str, Any]],
        number: int,
    ) -> bool:
        """Answer the requests of an agent; return False if the input ends first."""
        from rl_envs.agents.stand_in import (  # noqa: PLC0415 - needs an HTTP server
            AgentReply,
            run_agents,
        )

        gold, seen = gold_of(row), dict[str, list[dict[str, Any]]]()
        # One at a time, in threads: an agent may ask for several answers at once, and
        # there is one person.
        turn = asyncio.Lock()

        def reply(question: AgentQuestion) -> AgentReply:
            self._show_new(question, seen.setdefault(question.conversation, []))
            text = self._read(self._is_one_line(gold))
            if text is None:
                raise _InputEndedError
            said = {"role": "assistant", "content": text}
            if not self.answers.isatty():
                self._show(said)
            seen[question.conversation] = [*question.messages, said]
            return AgentReply(said)

        async def answer(question: AgentQuestion) -> AgentReply:
            async with turn:
                return await asyncio.to_thread(reply, question)

        assert isinstance(self.env, AgentHost)
        try:
            [played] = run_agents(self.env, [(list(prompt), dict(row))], answer)
        except _InputEndedError:
            return False
        if played.result.reward is None:
            raise AgentError(f"task {number + 1}: {played.result.error}")
        for name, part in played.result.reward.parts.items():
            self.terminal.raw(f"reward/{name}: {part:g}")
        self._end(played.result.reward.reward, gold)
        return True

    def _show_new(
        self, question: AgentQuestion, seen: Sequence[Mapping[str, Any]]
    ) -> None:
        """Show the messages of a request that are not on the screen already."""
        messages = question.messages
        known = len(seen) if messages[: len(seen)] == list(seen) else 0
        if question.conversation != MAIN:
            self.terminal.raw(f"(conversation {question.conversation})")
        for message in messages[known:]:
            self._show(message)

    def _of_group(self, log: Sequence[Mapping[str, Any]], columns: Any) -> float:
        """Return the group reward of the conversation, as the only one of its task."""
        groups = self.env.score_groups([[log]], [[columns]])
        return 0.0 if groups is None else float(to_numpy(total_reward(groups[0]))[0])

    def _end(self, earned: float, gold: str | None) -> None:
        self.score.add(earned, self.full_reward)
        shown = "not scored" if math.isnan(earned) else f"reward {earned:g}"
        self.terminal.raw(f"{shown} ({self.score})")
        if self.show_answer:
            known = (
                "this task has no gold answer" if gold is None else f"answer: {gold}"
            )
            self.terminal.raw(known)

    def _is_one_line(self, gold: str | None) -> bool:
        if self.one_line is not None:
            return self.one_line
        return not self.env.runs_programs and "\n" not in (gold or "")

    def _show(self, message: Mapping[str, Any]) -> None:
        if message.get("content"):
            self.terminal.raw(f"[{message.get('role')}] {message['content']}")

    def _read(self, one_line: bool) -> str | None:
        """Read an answer; return None at the end of the input."""
        lines: list[str] = []
        while True:
            # Piped answers get no prompt sign, which would only clutter the output.
            if self.answers.isatty():
                self.terminal.out.file.write("> " if one_line or not lines else "... ")
                self.terminal.out.file.flush()
            line = self.answers.readline()
            if not line:
                # The last answer of a file need not end with an empty line.
                return "\n".join(lines) if lines else None
            line = line.rstrip("\r\n")
            if one_line:
                return line
            # Only after some text: leading empty lines do not end an answer.
            if not line and lines:
                return "\n".join(lines)
            if line:
                lines.append(line)
