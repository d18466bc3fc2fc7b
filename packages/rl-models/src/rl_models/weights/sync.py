"""Weight sync: send a trainer's weights to its generators, and verify them.

```
driver:  sync_weights()  --request----> trainer ranks     gather, cast, pack, digest
                         --request----> every replica     check, load, bucket by bucket
         all confirm? <---------------- version, digest of the manifest
         probe due?   --fixed rows----> every replica, trainer: log-probs agree?
```
Both sides run at the same time; the weights never pass through the driver, which waits
for both with one deadline. When one side fails, the other gets a few more seconds, so
that the message can name the cause. If replicas were lost, the remaining and restarted
ones get the weights in a second attempt.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from rl_distributed.errors import (
    ConfigError,
    DistributedError,
    WorkerDiedError,
    WorkerHungError,
)
from rl_distributed.logs.logging import get_logger
from rl_distributed.timing.timer import Timer
from rl_models.errors import WeightSyncError
from rl_models.interfaces import lacking
from rl_models.weight_request import ConfirmedWeights, Pending, WeightRequest
from rl_models.weights.base_weights import BaseWeights
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.links import (
    WeightLinks,
    failure_of,
    join_failures,
    shared_out,
)
from rl_models.weights.probe import Probe
from rl_models.weights.protocols import (
    ConfiguredSink,
    ConfirmingSink,
    RestorableSink,
    WeightProcesses,
    WeightSink,
    WeightSource,
)

__all__ = ["PublishedWeights", "TrainerLostError", "WeightSynchronizer"]

_logger = get_logger(__name__)

# Workers stop at the deadline of the transfer; after it, only their answer has to
# arrive.
_GRACE_S = 5.0
# Enough for the other side to report what it saw, little beside a whole deadline.
_AFTER_FAILURE_S = 5.0
# Enough between two steps; without anybody who takes them, the oldest are dropped.
_MOST_CONFIRMED = 64


class TrainerLostError(WeightSyncError):
    """A training worker is gone, or hangs, so there is nothing to send."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A copy of a trainer's weights, which no later step changes."""

    request: WeightRequest
    """Its version, and how it travels."""
    export: Pending
    """The calls that hand it out; it lies in the object store while this is held."""


