"""Differences between servers: requests, answers and weight updates.

| server | row | update | confirmed by |
|---|---|---|---|
| `rl` (`rl serve`) | `/v1/completions` | `/rl/weights` | its answer, per token |
| `vllm` | `/v1/completions` | `/pause`, `/collective_rpc`, `/resume` | `/weight_info` |
| `sglang` | `/generate` | `/update_weights_from_disk` | `/get_weight_version` |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.errors import ConfigError
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.completions import Completion
from rl_models.generation.openai.connection import Connection, NoSuchRouteError
from rl_models.types import SamplingParams

__all__ = ["Dialect", "Row", "build_dialect"]

_COMPLETIONS = "/v1/completions"
# vLLM keeps seeds in signed integers of 64 bits, and reads -1 as none.
_SEEDS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row to continue."""

    number: int
    token_ids: list[int]
    seed: int
    stop: tuple[str, ...]
    sampling: SamplingParams
    max_new_tokens: int
    greedy: bool


class Dialect(ABC):
    """The requests and answers of one kind of server.

    Args:
        model: Name of the model in requests.
        stop_token_ids: Tokens that end a row; None: those of the server's model.
        unverified_weights: Accept servers that cannot confirm a version.
    """

    def __init__(
        self,
        model: str,
        stop_token_ids: Sequence[int] | None,
        unverified_weights: bool,
    ) -> None:
        self.model = model
        self.stop_token_ids = stop_token_ids
        self.unverified_weights = unverified_weights

    path = _COMPLETIONS

    @abstractmethod
    def request(self, row: Row) -> dict[str, Any]:
        """Return the request of a row."""

    def completion(
        self,
        row: Row,
        answer: Mapping[str, Any],
        names: Mapping[int, int],
        version: int,
    ) -> Completion:
        """Check a server's answer to a row and convert it.

        Args:
            row: The row.
            answer: The JSON of the answer.
            names: The version here by the server's number of it; empty before the first
                update.
            version: The version here if the server names none.

        Raises:
            GenerationError: Token ids or log-probs are missing, or are no numbers, or
                the server says that other weights sampled them.
        """
        (choice,) = answer.get("choices") or [{}]
        tokens = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        versions = [version] * len(tokens or ())
        for span in choice.get("weight_versions") or ():
            own = self._own_version(row, int(span["version"]), names, version)
            for place in range(span["start"], min(span["end"], len(versions))):
                versions[place] = own
        reason = choice.get("finish_reason")
        return _checked(row, tokens, logprobs, versions, reason)

    def _own_version(
        self, row: Row, number: int, names: Mapping[int, int], version: int
    ) -> int:
        """Return the version here of the server's number."""
        if number not in names and names and not self.unverified_weights:
            raise GenerationError(
                f"the answer to row {row.number} must be by the weights that the "
                f"server has confirmed, its version {max(names)}: got version "
                f"{number}; the server was started again, or somebody else has updated "
                "it: sync the weights again, and keep other runs away from it"
            )
        return names.get(number, version)

    @abstractmethod
    async def update(
        self, server: Connection, folder: Path, version: int, deadline_s: float
    ) -> int:
        """Have a server load a folder's weights; return its number of them.

        Raises:
            WeightSyncError: It does not confirm them.
        """


class _Rl(Dialect):
    """`rl serve`, whichever engine it has."""

    def request(self, row: Row) -> dict[str, Any]:
        body = _plain(self.model, row)
        if self.stop_token_ids is not None:
            body |= {"stop_token_ids": list(self.stop_token_ids), "ignore_eos": True}
        if row.stop:
            body |= {"stop": list(row.stop), "include_stop_str_in_output": True}
        return body

    async def update(
        self, server: Connection, folder: Path, version: int, deadline_s: float
    ) -> int:
        status = await server.get("/rl/status", deadline_s)
        # The server may have served another run, and its versions may only rise.
        wanted = int(status["weight_version"]) + 1
        body = {"path": str(folder), "version": wanted}
        answer = await server.post("/rl/weights", body, deadline_s, key="weights")
        if answer.get("version") != wanted or not answer.get("num_updated"):
            raise WeightSyncError(
                f"{server.address} must confirm version {wanted}: got {answer}"
            )
        return wanted


class _Vllm(Dialect):
    """vLLM's own server, started with `VLLM_SERVER_DEV_MODE=1` to take weights."""

    def request(self, row: Row) -> dict[str, Any]:
        body = _plain(self.model, row)
        body |= {
            "stop_token_ids": list(self.stop_token_ids or ()),
            "ignore_eos": self.stop_token_ids is not None,
            "skip_special_tokens": False,
        }
        if row.stop:
            body |= {"stop": list(row.stop), "include_stop_str_in_output": True}
        return body

    async def update(
        self, server: Connection, folder: Path, version: int, deadline_s: float
    ) -> int:
        async def post(path: str, body: Mapping[str, Any] | None = None) -> None:
            await server.post(path, body, deadline_s, key="weights")

        loading = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder)},
            "timeout": deadline_s,
        }
        is_named = True
        pause, remedy = "/pause?mode=wait", "start vLLM with VLLM_SERVER_DEV_MODE=1"
        async with _paused(post, pause, "/resume", remedy):
            await post("/collective_rpc", loading)
            # Keys and values of the old weights must not begin new answers.
            await post("/reset_prefix_cache")
            try:
                await post("/update_weight_version", {"new_version": str(version)})
            except NoSuchRouteError as error:
                _check_unverified(self, server, str(error))
                is_named = False
        if is_named:
            await _confirm(self, server, "/weight_info", version, deadline_s)
        return version


