"""What a driver learns about a worker's failure: its exception, or its exit."""

from __future__ import annotations

import pickle
import signal
import traceback

import pytest
import ray
import rl_distributed_sample_failures as sample

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    UserError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_distributed.failures.carried_exception import pack_exception, unpack_exception
from rl_distributed.failures.worker import WorkerFailure
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup
from rl_distributed.workers.failures import _cause_of_death

FAILING = "rl_distributed_sample_failures.Failing"
SECRET = "sesame-sesame-sesame"


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([1], use_gpus=False, name="causes") as made:
        yield made


def start(cluster, **arguments):
    return RayWorkerGroup(
        cluster,
        RayWorkerBuilder(FAILING, **arguments),
        name_prefix="causes",
        env_vars={"DOOR_TOKEN": SECRET},
    )


@pytest.fixture(scope="module")
def group(cluster):
    with start(cluster) as made:
        yield made


def error_of(group, method, **arguments):
    call = group.run_single_worker_single_data(method, 0, **arguments)
    with pytest.raises(WorkerError) as caught:
        group.get_all_worker_results([call], deadline_s=60)
    return caught.value


# --- exceptions ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["missing", "missing_from_async", "missing_items"])
def test_the_exception_of_a_method_is_the_cause(group, method):
    error = error_of(group, method)
    assert type(error) is WorkerMethodError
    cause = error.__cause__
    assert type(cause) is sample.MissingPartError
    assert isinstance(cause, KeyError)
    assert (cause.part, cause.args) == ("wheel", ("wheel", ["axle"]))
    # Both appear if it is not caught, including the worker's traceback.
    shown = "".join(traceback.format_exception(error))
    assert "direct cause of the following exception" in shown
    assert "in missing" in shown
    # It survives one more process boundary.
    again = pickle.loads(pickle.dumps(error))
    assert type(again.__cause__) is sample.MissingPartError
    assert again.failure == error.failure


def test_the_exception_is_the_cause_for_who_asks_ray(group):
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(group.run_single_worker_single_data("missing", 0), timeout=60)
    assert type(caught.value.cause) is WorkerMethodError
    assert type(caught.value.cause.__cause__) is sample.MissingPartError


def test_notes_travel_along(group):
    cause = error_of(group, "noted").__cause__
    assert isinstance(cause, ValueError)
    assert cause.__notes__ == ["and more"]


@pytest.mark.parametrize("method", ["stubborn", "with_a_lock", "large", "secret"])
def test_what_cannot_travel_leaves_a_whole_error(group, method):
    error = error_of(group, method)
    assert type(error) is WorkerMethodError
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert error.failure is not None
    assert error.failure.kind == "raised"
    assert f"in {method}" in error.failure.traceback
    assert SECRET not in str(error)
    assert SECRET not in str(pickle.dumps(error))


@pytest.mark.parametrize(
    ("method", "named"), [("interrupted", "KeyboardInterrupt"), ("odd", "no Exception")]
)
def test_what_is_no_ordinary_exception_ends_the_call_and_not_the_worker(
    group, method, named
):
    error = error_of(group, method)
    assert type(error) is WorkerMethodError
    assert f"Failing.{method} raised" in str(error)
    assert named in str(error)
    assert isinstance(error.__cause__, BaseException)


def test_the_exception_of_a_constructor_is_the_cause(cluster):
    with pytest.raises(WorkerStartError, match="no part wheel") as caught:
        start(cluster, error="missing")
    assert type(caught.value.__cause__) is sample.MissingPartError
    assert caught.value.failure is not None
    assert caught.value.failure.rank == 0


def test_an_exception_whose_class_is_not_here_is_left_out():
    packed = pack_exception(sample.MissingPartError("a", []), {})
    assert isinstance(unpack_exception(packed), sample.MissingPartError)
    elsewhere = packed.replace(b"rl_distributed_sample_failures", b"x" * 30)
    failure = WorkerFailure("g", 0, "h", 1, "raised", exception=elsewhere)
    error = WorkerMethodError("it raised")
    error.failure = failure
    again = pickle.loads(pickle.dumps(error))
    assert again.__cause__ is None
    assert again.failure == failure
    assert unpack_exception(b"") is None
    assert unpack_exception(pickle.dumps("no exception")) is None


def test_an_error_without_a_failure_is_pickled_as_before():
    again = pickle.loads(pickle.dumps(WorkerDiedError("gone")))
    assert (str(again), again.failure, again.__cause__) == ("gone", None, None)
    assert not isinstance(again, UserError)


# --- the end of processes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "cause"),
    [
        ("exit", {"code": 3}, "it exited by itself: sys.exit(3)"),
        ("exit", {"code": "no more"}, "it exited by itself: sys.exit('no more')"),
        ("exit_from_async", {"code": 3}, "it exited by itself: sys.exit(3)"),
        ("kill", {"number": signal.SIGTERM}, "it was told to end by SIGTERM"),
        ("kill", {"number": signal.SIGKILL}, "was killed by a signal (SIGKILL"),
    ],
)
def test_the_end_of_a_process_is_told_as_it_was(cluster, method, arguments, cause):
    with start(cluster) as group:
        error = error_of(group, method, **arguments)
    assert type(error) is WorkerDiedError
    assert error.failure is not None
    assert cause in error.failure.cause
    assert ("SIGKILL" in str(error)) == ("SIGKILL" in cause)
    assert ("SIGSEGV" in str(error)) == ("SIGKILL" in cause)


def test_a_crash_is_shown_with_its_place(cluster):
    with start(cluster) as group:
        message = str(error_of(group, "segfault"))
    assert "crashed (SIGSEGV)" in message
    assert "Fatal Python error: Segmentation fault" in message
    assert "in kill" in message


def test_an_exit_in_a_constructor_is_told(cluster):
    with pytest.raises(WorkerStartError, match=r"exited by itself: sys\.exit\(7\)"):
        start(cluster, error="exit")


def test_other_ends_keep_what_ray_says():
    text = "Worker exit type: {} Worker exit detail: {}"
    cause = _cause_of_death(text.format("NODE_DIED", "The node is gone."))
    assert cause == "NODE_DIED: The node is gone."
    assert _cause_of_death("") == "no cause is known"
