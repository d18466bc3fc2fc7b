"""The path that weights take: a link between trainer and replicas, or references.

| transport     | to the replicas                                        | from     |
|---------------|--------------------------------------------------------|----------|
| object_store  | results of calls, which the driver passes on           | any rank |
| shared_memory | files under /dev/shm, reused for every bucket          | any rank |
| file          | safetensors, removed once all replicas have loaded them| any rank |
| collective    | a process group of its own: gloo, on GPUs NCCL         | rank 0   |
| cuda_ipc      | handles of memory on the GPU that both sides share     | rank 0   |

`auto` is shared memory on one machine with room for it, else the object store. Where
any rank sends, each has a link of its own (`LinkSet`).
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
)
from rl_distributed.logs.logging import get_logger
from rl_distributed.transfer import (
    CollectiveLink,
    CudaIpcLink,
    FileLink,
    LinkSet,
    SharedMemoryLink,
    TensorLink,
)
from rl_models.errors import WeightSyncError
from rl_models.interfaces import lacking
from rl_models.weight_request import Pending, WeightRequest
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.protocols import (
    LinkedSink,
    LinkedSource,
    SharedSource,
    WeightSink,
    WeightSource,
)

__all__ = ["WeightLinks", "failure_of", "join_failures", "shared_out"]

_logger = get_logger(__name__)

# A second link has a port of its own: the first one often fails because another program
# took its port after it was found to be free.
_ATTEMPTS = 2
# The workers give up by themselves at the deadline; their answer still has to arrive.
_GRACE_S = 5.0
# A store that cannot listen says so within milliseconds.
_PORT_S = 0.3
# Waiting for one side may use up the time of both, although the other has answered.
_SHORTEST_S = 0.1
# A tensor travels in one piece, however large, and a few buckets exist at a time.
_LEAST_ROOM = 1 << 30
_BUCKETS_OF_ROOM = 8
# A process group has one sender, and a process has the memory of its own GPU only.
_FROM_FIRST = ("collective", "cuda_ipc")


class WeightLinks:
    """Makes links between a trainer and its replicas, and keeps the last one.

    Args:
        config: Which transport, and its settings.
        policy: The side that sends.
        generation: The side that receives.
    """

    def __init__(
        self, config: WeightSyncConfig, policy: WeightSource, generation: WeightSink
    ) -> None:
        self._config = config
        self._policy = policy
        self._generation = generation
        self._link: TensorLink | LinkSet | None = None
        self._members: Any = None
        self._folder: Path | None = None
        # Versions of other runs have the same numbers, and files of a run that was
        # killed stay: replicas would read them in place of its own.
        self._run = f"run-{secrets.token_hex(4)}"

    def planned(self, request: WeightRequest) -> WeightRequest:
        """Return a request with the ranks that send, if the transport takes several."""
        if self._transport(1) in _FROM_FIRST:
            return request
        return shared_out(self._policy, request)

    def joined(
        self, version: int, senders: tuple[int, ...] = (0,)
    ) -> TensorLink | LinkSet | None:
        """Return a link that both sides have joined; None if the transport needs none.

        Args:
            version: Number of the weights.
            senders: Ranks that send.

        Raises:
            ConfigError: The transport cannot connect where the workers run.
            WeightSyncError: The two sides failed to connect, also over a second link.
        """
        transport = self._transport(len(senders))
        if transport == "object_store":
            self.drop()
            return None
        members = self._members_now(senders)
        if transport == "file" or members != self._members:
            # Files are for one version. A replaced replica joins again, and so does a
            # worker that has loaded another model: it has left the link for that.
            self.drop()
        if self._link is None:
            self._link = self._join(transport, version, senders)
        return self._link

    def _members_now(self, senders: tuple[int, ...]) -> tuple[Any, Any, Any]:
        return self._source.live_processes(), self._sink.live_processes(), senders

    @property
    def _source(self) -> LinkedSource:
        self._check_joins(self._policy, LinkedSource)
        return cast(LinkedSource, self._policy)

    @property
    def _sink(self) -> LinkedSink:
        self._check_joins(self._generation, LinkedSink)
        return cast(LinkedSink, self._generation)

    def _check_joins(self, side: object, protocol: type) -> None:
        missing = lacking(side, protocol)
        if missing:
            raise ConfigError(
                f"weight_sync.transport {self._config.transport!r} needs a policy and "
                f"a generator that join a link: {type(side).__name__} has no "
                f"{', '.join(missing)}; use 'object_store'"
            )

    def drop(self) -> None:
        """Close the link; the next sync makes another."""
        # Forgotten before it is closed: if closing raises, a broken link must not be
        # used again.
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Close the link and remove the folder of this run."""
        self.drop()
        if self._config.folder is not None:
            with suppress(OSError):  # no file was sent, or something else is in it
                self._files().rmdir()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _transport(self, num_senders: int) -> str:
        """Return the transport to use, decided here for `auto`."""
        if self._config.transport != "auto":
            return self._config.transport
        if lacking(self._policy, LinkedSource) or lacking(self._generation, LinkedSink):
            return "object_store"
        if not self._is_one_machine():
            return "object_store"
        buckets = _BUCKETS_OF_ROOM * num_senders
        wanted = max(_LEAST_ROOM, buckets * self._config.bucket_bytes)
        # An existing link already owns its files and reuses them; only a new one needs
        # more room.
        if self._link is None and SharedMemoryLink.room() < wanted:
            return "object_store"
        return "shared_memory"

    def _join(
        self, transport: str, version: int, senders: tuple[int, ...]
    ) -> TensorLink | LinkSet:
        failures: list[DistributedError] = []
        limit_s = self._config.link_deadline_s
        for _ in range(_ATTEMPTS):
            # Looked up for each link: a replica that was lost while the first one was
            # joined will not join the second, and the trainer would wait for it.
            members = self._members_now(senders)
            link = self._build_all(transport, version, len(members[1]), senders)
            failures = self._open(link, limit_s)
            if not failures:
                self._members = members
                return link
            link.close()
            _logger.warning("a link for weights did not come up: %s", failures[0])
        raise WeightSyncError(
            f"Trainer and replicas did not come together over {link}: "
            f"{join_failures(failures)}"
        ) from failures[0]

    def _open(
        self, link: TensorLink | LinkSet, limit_s: float
    ) -> list[DistributedError]:
        """Have both sides join; return the reasons if they did not."""
        until_s = time.monotonic() + limit_s + _GRACE_S
        sender = self._source.open_weight_link(link, limit_s)
        if isinstance(link, CollectiveLink):
            # Joining a port that another program listens on blocks for a long time, so
            # rank 0 gets a moment to fail before the replicas join. It returns no
            # sooner than they do: exceeding this limit is the good case.
            failed = failure_of(sender, _PORT_S)
            if failed is not None and not isinstance(failed, DeadlineExceededError):
                return [failed]
        receivers = self._sink.open_weight_link(link, limit_s)
        # Both are waited for, so that the message can name either side.
        # In this order, because the first failure is logged and raised from: replicas
        # that time out only echo a trainer that never joined.
        sides = (sender, receivers)
        found = [failure_of(side, until_s - time.monotonic()) for side in sides]
        return [error for error in found if error is not None]

    def _build_all(
        self, transport: str, version: int, count: int, senders: tuple[int, ...]
    ) -> TensorLink | LinkSet:
        if senders == (0,):
            return self._make(transport, version, count)
        links = tuple(self._make(transport, version, count, rank) for rank in senders)
        return LinkSet(links, senders)

    def _make(
        self, transport: str, version: int, count: int, sender: int = 0
    ) -> TensorLink:
        if transport == "collective":
            return self._collective(count)
        if transport == "file":
            # One folder per version: no replica can read files of another.
            name = f"version-{version}" + (f"-rank-{sender}" if sender else "")
            return FileLink(str(self._files() / name), count, keep_files=False)
        self._check_one_machine()
        if transport == "cuda_ipc":
            return CudaIpcLink.create(count)
        # Backends copy what they load, as they must where it lies in the object store.
        return SharedMemoryLink.create(count, is_private=False)

    def _files(self) -> Path:
        if self._config.folder is not None:
            return Path(self._config.folder) / self._run
        self._check_one_machine()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rl-weights-"))
        return self._folder

    def _collective(self, count: int) -> TensorLink:
        address, port = self._source.weight_link_address()
        if self._is_one_machine():
            # No firewall lies between processes of one machine.
            address = "127.0.0.1"
        # NCCL takes tensors of a GPU on every side; gloo serves all others.
        on_gpus = self._source.uses_gpus and self._sink.uses_gpus
        return CollectiveLink(address, port, count, "nccl" if on_gpus else "gloo")

    def _nodes(self) -> set[str]:
        return set(self._source.node_ids) | set(self._sink.node_ids)

    def _is_one_machine(self) -> bool:
        return self._nodes() == {ray.get_runtime_context().get_node_id()}

    def _check_one_machine(self) -> None:
        if not self._is_one_machine():
            raise ConfigError(
                f"weight_sync.transport {self._config.transport!r} needs the driver, "
                "the trainer and all replicas on one machine"
                + (
                    ", unless weight_sync.folder names a folder that all nodes see"
                    if self._config.transport == "file"
                    else ""
                )
                + f": got workers on {len(self._nodes())} nodes; use 'object_store' or "
                "'collective'"
            )


def shared_out(policy: object, request: WeightRequest) -> WeightRequest:
    """Return a request with the ranks that send, if the policy has any but rank 0."""
    if lacking(policy, SharedSource):
        return request
    turns = cast(SharedSource, policy).weight_turns(request)
    return replace(request, turns=turns) if any(turns) else request


def failure_of(side: Pending, left_s: float) -> DistributedError | None:
    """Wait for calls and return their failure, if any."""
    try:
        side.wait(max(left_s, _SHORTEST_S))
    except DistributedError as error:
        return error
    return None


def join_failures(failures: list[DistributedError]) -> str:
    """Join failures into one text, without repetition."""
    return " ".join(dict.fromkeys(str(error).strip() for error in failures))
