"""Producers and consumers that live in actors."""

from __future__ import annotations

import os
import threading

from rl_distributed.errors import QueueClosedError


class Producer:
    """Puts numbers."""

    def pid(self):
        return os.getpid()

    def put(self, queue, number, count, close=True):
        for value in range(count):
            queue.put((number, value))
        if close:
            queue.close()
        return count


class Consumer:
    """Takes items."""

    def __init__(self):
        self.taken = []

    def pid(self):
        return os.getpid()

    def take_all(self, queue, at_a_time=1):
        while True:
            try:
                self.taken += queue.get_many(at_a_time)
            except QueueClosedError:
                return self.taken

    def take_and_hang(self, queue, count):
        self.taken = queue.get_many(count)
        self.queue = queue
        return self.taken

    def wait_for_one(self, queue):
        self.taken = queue.get_many(1)
        threading.Event().wait(300)
