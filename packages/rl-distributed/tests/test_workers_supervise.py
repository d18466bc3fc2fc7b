from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import psutil
import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    DeadlineExceededError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerMethodError,
)
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers import (
    FailFast,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartGroup,
    RestartWorker,
)

COUNTER = "rl_distributed_sample_workers.Counter"
RENDEZVOUS = "rl_distributed_sample_collectives.Rendezvous"
PLACE = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
LIMIT_S = 4.0
# Long enough for a busy machine to restart workers.
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], max_colocated_worker_groups=2, name="watched") as c:
        yield c


@pytest.fixture
def make(cluster):
    """Create groups; shut them down and check that no process of theirs remains."""
    made, pids = [], set()

    def new(policy, worker_class=COUNTER, **options):
        group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(worker_class),
            name_prefix="watched",
            sharding_annotations=NamedSharding([0, 1], ["data"]),
            failure_policy=policy,
            **options,
        )
        made.append(group)
        pids.update(group.worker_pids)
        return group

    yield new
    for group in made:
        pids.update(group.worker_pids)
        group.shutdown(force=True)
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, deadline_s=60):
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not come to it"
        pause.wait(0.02)


def call(group, method, **arguments):
    return group.get_all_worker_results(
        group.run_all_workers_single_data(method, **arguments), deadline_s=PATIENCE_S
    )


def add(group, values, method="add", **common):
    future = group.run_all_workers_sharded_data(
        method, value=values, in_sharded_axes=["data"], common_kwargs=common
    )
    return group.get_all_worker_results(future, deadline_s=PATIENCE_S)


def test_death_of_any_worker_ends_the_wait_for_another(make):
    group = make(FailFast())
    reference = group.run_single_worker_single_data("wait", 0)
    busy = group.run_all_workers_single_data("wait")
    wait_for(lambda: group.health()[1].state == "busy")
    pid = group.worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        group.get_all_worker_results([reference], deadline_s=60)
    with pytest.raises(WorkerDiedError, match="method 'wait' of group 'watched'"):
        group.get_all_worker_results(busy, deadline_s=60)
    failure = pickle.loads(pickle.dumps(caught.value)).failure
    assert (failure.rank, failure.pid, failure.kind) == (1, pid, "died")
    assert (failure.address, failure.method) == ("127.0.0.1", "wait")
    assert "SIGKILL" in failure.cause
    assert failure.log_path.startswith("/")
    wait_for(lambda: [w.state for w in group.health()] == ["busy", "dead"])
    assert group.health()[1].failure.cause == failure.cause
    # The remaining one is not killed and can be called; the other cannot.
    with pytest.raises(WorkerDiedError, match=f"pid {pid}"):
        group.run_all_workers_single_data("pid")
    group.run_single_worker_single_data("pid", 0)


def test_death_between_calls_is_noticed_without_a_call(make):
    group = make(FailFast())
    os.kill(group.worker_pids[1], signal.SIGKILL)
    wait_for(lambda: group.health()[1].state == "dead")
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* is gone"):
        call(group, "pid")
    assert call_one(group, "add", value=3) == 3


def call_one(group, method, **arguments):
    reference = group.run_single_worker_single_data(method, 0, **arguments)
    (result,) = group.get_all_worker_results([reference], deadline_s=PATIENCE_S)
    return result


def test_a_silent_worker_is_told_of_before_it_counts_as_hung(make, caplog):
    group = make(FailFast())
    future = group.run_all_workers_single_data("wait", seconds=0)
    group.get_all_worker_results(future, deadline_s=60)
    os.kill(group.worker_pids[1], signal.SIGSTOP)
    try:
        wait_for(lambda: "worker 1 of group 'watched'" in caplog.text)
        assert "its process is stopped (SIGSTOP)" in caplog.text
    finally:
        os.kill(group.worker_pids[1], signal.SIGCONT)
    assert call(group, "wait", seconds=0) == ["done", "done"]


