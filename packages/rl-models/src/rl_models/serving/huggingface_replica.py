"""The process of one replica without vLLM: the backend `huggingface` behind HTTP.

```
actor's main thread: start(), load_weights(), stop()
      |  run_coroutine_threadsafe
server thread: event loop -> aiohttp --job--> engine thread: one batch at a time
                               ^--- tokens, step by step ---|
```
| part          | consumes | produces | waits for       | is unblocked by         |
|---------------|----------|----------|-----------------|-------------------------|
| engine thread | jobs     | tokens   | the next job    | a request, a weight     |
|               |          |          |                 | update                  |
| a request     | tokens   | events   | the next tokens | a step, the end, a loss |

A request samples all its answers together; requests follow one another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from rl_distributed.errors import UserError
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.serving.engine_failure import CAUSE
from rl_models.serving.errors import ApiError, error_body
from rl_models.serving.folder_weights import verified_tensors
from rl_models.serving.huggingface_job import Job
from rl_models.serving.openai_request import (
    CHAT,
    COMPLETIONS,
    OpenAIRequest,
    prompt_ids,
)

__all__ = ["HuggingFaceReplica"]

logger = logging.getLogger(__name__)

_VERSION_HEADER = "x-rl-weight-version"
_KEEP_ALIVE_S = 120.0
# The router has checked the size already.
_MOST_BYTES = 1 << 34

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HuggingFaceReplica:
    """One replica; a plain class that runs where its server runs.

    Args:
        config: `GenerationConfig.to_dict()`.
        model: Folder or hub name.
        model_name: Name of the model in requests.
        key_variable: Environment variable with the key that requests must have.
    """

    def __init__(
        self, config: Mapping[str, Any], model: str, model_name: str, key_variable: str
    ) -> None:
        self._config = GenerationConfig.from_dict(dict(config), source="the server")
        self._model, self._model_name = model, model_name
        self._wanted = f"Bearer {os.environ[key_variable]}"
        self._backend = HuggingFaceGenerationBackend()
        # One thread: batches and weight updates take turns, and need no lock.
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self, deadline_s: float) -> dict[str, Any]:
        """Load the model and begin to listen; return port and further processes."""
        self._backend.setup(self._config.to_dict(), model_name=self._model)
        self._thread.start()
        return {"port": self._run(self._listen(), deadline_s), "pids": []}

    def load_weights(
        self,
        folder: str,
        entries: list[tuple[str, list[Any]]],
        version: int,
        deadline_s: float,
    ) -> str:
        """Load the weights of a folder between two requests.

        Args:
            folder: The folder.
            entries: See `FolderWeights.to_plain`.
            version: Number of these weights in answers.
            deadline_s: How long it may take.

        Returns:
            The problem, or an empty string.
        """
        # In the engine's thread, and therefore between two requests.
        tensors = verified_tensors(folder, entries)
        work = self._engine.submit(self._backend.load_weights, tensors, version)
        try:
            work.result(deadline_s)
        except WeightSyncError as error:
            return str(error)
        except TimeoutError:
            work.cancel()
            return f"the weight update did not end within {deadline_s:g} s"
        return ""

    def stop(self) -> None:
        """End the server and the engine's thread."""
        self._run(self._runner.cleanup(), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._engine.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Coroutine[Any, Any, Any], deadline_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise GenerationError(
                f"the HTTP server of the replica was not ready in {deadline_s:g} s"
            ) from None

    # --- in the server's thread ---------------------------------------------------

    async def _listen(self) -> int:
        app = web.Application(middlewares=[self._guard], client_max_size=_MOST_BYTES)
        app.router.add_post(CHAT, self._generate)
        app.router.add_post(COMPLETIONS, self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._health)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_S,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Admit only the router, and give errors OpenAI's form."""
        given = request.headers.get("Authorization", "")
        if request.path != "/health" and given != self._wanted:
            return web.Response(status=401)
        try:
            return await handler(request)
        except ApiError as error:
            return web.json_response(error_body(error), status=error.status)
        except UserError as error:
            problem = ApiError(400, str(error), "bad_request")
            return web.json_response(error_body(problem), status=400)
        except web.HTTPException:
            raise
        except Exception as error:
            return web.json_response(_failure(error), status=500)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self._check_name(fields)
        asked = OpenAIRequest.read(
            request.path,
            fields,
            self._backend.tokenizer,
            self._backend.context_length,
            int(self._backend.model.config.vocab_size),
        )
        job = Job(asked, self._backend, self._model_name)
        job.check()
        running = self._loop.run_in_executor(self._engine, job.run)
        try:
            if asked.stream:
                return await self._stream(request, job, running)
            await running
            headers = {_VERSION_HEADER: str(job.version)}
            return web.json_response(job.answer.whole(), headers=headers)
        finally:
            # If the client has gone, the rest need not be sampled.
            job.cancel()

    async def _stream(
        self, request: web.Request, job: Job, running: asyncio.Future[None]
    ) -> web.StreamResponse:
        # Awaited before the answer begins: a failure before the first token can still
        # be answered with a status.
        events = job.events(running)
        first = await anext(events)
        headers = {
            "Content-Type": "text/event-stream",
            _VERSION_HEADER: str(job.version),
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(first)
        try:
            async for event in events:
                await response.write(event)
        except UserError as error:
            problem = error_body(ApiError(400, str(error), "bad_request"))
            await response.write(_event(problem))
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(_event(_failure(error)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _check_name(self, fields: Mapping[str, Any]) -> None:
        name = fields.get("model", self._model_name)
        if name != self._model_name:
            raise ApiError(
                404,
                f"The model {name!r} does not exist; the server has "
                f"{self._model_name!r}.",
                "model_not_found",
            )

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rl",
            "max_model_len": self._backend.context_length,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = await request.json()
        (ids, *_) = prompt_ids(fields, self._backend.tokenizer)
        limit = self._backend.context_length
        return web.json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": limit}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        (ids, *_) = prompt_ids(
            {"prompt": (await request.json()).get("tokens")}, self._backend.tokenizer
        )
        return web.json_response({"prompt": self._backend.tokenizer.decode(ids)})


def _failure(error: Exception) -> dict[str, Any]:
    """Get the answer about a failure of ours, with its cause for the router's log."""
    words = "".join(traceback.format_exception(error)).strip()
    logger.error("a request failed: %s", words)
    problem = ApiError(500, "The engine failed.", "engine_error")
    return {**error_body(problem), CAUSE: [f"{type(error).__name__}: {error}", words]}


def _event(answer: dict[str, Any]) -> bytes:
    return b"data: " + web.json_response(answer).body + b"\n\n"  # type: ignore[operator]
