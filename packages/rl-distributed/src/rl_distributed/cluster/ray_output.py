"""Redirect what Ray prints and logs in the driver into our log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray._private import worker as ray_worker

__all__ = ["route_ray_output"]

logger = logging.getLogger(__name__)


def route_ray_output() -> None:
    """Send Ray's reports about workers to our log instead of the standard streams.

    Ray prints what the raylet reports (a dead worker, for instance) even when it is
    told not to copy worker output, and logs the failure of every call that nobody
    asked about, as the second of two workers that failed alike. Both would stand
    between a program's own lines.
    """

    def to_log(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        del ignore_prefix
        for line in data.get("lines", ()):
            logger.debug("ray (%s): %s", data.get("pid", "?"), line)

    # The function is private, and other versions of Ray may not have it.
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = to_log
    ray_logger = logging.getLogger(ray_worker.__name__)
    # This runs at every start of Ray.
    if _demote_unhandled not in ray_logger.filters:
        ray_logger.addFilter(_demote_unhandled)


def _demote_unhandled(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith("Unhandled error"):
        return True
    logger.debug("ray: %s", record.getMessage())
    return False