def test_stopped_process_is_a_hang(make):
    group = make(FailFast(heartbeat_limit_s=LIMIT_S))
    future = group.run_all_workers_single_data("wait")
    os.kill(group.worker_pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerHungError, match=r"worker 1 .*stopped \(SIGSTOP\)"):
        group.get_all_worker_results(future, deadline_s=60)
    wait_for(lambda: not is_alive(group.worker_pids[1]))


def test_a_worker_that_is_too_busy_for_a_word_is_told_from_one_that_hangs(make):
    group = make(FailFast(heartbeat_limit_s=1.0))
    busy = group.run_single_worker_single_data("compute_with_lock", 1, seconds=4)
    assert group.get_all_worker_results([busy], deadline_s=60) == ["done"]
    hung = group.run_single_worker_single_data("sleep_with_lock", 1)
    with pytest.raises(WorkerHungError, match=r"worker 1 .*sleeping, perhaps with"):
        group.get_all_worker_results([hung], deadline_s=60)


def test_call_that_runs_past_its_own_deadline(make):
    group = make(RestartWorker())
    future = group.run_all_workers_multiple_data(
        "wait", seconds=[0, 300], call_deadline_s=4
    )
    with pytest.raises(WorkerHungError) as caught:
        group.get_all_worker_results(future, deadline_s=60)
    assert "method 'wait' of group 'watched' did not end" in str(caught.value)
    assert "call_deadline_s (4 s) on worker(s) 1" in str(caught.value)
    assert caught.value.failure.kind == "late"
    assert [worker.num_restarts for worker in group.health()] == [0, 1]
    assert call(group, "wait", seconds=0) == ["done", "done"]
    with pytest.raises(DeadlineExceededError, match="worker 0 of group 'watched'"):
        group.get_all_worker_results(
            group.run_all_workers_single_data("wait", seconds=5), deadline_s=0.2
        )


def test_workers_of_a_collective_are_released_and_the_dead_one_is_named(make):
    group = make(FailFast(), RENDEZVOUS)
    assert call(group, "total", value=2) == [4.0, 4.0]
    pids = group.worker_pids
    sitting = group.run_single_worker_single_data("total", 0, value=1)
    wait_for(lambda: group.health()[0].state == "busy")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"pid {pids[1]}"):
        group.get_all_worker_results([sitting], deadline_s=60)
    wait_for(lambda: not is_alive(pids[0]))
    wait_for(lambda: group.health()[0].failure is not None)
    assert group.health()[0].failure.kind == "released"
    with pytest.raises(WorkerDiedError, match=f"pid {pids[1]}"):
        group.run_all_workers_single_data("port")


def test_workers_that_are_not_tied_are_not_released_and_can_be_ended(make):
    apart = [(0, [0]), (0, [1])]
    group = make(FailFast(release="tied"), RENDEZVOUS, bundle_indices_list=apart)
    pids = group.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: group.health()[1].failure is not None)
    incident = group.supervisor.incident
    wait_for(lambda: not incident.open_releases)
    assert group.health()[0].failure is None
    group.end([0, 1], "the other one is gone")
    assert [worker.failure.kind for worker in group.health()] == ["released", "died"]
    assert not any(map(is_alive, pids))
    assert group.restart([0, 1]) == [0, 1]
    assert call(group, "total", value=2) == [4.0, 4.0]


def test_group_with_a_stopped_member_restarts_as_a_whole(make):
    restarted = []
    policy = RestartGroup(
        heartbeat_limit_s=LIMIT_S,
        retry_calls=["total"],
        on_restart=lambda group, ranks: restarted.append((group.worker_pids, ranks)),
    )
    group = make(policy, RENDEZVOUS)
    before = group.worker_pids
    (port, _) = call(group, "port")
    os.kill(before[0], signal.SIGSTOP)
    assert call(group, "total", value=2) == [4.0, 4.0]
    assert not set(before) & set(group.worker_pids)
    assert restarted == [(group.worker_pids, [0, 1])]
    assert port not in call(group, "port")
    assert not any(map(is_alive, before))


