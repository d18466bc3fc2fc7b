from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray import cloudpickle

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    RegistryError,
    WorkerDiedError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_envs import (
    EnvironmentContractError,
    EnvironmentInterface,
    EnvironmentReturn,
    FunctionalRewardWrapper,
    GroupRewardWrapper,
    RemoteEnvironment,
    RewardCallError,
    SortingConfig,
    SortingEnvironment,
    SortingTasks,
    ToolEnvironment,
    check_environment,
    observation_messages,
)
from rl_envs.environment_host import EnvironmentHost
from rl_envs.interfaces import has_own
from rl_envs.joined_returns import join_returns
from rl_envs.registry import EnvironmentSpec

pytestmark = pytest.mark.usefixtures("ray_cluster")


def batch_of(responses: Sequence[str], **column: list[Any]) -> tuple[Any, Any]:
    logs = [
        [
            {"role": "user", "content": "q", "token_ids": torch.arange(3)},
            {"role": "assistant", "content": response},
        ]
        for response in responses
    ]
    metadata = [
        {name: values[row] for name, values in column.items()}
        for row in range(len(responses))
    ]
    return logs, metadata


def scripted_environment() -> type[SortingEnvironment]:
    """Return a class that no other process can import: it travels by value."""

    class Scripted(SortingEnvironment):
        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            word = message_log_batch[0][-1]["content"] if message_log_batch else ""
            if word == "die":
                os._exit(3)
            if word == "hang":
                time.sleep(300)
            if word == "raise":
                raise FileNotFoundError("verifier.bin")
            return super().step(message_log_batch, metadata)

        def shutdown(self) -> None:
            path = os.environ.get("SHUTDOWN_FILE")
            if path:
                Path(path).write_text("done")

    return Scripted


def test_two_workers_answer_as_one_process_does() -> None:
    rows = SortingTasks(num_digits=5).train(7)
    responses = [row["answer"] if i % 2 else "x" for i, row in enumerate(rows)]
    logs, metadata = batch_of(responses, answer=[row["answer"] for row in rows])
    local = SortingEnvironment().step(logs, metadata)
    with RemoteEnvironment("sorting", {"credit": "exact"}, num_workers=2) as remote:
        result = remote.step(logs, metadata)
        assert isinstance(result.rewards, torch.Tensor)
        assert isinstance(local.rewards, torch.Tensor)
        assert torch.equal(result.rewards, local.rewards)
        assert result.answers == local.answers
        assert result.metadata == local.metadata
        batch: dict[str, Any] = {"rewards": result.rewards}
        _, metrics = remote.global_post_process_and_metrics(batch)
        assert metrics["accuracy"] == pytest.approx(3 / 7)
        check_environment(remote)
        # It answers for the environment of its workers.
        assert not has_own(remote, "reset")
        assert not has_own(remote, "close")
    with pytest.raises(WorkerDiedError, match="was shut down"):
        remote.step(logs, metadata)


