"""Agents as functions and programs: execution, limits and rewards."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
import time

import pytest

from rl_distributed.errors import ConfigError
from rl_envs import AgentEnvironment, AgentReward, AgentTask, create_env
from rl_envs.agents.config import FileAgentConfig
from rl_envs.agents.tasks import AgentJob
from rl_envs.errors import AgentSetupError

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def base_url():
    """An address with a listening socket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


class Runs:
    """Runs jobs in an environment and collects their results."""

    def __init__(self, environment, base_url):
        self.environment, self.url, self.count = environment, base_url, 0
        self.results = {}

    def begin(self, *rows):
        jobs = []
        for row in rows:
            messages = [{"role": "user", "content": row.get("prompt", "a")}]
            jobs.append(AgentJob(self.count, messages, row, self.url, f"k{self.count}"))
            self.count += 1
        self.take(self.environment.poll_agents(jobs, [], 0.0))
        return self

    def take(self, poll):
        self.results |= {result.number: result for result in poll.results}

    def all(self):
        end = time.monotonic() + DEADLINE_S
        while len(self.results) < self.count and time.monotonic() < end:
            self.take(self.environment.poll_agents([], [], 0.1))
        return [self.results[number] for number in range(self.count)]


@pytest.fixture
def run(base_url):
    made = []

    def run(environment, *rows):
        runs = Runs(environment, base_url)
        made.append(environment)
        return runs.begin(*rows) if rows else runs

    yield run
    for environment in made:
        environment.shutdown()


def file_agent(tmp_path, text, **settings):
    path = tmp_path / "agent.py"
    path.write_text(text)
    return create_env("agent", {"file": str(path), **settings})


def program(tmp_path, text, **settings):
    path = tmp_path / "program.py"
    path.write_text(text)
    return create_env("agent", {"command": [sys.executable, str(path)], **settings})


class TestFunctions:
    def test_a_coroutine_gets_the_row_and_gives_the_reward(self, run):
        async def agent(task, base_url, api_key):
            assert isinstance(task, AgentTask)
            assert task.model == "policy"
            assert task.prompt == "a"
            assert dict(task) == task.columns
            return task["answer"] + len(api_key)

        results = run(AgentEnvironment(agent), {"answer": 1.0}, {"answer": 2.0}).all()
        assert [result.reward.reward for result in results] == [3.0, 4.0]

    def test_a_plain_function_has_a_thread_and_others_go_on(self, run):
        async def other(task, base_url, api_key):
            return 1

        def agent(task, base_url, api_key):
            # Blocking does not matter here, at least not for the loop.
            time.sleep(0.05)
            return {"a": 1.0, "b": 2}

        assert run(AgentEnvironment(other), {}).all()[0].reward == AgentReward(1.0)
        [found] = run(AgentEnvironment(agent), {}).all()
        assert found.reward == AgentReward(3.0, {"a": 1.0, "b": 2.0})

    def test_the_client_is_bound_to_the_task(self, run, base_url):
        async def agent(task, client):
            assert type(client).__name__ == "AsyncOpenAI"
            assert str(client.base_url).rstrip("/") == base_url
            return float(client.api_key == "k0")

        def plain(task, client):
            assert type(client).__name__ == "OpenAI"
            return 1.0

        for function in (agent, plain):
            [found] = run(AgentEnvironment(function), {}).all()
            assert (found.ending, found.error) == ("done", "")
            assert found.reward == AgentReward(1.0)

    def test_a_task_is_ended_at_its_limit(self, run):
        ended = []

        async def agent(task, base_url, api_key):
            try:
                await asyncio.sleep(DEADLINE_S)
            finally:
                ended.append(True)

        [found] = run(AgentEnvironment(agent, time_limit_s=0.1), {}).all()
        assert found.ending == "limit"
        assert "within 0.1 s" in found.error
        assert ended

    def test_a_timeout_of_the_agents_own_is_its_error(self, run):
        async def agent(task, base_url, api_key):
            raise TimeoutError("mine")

        [found] = run(AgentEnvironment(agent), {}).all()
        assert found.ending == "error"
        assert "TimeoutError: mine" in found.error

    def test_a_cancelled_task_of_the_agents_own_is_its_error(self, run):
        async def agent(task, base_url, api_key):
            own = asyncio.create_task(asyncio.sleep(DEADLINE_S))
            own.cancel()
            await own

        [found] = run(AgentEnvironment(agent), {}).all()
        assert (found.ending, found.error[:15]) == ("error", "CancelledError:")

    def test_what_is_cancelled_ends_without_a_result(self, run):
        began, ended = [], []

        async def agent(task, base_url, api_key):
            began.append(task["n"])
            try:
                await asyncio.sleep(DEADLINE_S if task["n"] else 0.0)
            finally:
                ended.append(task["n"])
            return 1.0

        runs = run(AgentEnvironment(agent), {"n": 0}, {"n": 1})
        while 1 not in began:
            runs.take(runs.environment.poll_agents([], [], 0.05))
        runs.take(runs.environment.poll_agents([], [1], 0.0))
        runs.take(runs.environment.poll_agents([], [], 0.05))
        assert sorted(ended) == [0, 1]
        assert list(runs.results) == [0]

    def test_it_travels_to_another_process(self, run):
        environment = AgentEnvironment(_module_agent, max_at_once=3)
        run(environment, {}).all()
        copy = pickle.loads(pickle.dumps(environment))
        assert copy.agent_limits.max_at_once == 3
        first, second = (
            e.poll_agents([], [], 0.0).process for e in (environment, copy)
        )
        assert first != second
        assert run(copy, {}).all()[0].reward == AgentReward(0.25)


