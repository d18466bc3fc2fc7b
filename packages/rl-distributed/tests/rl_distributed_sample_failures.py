"""Workers that exit or raise in every possible way."""

from __future__ import annotations

import os
import signal
import sys
import threading


class MissingPartError(KeyError):
    """Carries more state than its message."""

    def __init__(self, part, known):
        super().__init__(part, known)
        self.part = part

    def __str__(self):
        return f"no part {self.part}"


class StubbornError(Exception):
    """Cannot be reconstructed from its message."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")


class Failing:
    """Fails as requested."""

    def __init__(self, error=None):
        if error == "missing":
            raise MissingPartError("wheel", ["axle"])
        if error == "exit":
            sys.exit(7)

    def pid(self):
        return os.getpid()

    def exit(self, code):
        sys.exit(code)

    async def exit_from_async(self, code):
        sys.exit(code)

    def kill(self, number):
        os.kill(os.getpid(), number)
        threading.Event().wait(300)

    def missing(self):
        raise MissingPartError("wheel", ["axle"])

    async def missing_from_async(self):
        self.missing()

    def missing_items(self):
        yield 1
        self.missing()

    def noted(self):
        error = ValueError("one")
        error.add_note("and more")
        raise error

    def stubborn(self):
        raise StubbornError(code=3)

    def with_a_lock(self):
        raise ValueError(threading.Lock())

    def large(self):
        raise ValueError(bytes(2 << 20))

    def secret(self):
        raise ValueError("cannot log in", {"with": os.environ["DOOR_TOKEN"]})

    def interrupted(self):
        raise KeyboardInterrupt

    def odd(self):
        raise BaseException("no Exception")

    def segfault(self):
        self.kill(signal.SIGSEGV)
