"""`AheadAgents`: has agents work on what is sampled ahead."""

from __future__ import annotations

from collections.abc import Callable

from rl_algorithms.rollout.agents.conversation import AgentConversation
from rl_algorithms.rollout.agents.player import AgentPlayer, Ask
from rl_algorithms.trainers.ahead.jobs import Job

__all__ = ["AheadAgents"]


class AheadAgents:
    """Plays jobs whose conversations agents lead.

    Args:
        player: Runs agents.
        on_failure: Is told of a mistake that no further try would mend.
    """

    def __init__(
        self, player: AgentPlayer, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._player = player
        player.tell_failures(on_failure)

    def begin(
        self,
        job: Job,
        ask: Ask,
        on_end: Callable[[Job, Exception | None], None],
    ) -> None:
        """Have an agent work on a job.

        Args:
            job: The job.
            ask: Hands the rows of its requests to the generator.
            on_end: Is told that it has ended, and what was lost where it was not the
                agent that failed.
        """
        row = job.conversation
        assert isinstance(row, AgentConversation)

        def end() -> None:
            if job.is_cancelled:
                return
            if job.oldest_version is None:
                # It has asked for nothing; the schedule wants to know all the same.
                job.note_version(job.asked.version)
            on_end(job, row.error if row.is_lost else None)

        self._player.begin(row, None, ask, end, job.note_version)

    def cancel(self, job: Job) -> None:
        """End the agent of a job."""
        if isinstance(job.conversation, AgentConversation):
            self._player.cancel(job.conversation)
