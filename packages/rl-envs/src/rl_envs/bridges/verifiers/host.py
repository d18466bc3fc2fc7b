"""The process that has verifiers: it loads an environment and runs its rollouts.

Each line of its input is a JSON object with `id` and `do` (`load`, `rows`, `rollout`,
`cancel`); each line of its output answers one by `id`, with `result` or `error`. It
ends when its input closes. Standard library and verifiers only: the Python that runs
it has nothing else of ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any, TextIO

__all__: list[str] = []


_SAID_NOTHING = "EmptyModelResponseError"


class _Host:
    """Answers requests, many rollouts at a time."""

    def __init__(self, replies: TextIO) -> None:
        self._replies = replies
        self._env: Any = None
        self._http: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(self._take, json.loads(line))
            # Rollouts may block the loop, and nobody waits for them.
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await asyncio.Event().wait()

    def _take(self, request: dict[str, Any]) -> None:
        number = request["id"]
        if request["do"] == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        self._tasks[number] = asyncio.create_task(self._answer(request))

    async def _answer(self, request: dict[str, Any]) -> None:
        reply: dict[str, Any]
        try:
            do = {"load": self._load, "rows": self._rows, "rollout": self._rollout}
            reply = {"result": await do[request["do"]](request)}
        except Exception as error:
            # An environment may raise anything.
            reply = {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._tasks.pop(request["id"], None)
        text = json.dumps({"id": request["id"], **reply}, default=str)
        self._replies.write(text + "\n")
        self._replies.flush()

    async def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["folder"]:
            sys.path.insert(0, request["folder"])
        import verifiers  # noqa: PLC0415 - only this process has it

        if not hasattr(verifiers, "load_environment"):
            raise ImportError(
                f"verifiers {verifiers.__version__} has no load_environment; install "
                "verifiers>=0.1.14,<0.4"
            )
        self._env = verifiers.load_environment(request["env"], **request["args"])
        # Comparisons within a group are not what one rollout can be rewarded by.
        return {"needs_groups": bool(self._env.requires_group_rollouts)}

    async def _rows(self, request: dict[str, Any]) -> list[Any]:
        env = self._env
        is_eval = request["dataset"] == "eval"
        rows = env.get_eval_dataset() if is_eval else env.get_dataset()
        return [dict(row) for row in rows]

    async def _rollout(self, request: dict[str, Any]) -> dict[str, Any]:
        from openai import AsyncOpenAI  # noqa: PLC0415 - comes with verifiers
        from verifiers.clients import OpenAIChatCompletionsClient  # noqa: PLC0415

        if self._http is None:
            import httpx  # noqa: PLC0415 - comes with openai

            # The address is on this machine, so proxies do not count.
            limits = httpx.Limits(max_connections=None)
            self._http = httpx.AsyncClient(limits=limits, timeout=600, trust_env=False)
        client = OpenAIChatCompletionsClient(
            AsyncOpenAI(
                base_url=request["base_url"],
                api_key=request["api_key"],
                http_client=self._http,
            )
        )
        output = await self._env.run_rollout(
            request["input"], client, request["model"], request["sampling"]
        )
        error = output.get("error")
        # A policy may say nothing, which is no failure of the environment.
        if error and _SAID_NOTHING in str(error):
            return {"reward": 0.0, "metrics": {}}
        if error:
            raise RuntimeError(f"the rollout failed: {error}")
        return {"reward": output["reward"], "metrics": output.get("metrics") or {}}


def _main() -> None:
    # What the environment prints must not be read as a reply.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(_Host(replies).run())


if __name__ == "__main__":
    _main()
