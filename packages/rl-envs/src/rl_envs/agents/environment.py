"""`AgentEnvironment`: any program that talks to the policy, as an environment."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from rl_envs.agents.config import AgentConfig, FileAgentConfig
from rl_envs.agents.functions import RunAgent, build_agent
from rl_envs.agents.programs import ProgramOutput, build_program
from rl_envs.agents.runner import AgentRunner, Reward
from rl_envs.agents.tasks import (
    AgentJob,
    AgentLimits,
    AgentPoll,
    AgentReward,
    AgentTask,
    read_reward,
)
from rl_envs.errors import AgentError, AgentSetupError, EnvironmentContractError
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn, MessageLog
from rl_envs.python_file import PythonFileError, load_from_file
from rl_envs.registry import register_env
from rl_envs.reward_file import FileReward, FileRewardConfig

__all__ = ["AgentEnvironment", "FileAgent"]

_CONNECT_S = 5.0


class AgentEnvironment(EnvironmentInterface[Any]):
    """Lets a program talk to the policy, and rewards what the policy said.

    The run serves the policy by OpenAI's interface and records the tokens of each
    answer; what is said in a task is trained on with the task's reward.

    Args:
        agent: `async def agent(task, client) -> reward`, where `task` is an `AgentTask`
            and `client` an `openai.AsyncOpenAI`; `(task, base_url, api_key)` is taken
            as well, and functions that are no coroutines, each in a thread.
        config: Limits, or give some by name.
        **settings: Fields of `AgentConfig`.

    Raises:
        AgentSetupError: The parameters of the agent cannot be filled.
    """

    many_turns = True
    # Polls, and calls for validation, come from several threads.
    calls_at_once = 2

    def __init__(
        self,
        agent: Callable[..., Any],
        config: AgentConfig | None = None,
        **settings: Any,
    ) -> None:
        if config is None:
            config = AgentConfig.from_dict(
                settings, source="the arguments of the agent"
            )
        elif settings:
            raise EnvironmentContractError(
                "AgentEnvironment takes a config or settings by name, not both: got "
                f"{', '.join(sorted(settings))}"
            )
        build_agent(agent)  # so that its parameters are known to be right
        self._function = agent
        self._begin(config)

    def _begin(self, config: AgentConfig) -> None:
        self._config = config
        self._starting = threading.Lock()
        self._runner: AgentRunner | None = None
        self._reached: set[str] = set()
        self._process = uuid.uuid4().hex

    def __getstate__(self) -> dict[str, Any]:
        """Travel to another process without what runs here."""
        # Threads, locks and open connections cannot be pickled, and the set of reached
        # addresses holds for one machine only.
        state = dict(self.__dict__)
        for name in ("_starting", "_runner", "_reached", "_process"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Arrive in another process."""
        self.__dict__.update(state)
        self._begin(self._config)

    def _run_agent(self) -> RunAgent:
        return build_agent(self._function)

    def _read_reward(self) -> Reward:
        async def read(task: AgentTask, value: Any) -> AgentReward:
            return read_reward(value)

        return read

    @property
    def agent_limits(self) -> AgentLimits:
        """What whoever serves the model must know."""
        return self._config.limits

    @property
    def num_agent_workers(self) -> int:
        """Processes that run agents: this one."""
        return 1

    def poll_agents(
        self,
        begin: Sequence[AgentJob],
        cancel: Sequence[int],
        wait_s: float,
        worker: int = 0,
    ) -> AgentPoll:
        """Begin and cancel jobs, and return those that have ended; see `AgentHost`.

        Raises:
            AgentSetupError: The address of the run is out of reach.
        """
        with self._starting:
            if self._runner is None:
                self._runner = AgentRunner(
                    self._run_agent(), self._read_reward(), self._config
                )
        # Before any job starts: an agent would report it as an error of each task
        # instead.
        for job in begin:
            self._check_reach(job.base_url)
        runner = self._runner
        runner.cancel(cancel)
        runner.begin(begin)
        return AgentPoll(runner.finished(wait_s), self._process)

    def _check_reach(self, base_url: str) -> None:
        """Refuse to run agents on another machine than the one with the address."""
        if base_url in self._reached:
            return
        address = urlsplit(base_url)
        try:
            host, port = address.hostname or "", address.port or 80
            # A connection is enough: whether the key is right, the first request shows.
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            raise AgentSetupError(
                f"agents on {socket.gethostname()} cannot reach the policy at "
                f"{base_url} ({error.strerror or error}): it listens on the loopback "
                "address of the run's driver, so the environment must run on the "
                "driver's node; lower env.num_workers, or pass an AgentEnvironment "
                "object, which runs in the driver"
            ) from error
        self._reached.add(base_url)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Refuse: an agent asks the policy by itself.

        Raises:
            EnvironmentContractError: Always, unless the batch is empty.
        """
        if len(metadata):
            raise EnvironmentContractError(
                "an AgentEnvironment does not judge answers, it runs a program that "
                "asks for them: train with an algorithm that samples, or use a reward "
                "function to judge answers that are there"
            )
        # The contract of environments allows an empty batch.
        empty = np.zeros(0, np.float32)
        return EnvironmentReturn([], [], [], empty, empty.astype(bool), None)

    def shutdown(self) -> None:
        """End all agents."""
        with self._starting:
            # Taken under the lock and closed outside it, as closing waits for the
            # agents.
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


@register_env("agent")
class FileAgent(AgentEnvironment):
    """Runs a program of your own that talks to the policy: a Python file, a command.

    Args:
        config: The settings.

    Raises:
        AgentSetupError: The file cannot be run, or the parameters of the agent cannot
            be filled.
        RewardError: The reward function cannot be used.
    """

    config_class = FileAgentConfig

    def __init__(self, config: FileAgentConfig) -> None:
        self._settings = config
        self._judge: FileReward | None = None
        if config.reward_file is not None:
            self._judge = FileReward(
                FileRewardConfig(
                    file=config.reward_file, function=config.reward_function
                )
            )
        self._begin(config)
        # Now, so that a broken file fails at the start instead of in the first task.
        if config.file is not None:
            self._run_agent()

    def _run_agent(self) -> RunAgent:
        settings = self._settings
        if settings.file is None:
            return build_program(settings.command_line)
        try:
            return build_agent(
                load_from_file(
                    settings.file, settings.function, kind="agent", thing="function"
                )
            )
        except PythonFileError as error:
            remedy = "; name one by env.settings.function" if error.is_name else ""
            raise AgentSetupError(f"{error}{remedy}") from error.__cause__

    def _read_reward(self) -> Reward:
        judge, source = self._judge, self._settings.reward_from

        async def read(task: AgentTask, value: Any) -> AgentReward:
            if judge is None:
                if isinstance(value, ProgramOutput):
                    value = value.reward(source)
                return read_reward(value)
            # A reward function may take its time, and others go on.
            return await asyncio.to_thread(_judged, judge, task, value)

        return read


def _judged(judge: FileReward, task: AgentTask, value: Any) -> AgentReward:
    """Score what an agent returned, or a program wrote, by a reward function."""
    if isinstance(value, ProgramOutput):
        value.check()
        value = value.text
    if not isinstance(value, str):
        raise AgentError(
            "with env.settings.reward_file the agent must return the text to score: "
            f"got {type(value).__name__} {value!r:.60}"
        )
    # As a conversation: the function is called as it is for any other environment.
    log = [*task.messages, {"role": "assistant", "content": value}]
    scores = judge.step([log], [dict(task.columns)]).rewards
    if isinstance(scores, Mapping):
        named = {n.removeprefix("reward/"): part for n, part in scores.items()}
        return read_reward({name: float(part[0]) for name, part in named.items()})
    return read_reward(float(scores[0]))
