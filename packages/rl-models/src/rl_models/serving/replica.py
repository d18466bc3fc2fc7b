"""The process of one replica: vLLM's engine behind vLLM's own HTTP server.

```
actor's main thread: start(), load_weights(), stop()
      |  run_coroutine_threadsafe
server thread: event loop -> uvicorn -> vLLM's app -> AsyncLLM --pipe--> engine process
```
If the engine's process dies, this one ends as well: that is noticed at once, whereas a
replica without its engine would go on to answer with errors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.vllm.engine_args import engine_args
from rl_models.serving.failure_report import FailureReport
from rl_models.serving.recent_errors import RecentErrors, relevant_lines
from rl_models.serving.replica_access import Gate
from rl_models.serving.version_stamp import VersionStamp

__all__ = ["EXTENSION", "ServingReplica"]

logger = logging.getLogger(__name__)

EXTENSION = "rl_models.serving.extension.ServingExtension"
_WATCH_EVERY_S = 0.5
# A step of a large model on a CPU takes many seconds.
_ENGINE_SILENCE_S = 120.0
_ENGINE_GONE = 70
_EXPLAIN_S = 2.0
# Longer than the router keeps an idle connection, so that it never uses one that is
# being closed.
_KEEP_ALIVE_S = 120


class ServingReplica:
    """One replica; a plain class that needs the `vllm` environment.

    Args:
        config: `GenerationConfig.to_dict()` of a config with `async_engine`.
        model: Folder or hub name.
        model_name: Name of the model in requests.
        dtype: Data type for vLLM; "auto" is that of the model.
        on_gpu: Whether the engine runs on GPUs.
        key_variable: Environment variable with the key that requests must have.
        tool_call_parser: vLLM's name for the model's format of tool calls; None: they
            are refused.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        model: str,
        model_name: str,
        dtype: str,
        on_gpu: bool,
        key_variable: str,
        tool_call_parser: str | None = None,
    ) -> None:
        self._config = GenerationConfig.from_dict(dict(config), source="the server")
        self._model, self._model_name, self._dtype = model, model_name, dtype
        self._on_gpu = on_gpu
        self._key = os.environ[key_variable]
        self._tool_call_parser = tool_call_parser
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._port = 0
        self._is_updating = False

    def start(self, deadline_s: float) -> dict[str, Any]:
        """Load the model and begin to listen; return port and processes."""
        self._thread.start()
        self._run(self._start(), deadline_s, "start of the engine")
        return {"port": self._port, "pids": _descendants()}

    def load_weights(
        self,
        folder: str,
        entries: list[tuple[str, list[Any]]],
        version: int,
        deadline_s: float,
    ) -> str:
        """Load the weights of a folder while requests wait.

        Args:
            folder: The folder.
            entries: See `FolderWeights.to_plain`.
            version: Number of these weights in answers.
            deadline_s: How long it may take.

        Returns:
            The problem, or an empty string. After a problem requests keep waiting,
            because the engine has weights of no version; the fleet replaces it.
        """
        update = self._update(folder, entries, version)
        return str(self._run(update, deadline_s, "weight update"))

    def stop(self) -> None:
        """End server and engine."""
        self._run(self._stop(), 10.0, "end of the server")
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, Any], deadline_s: float, what: str) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise GenerationError(
                f"the {what} did not end within {deadline_s:g} s"
            ) from None

    # --- in the server's thread ---------------------------------------------------

    async def _start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        # After the import, which replaces the handlers of vLLM's logger.
        self._errors = RecentErrors("vllm")
        arguments = self._arguments()
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(arguments))
        self._engine = engine
        await engine.update_weight_version("0")
        await self._listen(arguments)
        self._watch = asyncio.create_task(self._end_with_the_engine())

    def _arguments(self) -> Any:
        """Return our settings in the form of vLLM's parsed command line."""
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        ours = engine_args(self._config, model_name=self._model, on_gpu=self._on_gpu)
        ours |= {
            "dtype": self._dtype,
            "worker_extension_cls": EXTENSION,
            "served_model_name": [self._model_name],
            "disable_log_stats": False,
            "disable_fastapi_docs": True,
            "structured_outputs_config": _structured_outputs(self._tool_call_parser),
            "tool_call_parser": self._tool_call_parser,
            "enable_auto_tool_choice": self._tool_call_parser is not None,
        }
        # Arguments of vLLM that the user has set take precedence.
        for name, value in {**ours, **self._config.vllm.engine_args}.items():
            setattr(arguments, name, value)
        return arguments

    async def _listen(self, arguments: Any) -> None:
        import uvicorn  # noqa: PLC0415
        from vllm.entrypoints.launchers.api_server.app_state import (  # noqa: PLC0415
            init_app_state,
        )
        from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415

        engine = self._engine
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        self._stamp = VersionStamp(app, engine)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        settings = uvicorn.Config(
            Gate(FailureReport(self._stamp, self._explain), self._key),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(settings)
        # vLLM's handlers of engine errors read it from here.
        app.state.server = self._server
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                raise GenerationError("the HTTP server of the replica did not start")
            await asyncio.sleep(0.01)

    async def _explain(self, since_s: float, request_id: str) -> list[str]:
        """Return what server and engine have logged about a request that failed."""
        lines = self._errors.since(since_s)
        asked = self._engine.collective_rpc("rl_errors_since", args=(since_s,))
        try:
            for said in await asyncio.wait_for(asked, _EXPLAIN_S):
                lines += said
        except Exception as error:
            # A dead engine cannot answer; the server's own lines are still reported.
            lines.append(f"the engine does not say more: {error!r}")
        return relevant_lines(lines, request_id)

    async def _end_with_the_engine(self) -> None:
        """Watch the engine: its process, and whether that still answers."""
        asked = asyncio.create_task(self._engine.is_paused())
        asked_s = time.monotonic()
        while not self._engine.errored:
            await asyncio.sleep(_WATCH_EVERY_S)
            if asked.done() or self._is_updating:
                asked.cancel()
                asked = asyncio.create_task(self._engine.is_paused())
                asked_s = time.monotonic()
            elif time.monotonic() - asked_s > _ENGINE_SILENCE_S:
                break
        logger.error("the engine is gone or does not answer; ending the replica")
        os._exit(_ENGINE_GONE)

    async def _update(
        self, folder: str, entries: list[tuple[str, list[Any]]], version: int
    ) -> str:
        self._is_updating = True
        try:
            return await self._replace_weights(folder, entries, version)
        finally:
            self._is_updating = False

    async def _replace_weights(
        self, folder: str, entries: list[tuple[str, list[Any]]], version: int
    ) -> str:
        engine = self._engine
        # Clearing the cache has everything recomputed, so that every token from here on
        # depends on the new weights alone.
        await engine.pause_generation(mode="keep", clear_cache=True)
        said = await engine.collective_rpc("rl_load_folder", args=(folder, entries))
        problems = [problem for problem in said if problem]
        if problems:
            # Still paused: no token may be sampled from these weights.
            return str(problems[0])
        await engine.reset_prefix_cache()
        await engine.update_weight_version(str(version))
        self._stamp.version = version
        await engine.resume_generation()
        return ""

    async def _stop(self) -> None:
        self._watch.cancel()
        self._server.should_exit = True
        await self._serving
        self._engine.shutdown()


def _structured_outputs(tool_call_parser: str | None) -> Any:
    """Return the settings that constrain answers to a form, such as a JSON schema.

    If white space is free, a model may write nothing else, and its answer is no JSON at
    the last token. vLLM cannot forbid it with the backend `auto`. Of the two others,
    guidance supports more schemas, and only xgrammar supports the grammars of vLLM's
    parsers for tool calls.
    """
    from vllm.config import StructuredOutputsConfig  # noqa: PLC0415

    return StructuredOutputsConfig(
        backend="guidance" if tool_call_parser is None else "xgrammar",
        disable_any_whitespace=True,
    )


def _descendants() -> list[int]:
    """Return processes that this one has started, the engine's among them."""
    import psutil  # noqa: PLC0415

    return [child.pid for child in psutil.Process().children(recursive=True)]
