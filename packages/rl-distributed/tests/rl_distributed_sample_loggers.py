"""A plain class that logs in every way available to a worker."""

from __future__ import annotations

import logging
import os
import threading

from rl_distributed.logs.logging import get_logger
from rl_distributed.timing.timer import Timer

logger = get_logger(__name__)


class Talker:
    """Writes log lines, and measures spans."""

    def __init__(self):
        self.timer = Timer()
        logger.info("constructed")

    def talk(self, text):
        with self.timer.time("talk"), self.timer.time("talk/inner"):
            logger.debug("own: %s", text, extra={"num_rows": 3, "api_token": "hide me"})
            logging.getLogger("third.party").warning("theirs: %s", text)
            logging.getLogger("ray.something").warning("of ray: %s", text)
        return os.getpid()

    def talk_from_thread(self):
        thread = threading.Thread(target=lambda: logger.info("from a thread"))
        thread.start()
        thread.join(60)

    async def talk_async(self):
        logger.info("from a coroutine")

    def stream(self, count):
        for index in range(count):
            logger.info("item %d", index)
            yield index

    def fail(self):
        try:
            raise ValueError("inner")
        except ValueError as error:
            logger.exception("it failed")
            raise RuntimeError("outer") from error

    def spans(self):
        return self.timer.get_spans()