def test_one_that_raises_does_not_leave_the_others_waiting(make):
    group = make(RestartWorker(release_after_s=0.5), RENDEZVOUS)
    pids = group.worker_pids
    with pytest.raises(WorkerMethodError, match="ValueError: no share of mine") as bad:
        call(group, "total_unless", value=1, failing_rank=1)
    assert bad.value.failure.rank == 1
    assert "in total_unless" in bad.value.failure.traceback
    # Both are new: no member of the old process group is reusable.
    assert not set(pids) & set(group.worker_pids)
    assert call(group, "total", value=2) == [4.0, 4.0]


def test_failed_worker_is_restarted_and_gets_its_state_back(make):
    totals = {}

    def restore(group, ranks):
        for rank in ranks:
            reference = group.run_single_worker_single_data(
                "restore", rank, total=totals[rank]
            )
            group.get_all_worker_results([reference], deadline_s=60)

    group = make(RestartWorker(on_restart=restore), env_vars={"MARK": "yes"})
    totals.update(enumerate(add(group, [10, 20])))
    (_, place), pids = call(group, "env", names=[*PLACE, "MARK"]), group.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: group.health()[1].state == "dead")
    assert add(group, [1, 2]) == [11, 22]
    assert group.worker_pids[0] == pids[0]
    assert group.worker_pids[1] != pids[1]
    assert call(group, "env", names=[*PLACE, "MARK"])[1] == place
    assert [worker.num_restarts for worker in group.health()] == [0, 1]


def test_retried_call_runs_again_only_where_it_was_lost(make, tmp_path):
    group = make(RestartWorker(retry_calls=["add_or_die"]))
    markers = [tmp_path / "there", tmp_path / "new"]
    markers[0].touch()
    future = group.run_all_workers_multiple_data(
        "add_or_die", value=[5, 7], marker=[str(marker) for marker in markers]
    )
    assert group.get_all_worker_results(future, deadline_s=60) == [5, 7]
    assert call(group, "add", value=0) == [5, 7]


def test_call_that_is_not_retried_is_raised_after_the_restart(make, tmp_path):
    group = make(RestartWorker())
    with pytest.raises(WorkerDiedError):
        add(group, [5, 7], "add_or_die", marker=str(tmp_path / "new"))
    assert all(worker.failure is None for worker in group.health())
    assert len(call(group, "pid")) == 2


def test_tries_are_bounded(make):
    group = make(RestartWorker(max_restarts=1, backoff_s=0))
    os.kill(group.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: group.health()[0].state == "dead")
    group.recover()
    os.kill(group.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: group.health()[0].state == "dead")
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="gives up after 1 restarts"):
            call(group, "pid")


def test_state_that_cannot_be_restored(make):
    def restore(group, ranks):
        raise ValueError(f"no state for {ranks}")

    group = make(RestartWorker(on_restart=restore))
    os.kill(group.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: group.health()[0].state == "dead")
    with pytest.raises(ValueError, match=r"no state for \[0\]"):
        call(group, "pid")
    with pytest.raises(WorkerError, match="on_restart raised ValueError"):
        call(group, "pid")


def test_worker_that_dies_while_its_state_is_restored_is_tried_again(make):
    killed = []

    def restore(group, ranks):
        if not killed:
            killed.append(group.worker_pids[0])
            os.kill(killed[0], signal.SIGKILL)
        call_one(group, "restore", total=4)

    group = make(RestartWorker(on_restart=restore, max_restarts=3, backoff_s=0))
    os.kill(group.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: group.health()[0].state == "dead")
    assert call_one(group, "add", value=1) == 5
    assert group.health()[0].num_restarts == 2


def test_health_tells_what_runs(make):
    group = make(FailFast())
    wait_for(lambda: [w.state for w in group.health()] == ["idle", "idle"])
    assert [worker.pid for worker in group.health()] == group.worker_pids
    group.run_single_worker_single_data("wait", 1)
    wait_for(lambda: group.health()[1].method == "wait")
    assert group.health()[0].method == ""
    assert group.health()[1].method_s > 0
