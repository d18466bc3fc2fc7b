from __future__ import annotations

import re

import pytest
from ray import exceptions as ray_errors
from rl_distributed_scripts import run_script

from rl_distributed.errors import WorkerDiedError
from rl_distributed.failures.out_of_memory import read_memory_report
from rl_distributed.workers import failures
from rl_distributed.workers.failures import WorkerPlace, translate_failure

# Messages of Ray 2.60, shortened.
TEXT = """\
2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: \
10.0.0.1, ID: 6814ee) was 4.00GB used / 23.54GB limit (0.169991)
OOM kill reason: Memory usage 4268834816B exceeded threshold of 4261619456B (16.9% of \
25276510208B limit)
Object store memory usage: [- objects spillable: 0
]
Considered workers: [
Selected to kill: (Actor(98aa): job ID=01000000, lease ID=00000, task name=W.__init__, \
required resources={CPU_group_0_99: 1}, pid=28554, actual memory used=1.62GB, worker \
ID=82f5)
Selected to kill: (Task: job ID=01000000, lease ID=00001, task name=f, required \
resources={CPU: 1}, pid=28555, actual memory used=0.50GB, worker ID=82f6)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
28554\t1.62\tray::WorkerHost.call_packed
26001\t0.21\tpython train.py --with options
22690\t0.19\tone
28253\t0.19\ttwo
29340\t0.18\tthree
Refer to the documentation on how to address the out of memory issue: https://docs
"""


def test_the_message_of_ray_is_read() -> None:
    report = read_memory_report(TEXT)
    assert report is not None
    assert (report.node, report.used_gib, report.total_gib) == ("10.0.0.1", 4.0, 23.54)
    assert report.limit_percent == 16.9
    killed = [(use.pid, use.mib, use.actor_id) for use in report.killed]
    assert killed == [(28554, 1659, "98aa"), (28555, 512, "")]
    assert [use.pid for use in report.users] == [28554, 26001, 22690, 28253, 29340]
    assert report.users[1].command == "python train.py --with options"
    assert read_memory_report("The actor is dead because its node has died.") is None


def test_the_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = WorkerPlace("policy", 3, "10.0.0.1", 28554, "")
    # The same number on another node is another process.
    far = WorkerPlace("policy", 4, "10.0.0.2", 26001, "")
    monkeypatch.setattr(failures, "_places", {"98aa": place, "98ab": far})
    error = translate_failure(ray_errors.OutOfMemoryError(TEXT), "method 'train'")
    assert isinstance(error, WorkerDiedError)
    assert error.failure is not None
    assert (error.failure.rank, error.failure.is_out_of_memory) == (3, True)
    assert str(error) == (
        "worker 3 of group 'policy' (node 10.0.0.1, pid 28554) is gone (method "
        "'train'): memory ran out on node 10.0.0.1 (4 of 23.54 GiB were in use, and "
        "Ray's limit is 16.9 %), so Ray ended worker 3 of group 'policy' (pid 28554, "
        "1659 MiB), a process (pid 28555, 512 MiB). Most was used by worker 3 of group "
        "'policy' (pid 28554, 1659 MiB); python train.py --with options (pid 26001, "
        "215 MiB); one (pid 22690, 195 MiB); two (pid 28253, 195 MiB). Have the "
        "workers hold less at a time, start fewer of them on a node, make Ray's object "
        "store smaller (object_store_bytes), or use a node with more memory"
    )


def test_a_process_outside_of_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_places", {})
    error = translate_failure(ray_errors.OutOfMemoryError(TEXT), "a call")
    assert str(error).startswith("a worker is gone (a call): memory ran out on node 10")
    assert "so Ray ended ray::WorkerHost.call_packed (pid 28554, 1659 MiB), a pr" in (
        str(error)
    )
    short = "a node running low on memory. Memory on the node (IP: h, ID: 6) was "
    report = read_memory_report(short + "1.00GB used / 2.00GB limit (0.5)")
    assert report is not None
    assert report.describe(lambda pid: "").startswith(
        "memory ran out on node h (1 of 2 GiB were in use), so Ray ended a process. H"
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_fills_the_memory() -> None:
    found = run_script("out_of_memory.py")
    label = "worker 0 of group 'Eater'"
    message = found["message"]
    assert (found["rank"], found["is_out_of_memory"]) == (0, True)
    assert message.startswith(f"{label} (node 127.0.0.1, pid {found['pid']}) is gone ")
    assert "memory ran out on node 127.0.0.1 (" in message
    ended = re.search(
        rf"so Ray ended {label} \(pid {found['pid']}, (\d+) MiB\)", message
    )
    assert ended is not None, message
    assert int(ended[1]) >= 100
    assert "Refer to the documentation" not in message
