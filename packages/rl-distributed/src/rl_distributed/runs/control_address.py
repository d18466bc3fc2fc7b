"""The address at which a run is asked, by keys with roles.

```
rl ctl --HTTP, key--> door --> a thread: send_request --file--> the run, between steps
       <------------------------------- answer <--------------------'
```
A request goes on through the folder of the run, as those of its owner do, so that the
run knows one kind only. The name of the key identifies the requester.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from rl_distributed.access.bound_socket import bound_socket
from rl_distributed.access.door import Door, is_loopback
from rl_distributed.access.http_app import (
    Route,
    RouteTable,
    current_caller,
    error_response,
    guarded_app,
    json_object,
    metrics_route,
)
from rl_distributed.access.http_thread import HttpThread
from rl_distributed.access.key_file import KeyFile, default_key_file
from rl_distributed.access.key_routes import key_routes
from rl_distributed.access.listener_tls import server_context
from rl_distributed.access.replay import ReplayGuard
from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_distributed.logs.logging import get_logger
from rl_distributed.private_files import write_private_text
from rl_distributed.runs.control_config import ControlConfig
from rl_distributed.runs.requests import send_request

__all__ = ["ADDRESS", "ControlAddress", "control_routes"]

_logger = get_logger(__name__)

ADDRESS = "control.json"
"""Name of the file with the address, in the folder of the run."""
ACTIONS = ("pause", "resume", "checkpoint", "stop", "update")
_MOST_WAITING = 8
_DRAIN_S = 5.0
_LONGEST_WAIT_S = 3600.0

Status = Callable[[], Mapping[str, Any]]


def control_routes(run_dir: Path, status: Status, door: Door) -> RouteTable:
    """Return the routes of a run.

    Args:
        run_dir: Its folder.
        status: Returns how it stands, as JSON values; called in another thread.
        door: Admits requests.
    """
    waiting: set[asyncio.Task[web.StreamResponse]] = set()

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def shown(request: web.Request) -> web.StreamResponse:
        return web.json_response(dict(status()))

    def asking(action: str) -> Callable[[web.Request], Any]:
        async def ask(request: web.Request) -> web.StreamResponse:
            body, wait_s = _content(action, await json_object(request))
            if len(waiting) >= _MOST_WAITING:
                return error_response(
                    429, "too_many", "Other requests wait for the run: come back later."
                )
            # One whose client hangs up waits on, and counts, as its thread does.
            task = asyncio.create_task(_asked(run_dir, action, body, wait_s))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            return await asyncio.shield(task)

        return ask

    return RouteTable(
        [
            Route("GET", "/health", None, health),
            Route("GET", "/rl/run", "view", shown),
            metrics_route(door),
            *(
                Route("POST", f"/rl/run/{action}", "operate", asking(action))
                for action in ACTIONS
            ),
            *key_routes(door.key_file),
        ]
    )


def _content(action: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return what is asked of the run, and how long to wait for it.

    Raises:
        web.HTTPException: The body has another form.
    """
    known = {"deadline_s", "changes"} if action == "update" else {"deadline_s"}
    wait_s = body.get("deadline_s", 600.0)
    is_number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
    if set(body) - known or not is_number or not math.isfinite(wait_s) or wait_s <= 0:
        raise web.HTTPBadRequest(
            reason=f"The body may have {' and '.join(sorted(known))}, a positive number"
        )
    changes = body.get("changes")
    if action == "update":
        if not isinstance(changes, dict) or not changes:
            raise web.HTTPBadRequest(reason="changes must be {key: value}")
        return {"changes": changes}, min(float(wait_s), _LONGEST_WAIT_S)
    return {}, min(float(wait_s), _LONGEST_WAIT_S)


async def _asked(
    run_dir: Path, action: str, body: Mapping[str, Any], wait_s: float
) -> web.StreamResponse:
    send = functools.partial(
        send_request,
        run_dir,
        action,
        body,
        by=str(current_caller.get()),
        deadline_s=wait_s,
    )
    try:
        answer = await asyncio.to_thread(send)
    except DeadlineExceededError as error:
        return error_response(504, "deadline", str(error))
    except ConfigError as error:
        # The run's own words, or those about its folder, which is not for others.
        said = str(error).replace(str(run_dir), "the run's folder")
        return error_response(409, "refused", said)
    return web.json_response(answer)


class ControlAddress:
    """Listens for requests to a run until it is closed.

    Args:
        run_dir: Folder of the run.
        config: Where to listen, and whose keys are good.
        status: Returns how the run stands, as JSON values; called in another thread.

    Raises:
        ConfigError: The port is taken, or TLS is missing for another address than
            loopback.
        SecurityError: The file of keys is missing or unsafe, or the certificate is
            wrong.
    """

    def __init__(self, run_dir: Path, config: ControlConfig, status: Status) -> None:
        named = config.keys_file
        keys = KeyFile(default_key_file() if named is None else named)
        keys.check()
        tls = server_context(config.tls, config.host)
        self._file = run_dir / ADDRESS
        self.door = door = Door(
            "run",
            key_file=keys,
            own_host_only=True,
            is_loopback=is_loopback(config.host),
            replay=ReplayGuard(),
        )
        """Also counts what was refused."""
        listener = bound_socket(
            config.host, config.port, how_to_change="control.port and control.host"
        )
        app = guarded_app(door, control_routes(run_dir, status, door))
        self._server = HttpThread(app, door, listener, tls=tls, drain_s=_DRAIN_S)
        self.url = self._server.url
        """Its address."""
        note = {"url": self.url, "pid": os.getpid()}
        write_private_text(self._file, json.dumps(note) + "\n")
        _logger.info(
            "the run is controlled at %s, with the keys of %s", self.url, keys.path
        )

    def close(self) -> None:
        """Stop listening, after the answers in progress."""
        self._server.close()
        self._file.unlink(missing_ok=True)
