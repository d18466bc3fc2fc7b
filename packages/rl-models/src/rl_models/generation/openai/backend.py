"""The generation backend `openai`: one process that sends requests to servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np
import torch

from rl_distributed.errors import DistributedError
from rl_models.checkpoint.model_folder import folder_context_length
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.completions import Completion, join_rows
from rl_models.generation.config import GenerationConfig
from rl_models.generation.noise import derive_seeds
from rl_models.generation.openai.connection import (
    Connection,
    ServerLostError,
    gather_all,
)
from rl_models.generation.openai.dialects import Dialect, Row, build_dialect
from rl_models.generation.openai.model_folders import ModelFolders
from rl_models.generation.openai.traits import Traits
from rl_models.generation.rows import check_rows, stop_strings_of
from rl_models.generation.sampling import check_sampling_params
from rl_models.tokens.tokenizer import load_tokenizer, pad_token_id
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

__all__ = ["OpenAIGenerationBackend"]

T = TypeVar("T")

_LIST_DEADLINE_S = 30.0


class OpenAIGenerationBackend(Traits):
    """Continues rows by requests to servers, and sends them the trainer's weights.

    A row's sample depends on its seed and tokens only, if the server ensures that.
    """

    def __init__(self) -> None:
        self.config: GenerationConfig
        self.weight_version = 0
        self.pad_token_id = 0
        self._has_weights = True
        self._num_calls = 0
        # By address: the version here by its name there, since servers may count by
        # themselves.
        self._names: dict[str, dict[int, int]] = {}
        self._folders: ModelFolders | None = None

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        model_name: str,
        tokenizer_name: str | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        replica: int = 0,
        **context: Any,
    ) -> None:
        """Find the servers and their model.

        Args:
            config: `GenerationConfig.to_dict()`.
            model_name: Folder or hub name of the model that is trained.
            tokenizer_name: The same for the tokenizer; None takes the model's.
            load_weights: False refuses to generate before the first weight update.
            hf_config_overrides: Fields of the model's `config.json` to replace.
            replica: Number of this replica, for messages.
            context: Arguments of other backends; ignored.

        Raises:
            GenerationError: A server cannot be reached, refuses the key, or has no such
                model.
        """
        self.config = GenerationConfig.from_dict(
            dict(config), source="policy.generation"
        )
        self.name = f"generation replica {replica}"
        self.tokenizer = load_tokenizer(tokenizer_name or model_name)
        self.pad_token_id = pad_token_id(self.tokenizer)
        self._has_weights = load_weights
        self._context = self.config.max_context_length or folder_context_length(
            model_name
        )
        settings = self.config.openai
        self._keys = _keys_of(settings.api_key_variable, settings.weights_key_variable)
        self._folders = ModelFolders(
            settings.weights_folder, model_name, tokenizer_name, hf_config_overrides
        )
        model = self._run(self._model_of_all)
        self._dialect: Dialect = build_dialect(
            settings.server,
            model,
            self.config.stop_token_ids,
            settings.unverified_weights,
        )

    def _run(self, work: Callable[[list[Connection]], Awaitable[T]]) -> T:
        """Run a coroutine with connections to all servers."""

        # A session belongs to the loop that it was made in, and each call runs a loop.
        async def run() -> T:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                addresses = self.config.openai.addresses
                return await work(
                    [Connection(a, session, self._keys) for a in addresses]
                )

        return asyncio.run(run())

    async def _model_of_all(self, servers: list[Connection]) -> str:
        """Return the model's name in requests, which all servers must list."""
        answers = await gather_all(
            [server.get("/v1/models", _LIST_DEADLINE_S) for server in servers]
        )
        wanted = self.config.openai.model
        for server, answer in zip(servers, answers, strict=True):
            listed = [str(entry.get("id")) for entry in answer.get("data") or ()]
            wanted = wanted or next(iter(listed), None)
            if wanted not in listed:
                raise GenerationError(
                    f"{server.address} must serve the model {wanted!r}: it lists "
                    f"{', '.join(listed) or 'none'}; set policy.generation.openai.model"
                )
        return str(wanted)

    def generate(
        self,
        data: GenerationInput,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Continue every row, each by a request of its own.

        Args:
            data: Rows; without a column `seeds` the noise comes from `config.seed` and
                the number of calls so far.
            greedy: Take the most likely token.
            sampling: Settings of this call; None takes those of the config.

        Raises:
            BatchError: Rows are no prompts, or too long.
            GenerationError: No server answers, or an answer lacks what training needs.
        """
        if not self._has_weights:
            raise GenerationError(
                f"{self.name} has no weights: it was started without, or the last "
                "update failed. Call WeightSynchronizer.sync_weights() before "
                "generate()."
            )
        params = sampling or self.config.sampling_params()
        check_sampling_params(params)
        input_ids = data["input_ids"].cpu()
        lengths = data["input_lengths"].cpu().numpy().astype(np.int64)
        limit = params.max_new_tokens or self.config.max_new_tokens
        check_rows(input_ids, lengths, limit, self._context)
        seeds = data.get("seeds")
        if seeds is None:
            seeds = derive_seeds(self.config.seed, self._num_calls, len(lengths))
        self._num_calls += 1
        stops = stop_strings_of(data, self.config.stop_strings)
        rows = [
            Row(
                number,
                ids[: int(lengths[number])],
                int(seed),
                tuple(dict.fromkeys(stops[number])),
                params,
                limit,
                greedy,
            )
            for number, (ids, seed) in enumerate(
                zip(input_ids.tolist(), seeds.tolist(), strict=True)
            )
        ]
        completions = self._run(lambda servers: self._continue(servers, rows))
        return join_rows(input_ids, lengths, completions, self.pad_token_id)

    async def _continue(
        self, servers: list[Connection], rows: Sequence[Row]
    ) -> list[Completion]:
        room = asyncio.Semaphore(len(servers) * self.config.openai.max_requests)
        lost: set[str] = set()

        async def one(row: Row) -> Completion:
            async with room:
                return await self._continue_row(servers, row, lost)

        return await gather_all([one(row) for row in rows])

    async def _continue_row(
        self, servers: list[Connection], row: Row, lost: set[str]
    ) -> Completion:
        """Ask the least busy server, and another one if it fails.

        A row has its own seed, so asking again does no harm.
        """
        settings = self.config.openai
        body = self._dialect.request(row)
        for attempt in range(1, settings.num_attempts + 1):
            # A server that was lost is asked again only if no other is left.
            free = [s for s in servers if s.address not in lost] or servers
            server = min(free, key=lambda each: each.num_requests)
            server.num_requests += 1
            try:
                answer = await server.post(
                    self._dialect.path, body, settings.request_deadline_s
                )
                break
            except ServerLostError:
                lost.add(server.address)
                if attempt == settings.num_attempts:
                    raise
            finally:
                server.num_requests -= 1
        names = self._names.get(server.address, {})
        return self._dialect.completion(row, answer, names, self.weight_version)

    def load_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> int:
        """Have all servers load weights, and confirm them.

        Args:
            tensors: All weights by their Hugging Face names; read to its end.
            version: Number of these weights.

        Raises:
            WeightSyncError: A server did not load them, or confirms other ones. Nothing
                is generated then until an update succeeds.
            ConfigError: A server cannot confirm versions.
        """
        assert self._folders is not None
        folder = self._folders.write(tensors, version)
        deadline_s = self.config.weight_sync.deadline_s

        async def update(servers: list[Connection]) -> list[int]:
            return await gather_all(
                [
                    self._dialect.update(server, folder, version, deadline_s)
                    for server in servers
                ]
            )

        try:
            names = self._run(update)
        except DistributedError as error:
            # Some servers may have loaded them and others not.
            self._has_weights = False
            self._folders.remove(folder)
            if isinstance(error, GenerationError):
                raise WeightSyncError(
                    f"version {version} did not arrive: {error}"
                ) from error
            raise
        self._folders.serve(folder)
        for address, name in zip(self.config.openai.addresses, names, strict=True):
            # Alone: a server that was started again counts from the beginning, and its
            # numbers of earlier versions may come to mean others.
            self._names[address] = {name: version}
        self.weight_version = version
        self._has_weights = True
        return version

    def shutdown(self) -> None:
        """Remove folders of weights; the servers go on."""
        if self._folders is not None:
            self._folders.close()


def _keys_of(api: str | None, weights: str | None) -> dict[str, str]:
    """Return the keys by their use."""
    variables = {"api": api, "weights": weights or api}
    return {what: os.environ[name] for what, name in variables.items() if name}
