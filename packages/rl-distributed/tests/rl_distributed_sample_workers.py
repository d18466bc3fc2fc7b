"""Plain classes that the tests run as workers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from rl_distributed.errors import ConfigError
from rl_distributed.workers.cancellation import is_cancelled


def wait_for_file(path):
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.02)


class Sample:
    """Records its arguments and returns in all the ways that a worker can."""

    def __init__(self, base=0, *, label="sample"):
        self.base = base
        self.label = label
        self.calls = []

    def env(self, names):
        return {name: os.environ.get(name) for name in names}

    def all_env(self):
        return dict(os.environ)

    def pid(self):
        return os.getpid()

    def pid_after(self, seconds):
        threading.Event().wait(seconds)
        return os.getpid()

    def rank(self):
        return int(os.environ["RANK"])

    def echo(self, **kwargs):
        return int(os.environ["RANK"]), kwargs

    def add(self, value, offset=0):
        return None if value is None else value + offset + self.base

    def thread_name(self):
        return threading.current_thread().name

    def has_module(self, name):
        return name in sys.modules

    def count(self, up_to):
        for value in range(up_to or 0):
            yield self.rank() * 100 + value

    async def aecho(self, value):
        await asyncio.sleep(0)
        return value

    async def acount(self, up_to):
        for value in range(up_to):
            await asyncio.sleep(0)
            yield value

    def broken_count(self, up_to):
        yield 0
        raise ValueError("no more numbers")

    def fail(self):
        raise ValueError("the method broke")

    def fail_on(self, rank):
        if self.rank() == rank:
            raise ValueError("the method broke")
        self.wait()

    def user_fail(self):
        raise ConfigError("policy.size must be even: got 3")

    def unpicklable(self):
        return threading.Lock()

    def wait(self, seconds=300):
        threading.Event().wait(seconds)

    def return_when_there(self, path, value):
        wait_for_file(path)
        return value

    def die_on(self, rank):
        if self.rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.wait()

    def spawn_child(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        return child.pid

    def clean_up(self):
        self.calls.append("clean_up")

    def write_on_clean_up(self):
        path = os.environ["CLEAN_UP_FILE"]
        with open(f"{path}.{self.rank()}", "w") as file:
            file.write("clean")


class BrokenConstructor:
    def __init__(self, error="value"):
        if error == "user":
            raise ConfigError("model folder 'x' does not exist")
        if error == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if error == "wait":
            threading.Event().wait(300)
        raise ValueError("no good")


class Configured:
    """Requests another process, as engines with processes of their own do."""

    def __init__(self, base, seats=None):
        self.base = base
        self.seats = seats

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        assert num_gpus == 0
        if bundle_indices is None:
            return {}, {}, {}
        return {}, {"CONFIGURED": "yes"}, {"seats": bundle_indices}

    def state(self):
        return self.base, self.seats, os.environ.get("CONFIGURED")


class Counter:
    """Has state that a restart must restore, and ways to be slow or to die."""

    def __init__(self):
        self.total = 0

    def add(self, value):
        self.total += value
        return self.total

    def restore(self, total):
        self.total = total

    def env(self, names):
        return {name: os.environ.get(name) for name in names}

    def pid(self):
        return os.getpid()

    def wait(self, seconds=300):
        threading.Event().wait(seconds)
        return "done"

    def add_or_die(self, value, marker):
        """Die the first time, when the file does not exist, after creating it."""
        try:
            with open(marker, "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            return self.add(value)

    def count_and_die(self, up_to, rank):
        yield from range(up_to)
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_for_ever(self):
        value = 0
        while True:
            yield value
            value += 1
            threading.Event().wait(0.01)

    def return_when_there(self, path):
        wait_for_file(path)
        return "done"

    def write(self, path):
        with open(path, "w") as file:
            file.write("written")

    def wait_until_cancelled(self, path):
        while not is_cancelled():
            threading.Event().wait(0.01)
        with open(path, "w") as file:
            file.write("cancelled")

    async def await_for_ever(self):
        await asyncio.sleep(300)

    def compute_with_lock(self, seconds):
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e6)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        sys.setswitchinterval(before)
        return "done"

    def sleep_with_lock(self):
        ctypes.PyDLL(None).sleep(300)

    def fail_with(self, name):
        raise ValueError(f"cannot log in with {os.environ[name]}")

    def say(self, text):
        print("out:", text)  # noqa: T201 (it is what is tested)
        sys.stdout.buffer.write(f"bytes: {text}\n".encode())
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL)


class Ledger:
    """Records every call, so that it can be checked how often each was done."""

    def __init__(self, folder):
        self.path = os.path.join(folder, os.environ["RANK"])

    def enter(self, row, number, seconds):
        with open(self.path, "a") as file:
            file.write(f"{number}\n")
        threading.Event().wait(seconds)
        return number, sum(row)

    def items(self, size):
        for value in range(size):
            threading.Event().wait(0.02)
            yield value


class Trial:
    """Independent tasks, some of which fail."""

    def square(self, number):
        return number * number

    def fail_once(self, path):
        if not os.path.exists(path):
            open(path, "w").close()
            raise OSError("not yet")
        return path

    def die_once(self, path):
        if not os.path.exists(path):
            open(path, "w").close()
            self.die(signal.SIGKILL)
        return path

    def die(self, number):
        os.kill(os.getpid(), number)
        threading.Event().wait(60)