class _Sglang(Dialect):
    """SGLang's server, by its own route for token ids."""

    path = "/generate"

    def request(self, row: Row) -> dict[str, Any]:
        sampling = {
            "temperature": 0.0 if row.greedy else row.sampling.temperature,
            "top_p": 1.0 if row.greedy else row.sampling.top_p,
            "top_k": -1 if row.greedy else row.sampling.top_k or -1,
            "max_new_tokens": row.max_new_tokens,
            "sampling_seed": row.seed % (1 << 31),
            "stop": list(row.stop),
            "stop_token_ids": list(self.stop_token_ids or ()),
            "ignore_eos": self.stop_token_ids is not None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        return {
            "input_ids": row.token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }

    def completion(
        self,
        row: Row,
        answer: Mapping[str, Any],
        names: Mapping[int, int],
        version: int,
    ) -> Completion:
        about = answer.get("meta_info") or {}
        pairs = about.get("output_token_logprobs") or []
        tokens = [int(pair[1]) for pair in pairs]
        reason = (about.get("finish_reason") or {}).get("type")
        logprobs = [pair[0] for pair in pairs]
        return _checked(row, tokens, logprobs, [version] * len(tokens), reason)

    async def update(
        self, server: Connection, folder: Path, version: int, deadline_s: float
    ) -> int:
        async def post(
            path: str, body: Mapping[str, Any] | None = None
        ) -> dict[str, Any]:
            return await server.post(path, body or {}, deadline_s, key="weights")

        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
        }
        pause, remedy = "/pause_generation", "take a version of SGLang that has it"
        async with _paused(post, pause, "/continue_generation", remedy):
            answer = await post("/update_weights_from_disk", body)
            if not answer.get("success"):
                raise WeightSyncError(
                    f"{server.address} did not load version {version}: "
                    f"{answer.get('message', answer)}"
                )
        await _confirm(self, server, "/get_weight_version", version, deadline_s)
        return version


_DIALECTS: Mapping[str, type[Dialect]] = {"rl": _Rl, "vllm": _Vllm, "sglang": _Sglang}


def build_dialect(
    server: str,
    model: str,
    stop_token_ids: Sequence[int] | None,
    unverified_weights: bool,
) -> Dialect:
    """Make the dialect of `policy.generation.openai.server`; see `Dialect`."""
    return _DIALECTS[server](model, stop_token_ids, unverified_weights)


def _plain(model: str, row: Row) -> dict[str, Any]:
    """Return the fields that all servers of completions understand."""
    return {
        "model": model,
        "prompt": row.token_ids,
        "max_tokens": row.max_new_tokens,
        "temperature": 0.0 if row.greedy else row.sampling.temperature,
        "top_p": 1.0 if row.greedy else row.sampling.top_p,
        "top_k": 0 if row.greedy else row.sampling.top_k or 0,
        "seed": row.seed % _SEEDS,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _checked(
    row: Row,
    tokens: Any,
    logprobs: Any,
    versions: list[int],
    reason: str | None,
) -> Completion:
    where = f"the answer to row {row.number}"
    if not tokens:
        raise GenerationError(
            f"{where} must have token ids (return_token_ids): got none; take a server "
            "that gives them, such as rl serve or vLLM"
        )
    if logprobs is None or len(logprobs) != len(tokens) or None in logprobs:
        raise GenerationError(
            f"{where} must have a log-prob for each of its {len(tokens)} tokens: got "
            f"{0 if logprobs is None else len(logprobs)}"
        )
    wrong = next((x for x in logprobs if not math.isfinite(x)), None)
    if wrong is not None:
        raise GenerationError(
            f"{where} has a log-prob that is no number ({wrong}); the weights may have "
            "diverged"
        )
    if reason not in ("stop", "length"):
        raise GenerationError(
            f"{where} must end by stop or length: got {reason!r}; the server's log may "
            "say why"
        )
    return Completion(tokens, list(map(float, logprobs)), versions, reason == "length")


@asynccontextmanager
async def _paused(
    post: Callable[[str], Awaitable[Any]], pause: str, go_on: str, remedy: str
) -> AsyncIterator[None]:
    """Pause a server while its weights change.

    Args:
        post: Sends a request without a body.
        pause: Path that pauses the server.
        go_on: Path that resumes it.
        remedy: The remedy if the server has no such paths.

    Raises:
        WeightSyncError: The server does not know a path.
    """
    try:
        await post(pause)
        yield
    except BaseException as error:
        # A server left paused would answer no request, and not say why. A failure to
        # resume it matters less than the first error.
        with suppress(GenerationError):
            await post(go_on)
        if isinstance(error, NoSuchRouteError):
            raise WeightSyncError(f"{error}; {remedy}") from error
        raise
    await post(go_on)


async def _confirm(
    dialect: Dialect, server: Connection, path: str, version: int, deadline_s: float
) -> None:
    """Check the version that a server reports."""
    try:
        answer = await server.get(path, deadline_s)
    except NoSuchRouteError as error:
        _check_unverified(dialect, server, str(error))
        return
    found = answer.get("weight_version")
    if found is None:
        _check_unverified(dialect, server, f"GET {path} names no weight_version")
    elif str(found) != str(version):
        raise WeightSyncError(
            f"{server.address} must serve version {version} of the weights: it says "
            f"{answer}"
        )


def _check_unverified(dialect: Dialect, server: Connection, why: str) -> None:
    """Refuse a server that cannot confirm versions, unless the user allows it."""
    if not dialect.unverified_weights:
        raise ConfigError(
            f"{server.address} cannot confirm which weights it serves ({why}); take "
            "a version of the server that can, or say "
            "policy.generation.openai.unverified_weights=true"
        )