async def _module_agent(task, base_url, api_key):
    return 0.25


class TestFiles:
    def test_an_agent_and_a_reward_function_of_files(self, run, tmp_path):
        (tmp_path / "reward.py").write_text(
            "def judged(prompt, response, answer):\n"
            "    return {'right': float(response == answer), 'short': 1.0}\n"
        )
        environment = file_agent(
            tmp_path,
            "async def solve(task, base_url, api_key):\n    return task['said']\n",
            function="solve",
            reward_file=str(tmp_path / "reward.py"),
            reward_function="judged",
        )
        rows = [{"said": "x", "answer": "x"}, {"said": "y", "answer": "x"}]
        right, wrong = run(environment, *rows).all()
        assert right.reward == AgentReward(2.0, {"right": 1.0, "short": 1.0})
        assert wrong.reward.reward == 1.0

    @pytest.mark.parametrize(
        ("text", "settings", "said"),
        [
            ("x = 1\n", {}, "has no function 'agent'.*env.settings.function"),
            ("def agent(task):\n    pass\n", {}, r"must take \(task, client\)"),
            ("raise ValueError('no')\n", {}, "cannot be run: ValueError: no"),
        ],
    )
    def test_a_file_that_cannot_be_used(self, tmp_path, text, settings, said):
        with pytest.raises(AgentSetupError, match=said):
            file_agent(tmp_path, text, **settings)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({}, "set file or command.*got neither"),
            ({"file": __file__, "command": "x"}, "got both"),
            ({"file": "/nowhere.py"}, "does not exist"),
            ({"file": "no_such_package.agent"}, "no module 'no_such_package.agent'"),
            ({"command": "  "}, "must name a program"),
            ({"file": __file__, "reward_from": "exit_code"}, "for a command only"),
            ({"command": "x", "max_at_once": 0}, "max_at_once"),
        ],
    )
    def test_settings_are_checked(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            FileAgentConfig.from_dict(settings, source="a test")


class TestPrograms:
    def test_the_last_line_is_the_reward(self, run, tmp_path, base_url):
        environment = program(
            tmp_path,
            "import json, os, sys\n"
            "task = json.load(sys.stdin)\n"
            "print('thinking')\n"
            "assert os.environ['OPENAI_API_KEY'] == 'k0'\n"
            f"assert os.environ['OPENAI_BASE_URL'] == {base_url!r}\n"
            "assert os.environ['OPENAI_MODEL'] == task['model'] == 'policy'\n"
            "print(float(task['answer']) + len(task['prompt']))\n",
        )
        [found] = run(environment, {"answer": "2", "prompt": "abc"}).all()
        assert (found.error, found.reward) == ("", AgentReward(5.0))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("print('done')", "must be its reward, a number: got 'done'"),
            ("", "it wrote nothing"),
            ("import sys; sys.exit('I failed')", "(?s)exit code 1.*I failed"),
        ],
    )
    def test_a_program_without_a_reward_is_an_error(self, run, tmp_path, text, said):
        import re  # noqa: PLC0415

        [found] = run(program(tmp_path, text), {}).all()
        assert found.ending == "error"
        assert re.search(said, found.error)

    def test_the_exit_code_is_the_reward(self, run, tmp_path):
        text = "import json, sys\nsys.exit(json.load(sys.stdin)['code'])\n"
        environment = program(tmp_path, text, reward_from="exit_code")
        results = run(environment, {"code": 0}, {"code": 3}).all()
        assert [result.reward.reward for result in results] == [1.0, 0.0]

    def test_what_a_program_started_ends_with_it(self, run, tmp_path):
        environment = program(
            tmp_path,
            "import os, subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time;"
            "time.sleep(60)'])\n"
            f"file = open({str(tmp_path / 'pids')!r}, 'w')\n"
            "file.write(f'{os.getpid()} {child.pid}')\n"
            "file.close()\n"
            "time.sleep(60)\n",
            time_limit_s=3.0,
        )
        [found] = run(environment, {}).all()
        assert found.ending == "limit"
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            end = time.monotonic() + DEADLINE_S
            while _is_alive(pid) and time.monotonic() < end:
                time.sleep(0.02)
            assert not _is_alive(pid)

    def test_a_program_may_write_much_and_read_nothing(self, run, tmp_path):
        text = "print('x' * 1_000_000)\nprint(0.5)\n"
        environment = program(tmp_path, text, time_limit_s=20.0)
        [found] = run(environment, {"prompt": "p" * 1_000_000}).all()
        assert (found.error, found.reward) == ("", AgentReward(0.5))

    def test_a_program_that_is_not_there(self, run):
        environment = create_env("agent", {"command": "/nowhere/agent --fast"})
        [found] = run(environment, {}).all()
        assert "'/nowhere/agent' cannot be started" in found.error


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
