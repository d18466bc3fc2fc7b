"""Bringing a trainer's weights to its generators, verified.

```
driver:  sync_weights()  --request----> trainer ranks     gather, cast, pack, digest
                         --request----> every replica     check, load, bucket by bucket
         all confirm? <---------------- version, digest of the manifest
         probe due?   --fixed rows----> every replica, trainer: log-probs agree?
```
Both sides run at the same time; the weights never pass through the driver. It waits for
both with one deadline. When one side fails, the other gets a few seconds more, so that
the message names who is to blame. Where replicas were lost, those that are left or come
back get the weights in a second try.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from rl_distributed.errors import (
    ConfigError,
    WorkerDiedError,
    WorkerHungError,
)
from rl_distributed.logs.logging import get_logger
from rl_distributed.timing.timer import Timer
from rl_models.errors import WeightSyncError
from rl_models.interfaces import lacking
from rl_models.weight_request import WeightRequest
from rl_models.weights.base_weights import BaseWeights
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.links import WeightLinks, failure_of, join_failures
from rl_models.weights.probe import Probe
from rl_models.weights.protocols import (
    ConfiguredSink,
    ReplicaProcesses,
    RestorableSink,
    WeightSink,
    WeightSource,
)

__all__ = ["TrainerLostError", "WeightSynchronizer"]

_logger = get_logger(__name__)

# Beyond the deadline of the transfer, the workers only have to answer.
_GRACE_S = 5.0
# Long enough for the other side to say what it saw, short beside a whole deadline.
_AFTER_FAILURE_S = 5.0


class TrainerLostError(WeightSyncError):
    """A training worker is gone, or hangs, so there is nothing to send."""


class WeightSynchronizer:
    """Keeps a generator's weights those of a trainer, by version.

    Args:
        policy: Where weights come from; a probe also needs its `get_logprobs`.
        generation: Where they go.
        config: How; None: `weight_sync` of the generation config.

    Raises:
        ConfigError: Only one of the two has adapters apart from their base.
    """

    def __init__(
        self,
        policy: WeightSource,
        generation: WeightSink,
        config: WeightSyncConfig | None = None,
    ) -> None:
        self.policy = policy
        self.generation = generation
        self.config, self._precision = _settings(generation)
        self.config = config or self.config
        self._links = WeightLinks(self.config, policy, generation)
        self._base = BaseWeights(policy, generation)
        self._probe = Probe(self.config.probe, policy, generation)
        self._num_syncs = 0
        self._probed_processes: Any = None
        self._is_stale = True
        if not lacking(generation, RestorableSink):
            cast(RestorableSink, generation).restore_weights_by(self.restore_weights)

    @property
    def is_stale(self) -> bool:
        """Whether the trainer may have other weights than the generator.

        True at the start, after `mark_stale`, and after a sync that failed.
        """
        return self._is_stale

    def mark_stale(self) -> None:
        """Say that the trainer's weights have changed."""
        self._is_stale = True

    def sync_weights(
        self, timer: Timer | None = None, *, version: int | None = None
    ) -> int:
        """Send the trainer's present weights to every replica.

        Args:
            timer: Receives the spans `weight_sync` and `weight_sync/probe`.
            version: What these weights are called; None counts on by one. A resumed
                run passes the number of optimizer steps behind it.

        Returns:
            The version that every replica has confirmed.

        Raises:
            ConfigError: The version is not newer than the one that is served.
            WeightSyncError: A replica refused, a worker is gone, or the log-probs of a
                probe differ; nothing is generated then until a sync succeeds.
        """
        served = self.generation.weight_version
        new = served + 1 if version is None else version
        if new <= served and version is not None and served > 0:
            raise ConfigError(
                f"sync_weights needs a version above the one that is served: got {new} "
                f"with version {served}; versions tell which weights sampled a row."
            )
        self._is_stale = True
        # Stale until all have confirmed: whatever is raised from here on, nobody may
        # take the weights for current.
        with _span(timer, "weight_sync"):
            self._transfer_or_retry(new)
        processes = self._processes()
        # A process that was started again has loaded by another way than those that
        # were probed.
        is_new = processes != self._probed_processes
        if self._probe.is_due(self._num_syncs, is_new=is_new):
            with _span(timer, "weight_sync/probe"):
                self._probe.check(new)
            # Only after the check: a probe that failed is due again.
            self._probed_processes = processes
        self._num_syncs += 1
        self._is_stale = False
        return new

    def close(self) -> None:
        """Give up the link, if there is one."""
        self._links.close()

    def restore_weights(self) -> None:
        """Send the version that is served again, to replicas that came back.

        Raises:
            WeightSyncError: The trainer has other weights by now.
        """
        if self._is_stale:
            raise WeightSyncError(
                "The replicas were lost after the trainer's weights had changed: what "
                "they served cannot be had again. Sync the weights."
            )
        self._is_stale = True
        self._transfer(self.generation.weight_version)
        self._is_stale = False

    def _transfer_or_retry(self, version: int) -> None:
        """Try again, once, where replicas were lost: they come back, or stay away."""
        before = self._processes()
        try:
            self._transfer(version)
        except WeightSyncError as error:
            # With the same replicas as before the cause was not a loss, and would be
            # met again.
            if isinstance(error, TrainerLostError) or self._processes() == before:
                raise
            _logger.warning("%s They are sent once more.", error)
            self._transfer(version)

    def _processes(self) -> Any:
        """Which processes the replicas are; None where the generator does not say."""
        if lacking(self.generation, ReplicaProcesses):
            return None
        return cast(ReplicaProcesses, self.generation).live_processes()

    def _transfer(self, version: int) -> None:
        settings = self.config
        request = WeightRequest(
            version,
            self._precision,
            settings.bucket_bytes,
            settings.deadline_s,
            self._base.next_kind(),
        )
        is_loaded = False
        try:
            self._send(request)
            is_loaded = True
        finally:
            self._base.settle(is_loaded=is_loaded)

    def _send(self, request: WeightRequest) -> None:
        """Have both sides do their part, and wait for both."""
        try:
            link = self._links.joined(request.version)
            export = self.policy.start_weight_export(request, link)
        except (WorkerDiedError, WorkerHungError) as error:
            raise TrainerLostError(
                f"The {request.label} were not synchronised: {error}"
            ) from error
        source = export.messages if link is None else link
        # Both sides work at the same time: a replica loads a bucket while the trainer
        # packs the next.
        update = self.generation.start_weight_update(source, request)
        until_s = time.monotonic() + request.deadline_s + _GRACE_S
        # The replicas are asked first: they are done last where all goes well.
        refused = failure_of(update, until_s - time.monotonic())
        if refused is None and link is None:
            return  # the replicas have all messages, so the trainer has made them
        left_s = until_s - time.monotonic()
        failed = failure_of(export, left_s if refused is None else _AFTER_FAILURE_S)
        failures = [error for error in (failed, refused) if error is not None]
        if not failures:
            return
        # A transfer that broke off may have left messages in the link.
        self._links.drop()
        lost = isinstance(failed, WorkerDiedError | WorkerHungError)
        if not lost:
            failures.reverse()  # what the replicas say comes first
        kind = TrainerLostError if lost else WeightSyncError
        raise kind(
            f"The {request.label} were not synchronised: {join_failures(failures)}"
        ) from failures[0]


def _settings(generation: WeightSink) -> tuple[WeightSyncConfig, str]:
    """How weights travel, and in which precision, where the generator says so."""
    if not lacking(generation, ConfiguredSink):
        own = cast(ConfiguredSink, generation).config
        return own.weight_sync or WeightSyncConfig(), own.precision
    return WeightSyncConfig(), "float32"


def _span(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    return nullcontext() if timer is None else timer.time(label)