def test_rows_keep_their_order_where_workers_end_in_another(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def score(response: str) -> float:
        number = int(response)
        deadline_s = time.monotonic() + 60.0
        # The last worker exits first.
        while number < 2 and not Path(folder, str(number + 1)).exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        Path(folder, response).touch()
        return float(number)

    with RemoteEnvironment(score, num_workers=3) as remote:
        rewards = remote.step(*batch_of(["0", "1", "2"])).rewards
        assert isinstance(rewards, torch.Tensor)
        assert rewards.tolist() == [0.0, 1.0, 2.0]


def test_a_lambda_scores_in_another_process() -> None:
    with RemoteEnvironment(lambda response: float(os.getpid())) as remote:
        rewards = remote.step(*batch_of(["a"])).rewards
        assert isinstance(rewards, torch.Tensor)
        assert rewards.item() != os.getpid()
        assert remote.name == "<lambda>"


def test_a_function_in_another_process_gives_tensors_without_torch_there() -> None:
    def has_torch(prompt: str, response: str) -> float:
        import sys  # noqa: PLC0415

        return float("torch" in sys.modules)

    with RemoteEnvironment(has_torch) as remote:
        answer = remote.step(*batch_of(["a", "b"]))
        same, metrics = remote.global_post_process_and_metrics(
            batch := {"rewards": torch.tensor([0.0, 1.0])}
        )
    assert torch.equal(answer.rewards, torch.zeros(2))
    assert torch.equal(answer.terminateds, torch.ones(2, dtype=torch.bool))
    assert same is batch
    assert metrics["reward_mean"] == 0.5


def test_a_reward_error_arrives_as_itself() -> None:
    wrapper = FunctionalRewardWrapper(lambda response: 1 / len(response), "inverse")
    with RemoteEnvironment(wrapper) as remote:
        with pytest.raises(
            RewardCallError, match="'inverse' raised ZeroDivision"
        ) as caught:
            remote.step(*batch_of(["a", ""]))
        assert any("worker 0" in note for note in caught.value.__notes__)
        assert remote.step(*batch_of(["a"])).terminateds.tolist() == [True]


def test_a_secret_reaches_the_environment_and_no_log() -> None:
    secret = os.urandom(12).hex()

    class Asking(SortingEnvironment):
        """Reports what it knows."""

        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            key = os.environ["JUDGE_API_KEY"]
            print("the key is", key, flush=True)  # noqa: T201 (it is what is tested)
            made_with = Path("/proc/self/environ").read_text()
            if key in made_with or "seen" not in made_with:
                raise RuntimeError("the process was made with the wrong variables")
            raise RuntimeError(f"refused with {key}, as was {os.environ['PLAIN']}")

    variables = {"JUDGE_API_KEY": secret, "PLAIN": "seen"}
    with (
        RemoteEnvironment(Asking, env_vars=variables) as remote,
        pytest.raises(
            WorkerMethodError, match=r"refused with \*\*\*, as was seen"
        ) as told,
    ):
        remote.step(*batch_of(["1"]))
    assert secret not in str(told.value)
    session = ray._private.worker._global_node.get_session_dir_path()
    find = ["grep", "-rlI", secret, f"{session}/logs"]
    assert subprocess.run(find, capture_output=True, text=True).stdout == ""


def test_failures_of_a_worker(tmp_path: Path) -> None:
    done = tmp_path / "done"
    remote = RemoteEnvironment(
        scripted_environment(),
        num_workers=2,
        deadline_s=60.0,
        env_vars={"SHUTDOWN_FILE": str(done)},
        max_restarts=1,
    )
    good = batch_of(["1", "1"], answer=["1", "1"])
    with remote:
        with pytest.raises(WorkerMethodError) as caught:
            remote.step(*batch_of(["raise"], answer=["1"]))
        message = str(caught.value)
        assert "worker 0 of 2: step raised FileNotFoundError: verifier.bin" in message
        assert "Traceback" in message
        # Its rows also end the worker that replaces it.
        with pytest.raises(WorkerDiedError) as died:
            remote.step(*batch_of(["1", "die"], answer=["1", "1"]))
        message = str(died.value)
        assert "worker 1 of 2: the process ended during step" in message
        assert "It was replaced 1 times in a row" in message
        rewards = remote.step(*good).rewards  # replaced once more
        assert isinstance(rewards, torch.Tensor)
        assert rewards.tolist() == [1.0, 1.0]
    assert done.read_text() == "done"


def worker_of(remote: RemoteEnvironment, rows: tuple[Any, Any]) -> psutil.Process:
    rewards = remote.step(*rows).rewards
    assert isinstance(rewards, torch.Tensor)
    return psutil.Process(int(rewards[0].item()))


def test_a_killed_worker_is_replaced_and_its_rows_are_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is killed while waiting; a successful call resets the count."""
    rows = batch_of(["a", "b", "c"])

    def pid(response: str) -> float:
        return float(os.getpid())

    with RemoteEnvironment(pid, max_restarts=1) as remote:
        pids = set()
        for _ in range(2):
            worker = worker_of(remote, rows)
            pids.add(worker.pid)
            worker.kill()
            worker.wait(60)
        assert worker_of(remote, rows).pid not in pids
    assert len(pids) == 2
    assert caplog.text.count("resending its rows (1 of 1)") == 2


def test_a_worker_killed_at_work_costs_no_row(tmp_path: Path) -> None:
    """The rows of the other worker are not scored twice."""
    folder = str(tmp_path)

    def score(response: str) -> float:
        calls = Path(folder, f"{response}.{len(os.listdir(folder))}")
        calls.write_text(str(os.getpid()))
        if response == "b" and len(list(Path(folder).glob("b.*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(ord(response))

    with RemoteEnvironment(score, num_workers=2) as remote:
        rewards = remote.step(*batch_of(["a", "b"])).rewards
        assert isinstance(rewards, torch.Tensor)
        assert rewards.tolist() == [97.0, 98.0]
    assert len(list(tmp_path.glob("a.*"))) == 1
    assert len({path.read_text() for path in tmp_path.glob("b.*")}) == 2


def test_a_death_may_be_an_error_at_once() -> None:
    environment = scripted_environment()
    with (
        RemoteEnvironment(environment, max_restarts=0) as remote,
        pytest.raises(WorkerDiedError, match="replaced 0 times"),
    ):
        remote.step(*batch_of(["die"], answer=["1"]))
    with pytest.raises(ConfigError, match="max_restarts must be at least 0"):
        RemoteEnvironment(environment, max_restarts=-1)


def test_a_worker_that_hangs_is_named_and_ended() -> None:
    with RemoteEnvironment(scripted_environment(), deadline_s=1.0) as remote:
        with pytest.raises(
            DeadlineExceededError, match=r"worker 0 of 1: no answer to step"
        ):
            remote.step(*batch_of(["hang"], answer=["1"]))
        (health,) = remote._workers.health()
        assert health.state == "dead"
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(health.pid).wait(60)
        # Its successor has a new process.
        assert len(remote.step(*batch_of(["1"], answer=["1"])).rewards) == 1


class CannotStart(SortingEnvironment):
    def __init__(self, config: SortingConfig | None = None) -> None:
        raise ModuleNotFoundError("No module named 'verifier'")


def test_what_cannot_start_is_named() -> None:
    with pytest.raises(WorkerStartError, match="No module named 'verifier'"):
        RemoteEnvironment(CannotStart)
    with pytest.raises(RegistryError, match="unknown environment 'sortin'"):
        RemoteEnvironment("sortin")
    with pytest.raises(ConfigError, match="credit"):
        RemoteEnvironment("sorting", {"credit": 3})
    with pytest.raises(ConfigError, match="num_workers must be at least 1"):
        RemoteEnvironment("sorting", num_workers=0)
    with pytest.raises(ConfigError, match="deadline_s must be positive"):
        RemoteEnvironment("sorting", deadline_s=0)
    with pytest.raises(ConfigError, match="already exists"):
        RemoteEnvironment(SortingEnvironment(), {"credit": "exact"})
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent"):
        RemoteEnvironment(lambda response: lock.locked())


def part(rewards: Any, answers: Any = None) -> EnvironmentReturn[Any]:
    return EnvironmentReturn(
        [{"role": "environment", "content": ""}],
        [None],
        [None],
        rewards,
        torch.ones(1, dtype=torch.bool),
        answers,
    )


def test_chunks_join() -> None:
    nan = torch.tensor([float("nan")])
    joined = join_returns(
        [part({"reward/a": torch.ones(1)}), part(nan, ["x"])],
    )
    assert isinstance(joined.rewards, dict)
    assert joined.rewards["reward/a"][0] == 1
    assert torch.isnan(joined.rewards["reward/a"][1])
    assert joined.answers == [None, "x"]
    with pytest.raises(
        EnvironmentContractError, match="the same rewards for every row"
    ):
        join_returns([part({"reward/a": torch.ones(1)}), part(torch.ones(1))])


def test_the_host_runs_without_ray() -> None:
    with pytest.raises(pickle.UnpicklingError):
        EnvironmentHost(b"garbage")
    host = EnvironmentHost(cloudpickle.dumps(EnvironmentSpec.of("sorting")))
    assert host.abilities().tools == []
    assert list(host.step([], []).value.terminateds) == []


def test_tools_and_groups_in_another_process() -> None:
    def longest(responses: list[str]) -> list[dict[str, float]]:
        most = max(map(len, responses))
        return [{"longest": float(len(response) == most)} for response in responses]

    def known(response: str) -> dict[str, float]:
        return {"known": 1.0}

    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    environment = ToolEnvironment([double], GroupRewardWrapper(longest, known))
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in (
            '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>',
            "a",
            "bc",
        )
    ]
    with RemoteEnvironment(environment, num_workers=2) as remote:
        assert remote.tool_schemas() == environment.tool_schemas()
        assert has_own(remote, "reset")
        assert has_own(remote, "close")
        result = remote.step(logs, [{}] * 3)
        assert observation_messages(result.observations[0])[0]["content"] == "8"
        # The first row's worker knows no name: only that row continues.
        assert result.rewards["reward/known"].tolist() == [0.0, 1.0, 1.0]
        scores = remote.score_groups([logs[1:], logs[2:]], [[{}] * 2, [{}]])
    assert [part["reward/longest"].tolist() for part in scores] == [[0.0, 1.0], [1.0]]
    with RemoteEnvironment(ToolEnvironment([double], known)) as remote:
        assert remote.score_groups([logs[1:]], [[{}] * 2]) is None


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_and_rows_that_have_ended(num_workers: int) -> None:
    class Short(EnvironmentInterface[Any]):
        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            size = len(metadata)
            if metadata[0]["answer"] == "nothing":
                return None  # type: ignore[return-value]
            return EnvironmentReturn(
                observations=[],
                metadata=[None] * size,
                next_stop_strings=[None] * size,
                rewards=[
                    float(log[-1]["content"] == row["answer"])
                    for log, row in zip(message_log_batch, metadata, strict=True)
                ],
                terminateds=[True] * size,
                answers=None,
            )

    batch = {"prompt": ["a", "b"], "response": ["1", "3"], "answer": ["1", "2"]}
    with RemoteEnvironment(Short(), num_workers=num_workers) as environment:
        found = environment.step(batch)
        assert found.rewards.tolist() == [1.0, 0.0]
        assert list(found.observations) == [[], []]
        with pytest.raises(EnvironmentContractError, match="got NoneType None"):
            environment.step({**batch, "answer": ["nothing", "nothing"]})


def test_calls_of_several_threads_share_the_workers(tmp_path: Path) -> None:
    def meet(response: str, folder: str) -> float:
        """Wait until the other call has arrived as well."""
        Path(folder, response).touch()
        end_s = time.monotonic() + 60.0
        while time.monotonic() < end_s:
            if len(os.listdir(folder)) == 2:
                return 1.0
        return 0.0

    folders = {"folder": [str(tmp_path)]}
    with RemoteEnvironment(meet, num_workers=2) as environment:
        assert environment.calls_at_once == 2
        found: dict[str, list[float]] = {}

        def call(response: str) -> None:
            result = environment.step(*batch_of([response], **folders))
            found[response] = result.rewards.tolist()

        threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert found == {"a": [1.0], "b": [1.0]}
        # All are idle again: a batch is split among them as before.
        assert environment.step(*batch_of(["a", "b"], folder=[str(tmp_path)] * 2))
    with RemoteEnvironment(meet, deadline_s=0.5) as environment:
        workers = environment._workers
        with (
            workers.taken(1),
            pytest.raises(DeadlineExceededError, match=r"raise env\.num_workers"),
        ):
            environment.step(*batch_of(["c"], **folders))


def test_rows_that_take_no_time_are_not_split_among_all_workers() -> None:
    class Answers(EnvironmentInterface[Any]):
        """Answers with the process that judged a row; `slow` takes its time."""

        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            words = [log[-1]["content"] for log in message_log_batch]
            time.sleep(0.05 * words.count("slow"))
            size = len(words)
            return EnvironmentReturn(
                observations=[{"role": "environment", "content": ""}] * size,
                metadata=list(metadata),
                next_stop_strings=[None] * size,
                rewards=torch.zeros(size),
                terminateds=torch.ones(size, dtype=torch.bool),
                answers=[str(os.getpid())] * size,
            )

    def num_workers(environment: RemoteEnvironment, word: str) -> int:
        answers = environment.step(*batch_of([word] * 8)).answers
        assert answers is not None
        assert len(answers) == 8
        return len(set(answers))

    with RemoteEnvironment(Answers(), num_workers=4) as environment:
        assert environment.row_s is None
        assert environment.step([], []).answers == []
        assert environment.row_s is None
        # Unknown rows may be slow, and then all workers are used.
        assert num_workers(environment, "quick") == 4
        assert num_workers(environment, "quick") == 1
        assert environment.row_s is not None
        assert num_workers(environment, "slow") == 1
        assert environment.row_s >= 0.01
        assert num_workers(environment, "slow") == 4
        assert num_workers(environment, "quick") == 4  # one call is no rule
