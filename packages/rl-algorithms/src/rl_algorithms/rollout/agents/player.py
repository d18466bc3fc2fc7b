"""`AgentPlayer`: runs agents on the prompts of a rollout."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl_algorithms.data.types import PromptSpec, Tokenizer
from rl_algorithms.rollout.agents.conversation import AgentConversation
from rl_algorithms.rollout.agents.model import ServedModel, Settings
from rl_algorithms.rollout.agents.model_call import ModelCall
from rl_algorithms.rollout.agents.session import AgentSession
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.generator_desk import GeneratorDesk
from rl_algorithms.rollout.judge import Judge
from rl_algorithms.rollout.play import Play
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.rollout.trajectories import Trajectories
from rl_algorithms.rollout.worker_crew import WorkerCrew
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_envs.agents.tasks import (
    AgentHost,
    AgentJob,
    AgentResult,
    agent_limits_of,
)
from rl_envs.interfaces import EnvironmentInterface
from rl_models.interfaces import GenerationInterface
from rl_models.tokens.tokenizer import pad_token_id
from rl_models.types import SamplingParams

if TYPE_CHECKING:
    from rl_algorithms.rollout.agents.policy_server import PolicyServer

__all__ = ["AgentPlayer", "Ask"]

Ask = Callable[[Sequence[ModelCall]], None]
"""Hands rows to a generator."""
_Crew = WorkerCrew[AgentJob, AgentResult]

_LOOK_S = 0.5
_CLOSE_S = 10.0
# Allowance beyond the time limit of a task, for the way to its worker and back.
_MARGIN_S = 60.0


class AgentPlayer:
    """Opens conversations of agents, and plays them.

    The address and the threads start with the first conversation and end with `close`.

    Args:
        generation: The policy as a sampler.
        environment: Environment that runs agents.
        tokenizer: The policy's tokenizer.
        config: Settings with the maximum row lengths.
        use_chat_template: Whether to format messages with the chat template; None: if
            the tokenizer has one.
        judge: Judge that records failures.
        on_progress: Called with each answer, in any thread.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environment: EnvironmentInterface[Any],
        tokenizer: Tokenizer,
        config: RolloutConfig,
        use_chat_template: bool | None,
        judge: Judge,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_progress = on_progress
        limits = agent_limits_of(environment)
        assert limits is not None  # whoever makes it has looked
        self._generation, self._host = generation, cast("AgentHost", environment)
        self._tokenizer, self._judge = tokenizer, judge
        self._task_limits = environment.task_limits
        self.limits = limits
        """Limits of the agents."""
        settings = getattr(generation, "config", None)
        longest = getattr(settings, "max_context_length", None)
        lengths = [config.max_total_sequence_length, longest]
        self._model = ServedModel(
            tokenizer,
            limits,
            min((n for n in lengths if n is not None), default=None),
            use_chat_template,
        )
        params = getattr(settings, "sampling_params", None)
        self._base = params() if callable(params) else SamplingParams()
        self._server: PolicyServer | None = None
        self._crew: _Crew | None = None
        self._starting = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, tuple[int, AgentConversation]] = {}
        self._failure: BaseException | None = None
        self._on_failure: Callable[[BaseException], None] | None = None

    def play(
        self, batch: BatchedDataDict[PromptSpec], names: RowNames, play: Play
    ) -> Trajectories:
        """Run agents on all rows, and wait for them.

        Args:
            batch: Prompts as columns of `rl_collate_fn`.
            names: The rows.
            play: Settings of the rollout.

        Raises:
            DeadlineExceededError: Agents have not ended long after their time limit.
            Exception: An error of the environment or the generator that a retry cannot
                fix.
        """
        # One of an earlier rollout has been raised already.
        self._failure = None
        place = play.seed, play.step, play.first_prompt_index
        rows = [
            self.open(batch, names.select(np.array([row])), place)
            for row in range(len(names.prompt))
        ]
        settings = Settings(play.greedy, play.sampling, play.sampling or self._base)
        pad = pad_token_id(self._tokenizer)
        left = _Countdown(len(rows))
        desk = GeneratorDesk(
            self._generation,
            pad,
            # Weights are sent between rollouts, when no desk exists.
            _NoWeights(),
            0,
            on_answers=lambda rows, error: self._on_progress(),
            on_loaded=lambda version: None,
            on_failure=self._note_failure,
        )
        try:
            with play.span("generation"):
                for row in rows:
                    self.begin(row, settings, desk.ask, left.down)
                self._wait(left, len(rows))
        finally:
            for row in rows:
                self.cancel(row)
            desk.close(_CLOSE_S)
        for row in rows:
            if row.error is not None:
                self._judge.note(row.error, 1)
        played = [row.played() for row in rows]
        return Trajectories.joined(played, {"input_ids": pad, "token_versions": -1})

    def open(
        self,
        batch: BatchedDataDict[PromptSpec],
        names: RowNames,
        place: tuple[int, int, int],
    ) -> AgentConversation:
        """Return a conversation that has not begun.

        Args:
            batch: Prompts as columns of `rl_collate_fn`.
            names: One row.
            place: Run's seed, step, and index of the first prompt in the step.
        """
        return AgentConversation(
            batch, names, place, self.limits.limit_reward, self._task_limits
        )

    def begin(
        self,
        row: AgentConversation,
        settings: Settings | None,
        ask: Ask,
        on_end: Callable[[], None],
        on_version: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Run an agent on a row.

        Args:
            row: Conversation from `open`.
            settings: Sampling parameters; None for those of the generator.
            ask: Function that passes rows to the generator.
            on_end: Called at the end of the agent, in any thread.
            on_version: Called with the weight version of each answer.
        """
        server, crew = self._start()
        settings = settings or Settings(base=self._base)
        session = AgentSession(
            self._model, settings, row.seed_of, ask, on_version, row.limits
        )
        row.session = session
        number = next(self._numbers)
        # With the row itself, which must stay alive while its id is a key.
        self._running[id(row)] = (number, row)
        # Before the agent begins, whose first request needs the key.
        server.open(session)

        def end(result: AgentResult | Exception) -> None:
            row.end(result)
            self._running.pop(id(row), None)
            server.end(session, on_end)

        crew.begin(
            AgentJob(
                number,
                row.log,
                row.metadata,
                server.base_url,
                session.key,
                row.limits.seconds,
            ),
            end,
        )

    def cancel(self, row: AgentConversation) -> None:
        """Cancel a row that is no longer wanted, unless it has ended."""
        found = self._running.pop(id(row), None)
        if found is None or self._crew is None or self._server is None:
            return
        self._crew.cancel(found[0])
        if row.session is not None:
            self._server.end(row.session, lambda: None)

    def tell_failures(self, on_failure: Callable[[BaseException], None]) -> None:
        """Add a callback for errors that a retry cannot fix."""
        self._on_failure = on_failure

    def close(self) -> None:
        """End all agents and the address; the next conversation restarts them."""
        with self._starting:
            # Only taken under the lock: closing waits for threads, whose callbacks may
            # call `begin` and need it.
            server, self._server = self._server, None
            crew, self._crew = self._crew, None
        self._running.clear()
        if crew is not None:
            crew.close()
        if server is not None:
            server.close()

    def _start(self) -> tuple[PolicyServer, _Crew]:
        with self._starting:
            if self._server is None:
                self._server = _server_class()(self._model)
            if self._crew is None:
                self._crew = WorkerCrew(
                    self._host.poll_agents,
                    self._host.num_agent_workers,
                    self.limits.max_at_once,
                    self._note_failure,
                )
            return self._server, self._crew

    def _note_failure(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        if self._on_failure is not None:
            self._on_failure(error)

    def _wait(self, left: _Countdown, count: int) -> None:
        capacity = self._start()[1].capacity
        # Jobs beyond the capacity wait for a slot, so each round may take the time
        # limit.
        rounds = -(-count // capacity)
        limit_s = rounds * (self.limits.time_limit_s + _MARGIN_S)
        looks = 0
        # In short waits: a failure that ends no row must end the rollout as well.
        while not left.wait(_LOOK_S):
            if self._failure is not None:
                raise self._failure
            looks += 1
            if looks * _LOOK_S > limit_s:
                raise DeadlineExceededError(
                    f"{left.count} of {count} agents have not ended within "
                    f"{limit_s:g} s, though each is ended after "
                    f"{self.limits.time_limit_s:g} s (env.settings.time_limit_s): "
                    "their workers do not get to it; lower env.settings.max_at_once, "
                    "or raise env.num_workers"
                )
        if self._failure is not None:
            raise self._failure


class _Countdown:
    """Counter of unfinished rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()

    def down(self) -> None:
        """Count one row as ended."""
        with self._changed:
            self.count -= 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Return whether all have ended, after a short wait if they have not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count <= 0, timeout_s)


def _server_class() -> type[PolicyServer]:
    try:
        from rl_algorithms.rollout.agents.policy_server import (  # noqa: PLC0415
            PolicyServer as PolicyServerClass,
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training an agent needs the package {error.name!r}, which serves the "
            f"policy at an address; run: pip install {error.name}"
        ) from error
    return PolicyServerClass


class _NoWeights:
    def number_of(self, version: int) -> int:
        raise AssertionError("weights of a run in turns move between two rollouts")

    load = number_of