class WeightSynchronizer:
    """Keeps a generator's weights those of a trainer, by version.

    Args:
        policy: Source of the weights; a probe also needs its `get_logprobs`.
        generation: Receiver of the weights.
        config: Settings of the transfer; None: `weight_sync` of the generation config.

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
        # Lost replicas may ask for their weights in the thread of a call of `generate`,
        # while another thread loads newer ones.
        self._sending = threading.Lock()
        self._num_syncs = 0
        self._probed_processes: Any = None
        self._loaded: PublishedWeights | None = None
        """What `load` has brought last; None: what is served came by a sync."""
        self._confirmed: deque[ConfirmedWeights] = deque(maxlen=_MOST_CONFIRMED)
        self._is_stale = True
        self._goes_back = False
        """Whether the next version may be one that was served before."""
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

    def go_back(self) -> None:
        """Say that the trainer has gone back to an earlier state.

        What was served is of a past that does not count any more: the next sync may
        send a version that is not newer, and is probed if probes are on.
        """
        self._is_stale = self._goes_back = True
        self._loaded = self._probed_processes = None
        self._confirmed.clear()

    def sync_weights(
        self, timer: Timer | None = None, *, version: int | None = None
    ) -> int:
        """Send the trainer's present weights to every replica.

        Args:
            timer: Receives the spans `weight_sync` and `weight_sync/probe`.
            version: Number of these weights; None: one more than the last. A resumed
                run passes its number of optimizer steps.

        Returns:
            The version that every replica has confirmed.

        Raises:
            ConfigError: The version is not newer than the one that is served.
            WeightSyncError: A replica refused, a worker is gone, or the log-probs of a
                probe differ; nothing is generated then until a sync succeeds.
        """
        served = self.generation.weight_version
        new = served + 1 if version is None else version
        # A generator at 0 serves its checkpoint, so a policy that has not trained yet
        # may send its own version 0.
        is_older = new <= served and version is not None
        if is_older and served > 0 and not self._goes_back:
            raise ConfigError(
                f"sync_weights needs a version above the one that is served: got {new} "
                f"with version {served}; versions tell which weights sampled a row."
            )
        # Stale until all have confirmed: whatever is raised from here on, the weights
        # must not be considered current.
        self._is_stale = True
        with _span(timer, "weight_sync"), self._alone():
            self._try_twice(lambda: self._transfer(new))
        self._loaded = None
        processes = self._processes()
        # A restarted process got its weights by another path than those that were
        # probed.
        is_new = processes != self._probed_processes
        if self._probe.is_due(self._num_syncs, is_new=is_new):
            with _span(timer, "weight_sync/probe"):
                self._probe.check(new)
            # Only after the check: a probe that failed is due again.
            self._probed_processes = processes
        self._num_syncs += 1
        self._is_stale = self._goes_back = False
        return new

    def publish(self, version: int) -> PublishedWeights:
        """Have the trainer hand out a copy of its present weights, for a later `load`.

        It returns before the copy is made: what the trainer is asked for afterwards, it
        does after it.

        Args:
            version: What these weights are called, above all that were sent before.
        """
        settings = self.config
        request = WeightRequest(
            version,
            self._precision,
            settings.bucket_bytes,
            settings.deadline_s,
            self._base.whole_kind(),
        )
        try:
            request = shared_out(self.policy, request)
            return PublishedWeights(request, self.policy.start_weight_export(request))
        except (WorkerDiedError, WorkerHungError) as error:
            raise TrainerLostError(
                f"The {request.label} were not handed out: {error}"
            ) from error

    def load(self, published: PublishedWeights) -> None:
        """Bring a published version to every replica, while the trainer goes on.

        Every replica confirms the version and its digests, as in `sync_weights`. There
        is no probe, as the trainer may have other weights by now.

        Raises:
            WeightSyncError: A replica refused, or a worker is gone; nothing is
                generated then until a version is loaded.
        """
        with self._alone():
            self._try_twice(lambda: self._bring(published))
            self._loaded = published

    def _bring(self, published: PublishedWeights) -> None:
        request, export = published.request, published.export
        update = self.generation.start_weight_update(export.messages, request)
        refused = failure_of(update, request.deadline_s + _GRACE_S)
        if refused is not None:
            self._raise_failed(request, failure_of(export, _AFTER_FAILURE_S), refused)
        self._note_confirmed()

    def take_confirmed(self) -> list[ConfirmedWeights]:
        """Return the versions that came since the last call, the oldest first.

        They include versions that were sent again to restarted replicas. Empty if the
        generator does not say what it has confirmed.
        """
        taken = []
        # One by one: `load` may add another one in its thread at any moment.
        while self._confirmed:
            taken.append(self._confirmed.popleft())
        return taken

    def _note_confirmed(self) -> None:
        if lacking(self.generation, ConfirmingSink):
            return
        confirmed = cast(ConfirmingSink, self.generation).confirmed_weights
        if confirmed is not None:
            self._confirmed.append(confirmed)

    def close(self) -> None:
        """Close the link, if there is one."""
        self._links.close()

    def restore_weights(self) -> None:
        """Send the served version again, to restarted replicas.

        Raises:
            WeightSyncError: The trainer has other weights by now.
        """
        with self._alone():
            self._restore()

    def _restore(self) -> None:
        if self._loaded is not None:
            self._bring(self._loaded)
            return
        if self._is_stale:
            raise WeightSyncError(
                "The replicas were lost after the trainer's weights had changed: what "
                "they served cannot be had again. Sync the weights."
            )
        self._is_stale = True
        # Not probed here: the next sync sees other processes and probes them.
        self._transfer(self.generation.weight_version)
        self._is_stale = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Send in the block, after what another thread sends."""
        # It tries twice at most, and each side has its deadline.
        limit_s = 2 * (self.config.deadline_s + _GRACE_S + _AFTER_FAILURE_S)
        if not self._sending.acquire(timeout=limit_s):
            raise WeightSyncError(
                "Weights were not sent, because other ones were still on their way "
                f"after {limit_s:g} s (twice weight_sync.deadline_s, and some)"
            )
        try:
            yield
        finally:
            self._sending.release()

    def _try_twice(self, send: Callable[[], None]) -> None:
        """Try twice if replicas are lost: by then they are back, or left out."""
        before = self._processes()
        try:
            send()
        except WeightSyncError as error:
            # With the same replicas as before, the cause was not a loss and would only
            # recur.
            if isinstance(error, TrainerLostError) or self._processes() == before:
                raise
            _logger.warning("%s They are sent once more.", error)
            send()

    def _processes(self) -> Any:
        """Return the processes of the replicas; None if the generator keeps no list."""
        if lacking(self.generation, WeightProcesses):
            return None
        return cast(WeightProcesses, self.generation).live_processes()

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
        self._note_confirmed()

    def _send(self, request: WeightRequest) -> None:
        """Start the transfer on both sides, and wait for both."""
        try:
            request = self._links.planned(request)
            link = self._links.joined(request.version, request.senders)
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
        # The replicas finish last when all goes well, so usually one wait is enough.
        refused = failure_of(update, until_s - time.monotonic())
        if refused is None and link is None:
            return  # the replicas have all messages, so the trainer has made them
        left_s = until_s - time.monotonic()
        failed = failure_of(export, left_s if refused is None else _AFTER_FAILURE_S)
        if failed is None and refused is None:
            return
        # A transfer that broke off may have left messages in the link.
        self._links.drop()
        self._raise_failed(request, failed, refused)

    def _raise_failed(
        self,
        request: WeightRequest,
        failed: DistributedError | None,
        refused: DistributedError | None,
    ) -> None:
        """Raise what the trainer, the replicas or both of them have to say."""
        failures = [error for error in (failed, refused) if error is not None]
        lost = isinstance(failed, WorkerDiedError | WorkerHungError)
        if not lost:
            failures.reverse()  # the replicas' report comes first
        kind = TrainerLostError if lost else WeightSyncError
        raise kind(
            f"The {request.label} were not synchronised: {join_failures(failures)}"
        ) from failures[0]


def _settings(generation: WeightSink) -> tuple[WeightSyncConfig, str]:
    """Return the transfer settings and the precision, from the generator if it can."""
    if not lacking(generation, ConfiguredSink):
        own = cast(ConfiguredSink, generation).config
        return own.weight_sync or WeightSyncConfig(), own.precision
    return WeightSyncConfig(), "float32"


def _span(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    return nullcontext() if timer is None else timer.time(label)
