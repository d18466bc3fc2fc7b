"""Chaos: worker processes are killed, stopped and slowed down while they are called.

    python rl_distributed_chaos.py --minutes 30 --seed 7

```
driver: creates a group, calls it, checks every result ---> next policy, next group
tormentor (thread): picks a worker process, even one that is still starting, and
                    kills it, stops it for a while, or lets it run in short bursts only
```
What must hold, whatever happens:

- A call ends in time, with the right results in order or with an error that names the
  worker.
- Nothing is lost and nothing is done twice: what a call has returned was done once by
  each worker, and a call that must not be retried never more than once.
- After a group is shut down, none of its processes remains.

The seed determines what is done when; the outcome also depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rl_distributed import (
    DeadlineExceededError,
    FailFast,
    NamedSharding,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    RestartGroup,
    RestartWorker,
    WorkerError,
    init_ray,
)

WORKER = "rl_distributed_sample_workers.Ledger"
COLLECTIVE = "rl_distributed_sample_collectives.CollectiveLedger"
LIMITS = {"heartbeat_limit_s": 4.0, "release_after_s": 0.5}
RESTARTS = {
    "max_restarts": 4,
    "within_s": 20.0,
    "backoff_s": 0.05,
    "max_backoff_s": 1.0,
}
POLICIES = {
    "fail_fast": FailFast(**LIMITS),
    "restart_worker": RestartWorker(**LIMITS, **RESTARTS),
    "restart_worker_retry": RestartWorker(retry_calls=["enter"], **LIMITS, **RESTARTS),
    "restart_group": RestartGroup(**LIMITS, **RESTARTS),
    "restart_group_retry": RestartGroup(retry_calls=["enter"], **LIMITS, **RESTARTS),
}
# An upper bound; in a short run each policy still gets its turn.
ROUND_S = 8.0
# If the machine is too slow to prove anything in time.
MORE_S = 100.0
CALL_DEADLINE_S = 30.0
START_DEADLINE_S = 60.0
# A wait, and the restarts that may follow it.
LONGEST_S = CALL_DEADLINE_S + RESTARTS["max_restarts"] * START_DEADLINE_S
LONGEST_STOP_S = 7.0
NUM_WORKERS = 2


class ChaosError(Exception):
    """An invariant does not hold."""


def worker_processes() -> list[psutil.Process]:
    """Return this program's worker processes, ready or not."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "WorkerHost" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Tormentor:
    """Disturbs a random worker every now and then."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(LONGEST_STOP_S + 10)

    def _run(self) -> None:
        actions = {"kill": self._kill, "stop": self._hold, "slow": self._slow}
        while not self._stop.wait(self._random.uniform(0.3, 3.5)):
            processes = worker_processes()
            action = self._random.choice(["kill", "kill", "stop", "slow"])
            choice = self._random.random()
            long_s = self._random.uniform(0.1, LONGEST_STOP_S)
            if processes:
                victim = processes[int(choice * len(processes))]
                with suppress(psutil.Error):
                    actions[action](victim, long_s)
                    self.counts[action] += 1

    def _kill(self, victim: psutil.Process, long_s: float) -> None:
        del long_s
        victim.send_signal(signal.SIGKILL)

    def _hold(self, victim: psutil.Process, long_s: float) -> None:
        victim.send_signal(signal.SIGSTOP)
        self._stop.wait(long_s)
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGCONT)

    def _slow(self, victim: psutil.Process, long_s: float) -> None:
        end = time.monotonic() + min(long_s, 3.0)
        while time.monotonic() < end and not self._stop.is_set():
            self._hold(victim, 0.08)
            self._stop.wait(0.02)


class Driver:
    """Creates groups, calls them and checks the results."""

    def __init__(self, seed: int, folder: Path, round_s: float) -> None:
        self._round_s = round_s
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0
        self._random = random.Random(seed)
        self._folder = folder
        self._number = 0

    def round(self, cluster: RayVirtualCluster, policy_name: str) -> None:
        """Run one group under one policy, until time is up or it fails permanently."""
        ledger = self._folder / f"round-{self.counts['rounds']}"
        ledger.mkdir()
        self.counts["rounds"] += 1
        collective = self._random.random() < 0.3
        returned: list[int] = []
        end = time.monotonic() + self._round_s
        try:
            group = RayWorkerGroup(
                cluster,
                RayWorkerBuilder(COLLECTIVE if collective else WORKER, str(ledger)),
                name_prefix="chaos",
                sharding_annotations=NamedSharding([[0, 1]], ["replica", "data"]),
                start_deadline_s=START_DEADLINE_S,
                failure_policy=POLICIES[policy_name],
            )
        except WorkerError as error:
            self._clear(error)
            self.counts["failed_starts"] += 1
            self._nobody_is_left()
            return
        try:
            while time.monotonic() < end and self._call(group, policy_name, returned):
                pass
        finally:
            if not group.shutdown(force=True):
                raise ChaosError("shutdown could not end every process")
        self._nobody_is_left()
        self._check_ledger(ledger, returned, may_repeat=policy_name.endswith("retry"))

    def _call(
        self, group: RayWorkerGroup, policy_name: str, returned: list[int]
    ) -> bool:
        """Make one call; return False if the group can take no more."""
        self._number += 1
        number = self._number
        streams = self._random.random() < 0.3
        began = time.monotonic()
        try:
            if streams:
                self._stream(group)
            else:
                self._enter(group, number)
                returned.append(number)
            self.counts["results"] += 1
        except (WorkerError, DeadlineExceededError) as error:
            self._clear(error)
            self.counts["errors"] += 1
            return policy_name != "fail_fast" and "gives up" not in str(error)
        finally:
            took_s = time.monotonic() - began
            self.longest_s = max(self.longest_s, took_s)
            if took_s > LONGEST_S:
                raise ChaosError(f"call {number} took {took_s:.0f} s")
        return True

    def _enter(self, group: RayWorkerGroup, number: int) -> None:
        rows = [[number * 10 + rank, rank] for rank in range(NUM_WORKERS)]
        future = group.run_all_workers_sharded_data(
            "enter",
            row=rows,
            in_sharded_axes=["data"],
            common_kwargs={"number": number, "seconds": self._random.uniform(0, 0.2)},
        )
        results = group.get_all_worker_results(future, deadline_s=CALL_DEADLINE_S)
        if results != [(number, sum(row)) for row in rows]:
            raise ChaosError(f"call {number} returned {results} for {rows}")

    def _stream(self, group: RayWorkerGroup) -> None:
        sizes = [self._random.randrange(6) for _ in range(NUM_WORKERS)]
        future = group.run_all_workers_sharded_data(
            "items", size=sizes, in_sharded_axes=["data"]
        )
        ordered = self._random.random() < 0.5
        seen: list[tuple[int, int]] = []
        whole = False
        try:
            for item in group.iter_results(
                future, ordered=ordered, deadline_s=CALL_DEADLINE_S
            ):
                seen.append((item.rank, item.value))
            whole = True
        finally:
            for rank, size in enumerate(sizes):
                values = [value for other, value in seen if other == rank]
                if values != list(range(size))[: len(values)]:
                    raise ChaosError(f"worker {rank} streamed {values}")
                if whole and len(values) != size:
                    raise ChaosError(f"worker {rank} streamed {values} of {size}")

    def _clear(self, error: Exception) -> None:
        if "of group 'chaos'" not in str(error) and "group 'chaos'" not in str(error):
            raise ChaosError(f"an error that names nobody: {error}") from error

    def _nobody_is_left(self) -> None:
        end = time.monotonic() + 60
        pause = threading.Event()
        while processes := worker_processes():
            if time.monotonic() > end:
                raise ChaosError(f"processes are left: {processes}")
            pause.wait(0.05)

    def _check_ledger(
        self, ledger: Path, returned: list[int], *, may_repeat: bool
    ) -> None:
        """Compare what the workers recorded with what the calls have returned."""
        done: Counter[tuple[int, int]] = Counter()
        for path in ledger.iterdir():
            rank = int(path.name)
            for line in path.read_text().split():
                done[int(line), rank] += 1
        lost = [
            (number, rank)
            for number in returned
            for rank in range(NUM_WORKERS)
            if not done[number, rank]
        ]
        if lost:
            raise ChaosError(f"returned, but not done: {lost}")
        twice = [key for key, count in done.items() if count > 1]
        if twice and not may_repeat:
            raise ChaosError(f"done more than once: {twice}")
        self.counts["repeated"] += len(twice)


def run(seconds: float, seed: int) -> dict[str, object]:
    """Torment groups for a while; returns what happened.

    Raises:
        ChaosError: An invariant did not hold.
    """
    began = time.monotonic()
    tormentor = Tormentor(seed)
    names = list(POLICIES)

    def proven() -> bool:
        return bool(driver.counts["results"] and tormentor.counts["kill"])

    with tempfile.TemporaryDirectory() as folder:
        round_s = min(ROUND_S, seconds / len(POLICIES))
        driver = Driver(seed + 1, Path(folder), round_s)
        with (
            RayVirtualCluster([NUM_WORKERS], use_gpus=False, name="chaos") as cluster,
            tormentor.at_work(),
        ):
            spent_s = 0.0
            while spent_s < seconds or (spent_s < seconds + MORE_S and not proven()):
                driver.round(cluster, names[driver.counts["rounds"] % len(names)])
                spent_s = time.monotonic() - began
    if not proven():
        raise ChaosError("nothing was proven: no call has returned, or none was killed")
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "longest_call_s": round(driver.longest_s, 1),
        **driver.counts,
        **tormentor.counts,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    sys.stdout.flush()
    init_ray(num_cpus=NUM_WORKERS)
    summary = run(options.minutes * 60, options.seed)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
