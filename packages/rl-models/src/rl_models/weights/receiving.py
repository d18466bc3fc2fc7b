"""The replica's side of a sync: messages as a verified stream of tensors.

The stream yields a tensor once its digest equals the sender's, and raises if one is
damaged, of another data type, missing or extra, at the latest at its end. Only then
does the replica hold the new version. `rl_distributed.transfer.verified_stream`
compares the digests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_distributed.batch.tensor_buffers import decode
from rl_distributed.errors import DeadlineExceededError, DistributedError, TransferError
from rl_distributed.transfer import (
    Header,
    LinkSet,
    Manifest,
    ReceivingEnd,
    TensorLink,
    TensorStream,
    TurnReceiver,
    receive_tensors,
)
from rl_distributed.transfer.manifest import dtype_name
from rl_models.errors import WeightSyncError
from rl_models.weight_request import WeightKind, WeightRequest
from rl_models.weights.adapters import is_of_adapter
from rl_models.weights.sending import Message

__all__ = ["MessageReceiver", "VerifiedWeights", "WeightReceiver"]

_SHOWN = 5


class MessageReceiver:
    """A receiving end whose messages are the results of calls of the trainer.

    Args:
        parts: For each call its messages, or a reference to them.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = deque(parts)
        self._waiting: deque[Message] = deque()

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """Return the next message.

        Its block is memory that all receivers of a node share.
        """
        until_s = time.monotonic() + deadline_s
        while not self._waiting:
            if not self._parts:
                raise TransferError("the messages end before the end of the transfer")
            self._waiting += _fetch(
                # Ray takes a timeout of -1 for none at all.
                self._parts.popleft(),
                max(until_s - time.monotonic(), 0.001),
            )
        text, block = self._waiting.popleft()
        empty = torch.empty(0, dtype=torch.uint8)
        return Header.from_json(text), empty if block is None else decode(block)

    def close(self) -> None:
        """Drop the remaining messages."""
        # Ray keeps a bucket in its store as long as a reference to it is left.
        self._parts.clear()
        self._waiting.clear()


def _fetch(part: Any, deadline_s: float) -> list[Message]:
    # A part may be the messages themselves, as in tests and with a local trainer.
    if isinstance(part, Sequence):
        return list(part)
    # Here, because a worker also runs where there is no Ray, and gets no references.
    import ray  # noqa: PLC0415
    from ray.exceptions import GetTimeoutError, RayError  # noqa: PLC0415

    try:
        messages: list[Message] = ray.get(part, timeout=deadline_s)
    except GetTimeoutError as error:
        raise DeadlineExceededError(
            f"the trainer did not hand out a bucket within {deadline_s:g} s"
        ) from error
    except RayError as error:
        # The rest is the traceback of another process, which is in that process's log.
        first = str(error).strip().splitlines()[0]
        raise TransferError(f"the trainer failed or is gone: {first}") from error
    return messages


class VerifiedWeights:
    """The tensors of one version, each handed out once it is verified.

    Args:
        stream: The tensors as they come.
        request: The update that was announced.
        receiver: Name of the replica, for errors.
    """

    def __init__(
        self, stream: TensorStream, request: WeightRequest, receiver: str
    ) -> None:
        self._stream = stream
        self._request = request
        self._receiver = receiver
        # One iterator for all callers: messages cannot be received twice, so a second
        # loop must go on where the first one stopped.
        self._tensors = self._checked()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the one iterator over the tensors."""
        return self._tensors

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next tensor."""
        return next(self._tensors)

    def _checked(self) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = self._request.dtype
        try:
            for name, tensor in self._stream:
                # Loading would cast silently, and so hide a trainer that does not send
                # what it was asked for.
                if tensor.is_floating_point() and tensor.dtype != wanted:
                    raise WeightSyncError(
                        f"{name} came as {dtype_name(tensor.dtype)} to "
                        f"{self._receiver}, which computes in "
                        f"{self._request.precision}; the trainer must cast it"
                    )
                yield name, tensor
        except (TransferError, DeadlineExceededError) as error:
            raise WeightSyncError(
                f"The {self._request.label} did not arrive whole at {self._receiver}: "
                f"{error}"
            ) from error

    def manifest(self) -> Manifest:
        """Return the manifest of what was received, once the stream has ended.

        Raises:
            WeightSyncError: The stream was not read to its end, or is another version.
        """
        manifest = self._stream.manifest
        # Extra or missing tensors only show at the end of the stream.
        if manifest is None:
            raise WeightSyncError(
                f"The generation backend of {self._receiver} did not take the "
                f"{self._request.label} to the end of the stream."
            )
        if manifest.label != self._request.label:
            raise WeightSyncError(
                f"{self._receiver} was told to load {self._request.label}, but got "
                f"{manifest.label}."
            )
        return manifest


class WeightReceiver:
    """Receives versions in one replica and remembers their manifest."""

    def __init__(self, receiver: str) -> None:
        self._receiver = receiver
        self._link: TensorLink | LinkSet | None = None
        self._ends: tuple[ReceivingEnd, ...] = ()
        self._has_base = False
        self.manifest: Manifest | None = None
        """Manifest of all loaded weights: the last version, and its base."""

    def open(self, link: TensorLink | LinkSet, index: int, deadline_s: float) -> None:
        """Join a link, after leaving the previous one."""
        self.close()
        if isinstance(link, LinkSet):
            self._ends = link.receivers(index, deadline_s=deadline_s)
        else:
            self._ends = (link.receiver(index, deadline_s=deadline_s),)
        self._link = link

    def weights(
        self, source: TensorLink | LinkSet | Sequence[Any], request: WeightRequest
    ) -> VerifiedWeights:
        """Return the tensors that come over a link that was opened, or in messages.

        Args:
            source: The link; or for each call of the trainer its messages or a
                reference to them, with `request.turns` by sender.
            request: The update that was announced.

        Raises:
            WeightSyncError: The link is another one, or an adapter arrives alone
                without its base being loaded.
        """
        ends: Sequence[ReceivingEnd]
        if isinstance(source, Sequence):
            by_sender = source if request.turns else [source]
            ends = [MessageReceiver(parts) for parts in by_sender]
        elif self._ends and self._link == source:
            ends = self._ends
        else:
            raise WeightSyncError(f"the link was not opened by {self._receiver}")
        if request.kind == "adapter" and not self._has_base:
            raise WeightSyncError(
                f"{self._receiver} was sent the adapter of the {request.label} alone, "
                "and has no base for it. Sync the weights again."
            )
        # Until `accept`: an update that breaks off may have overwritten part of the
        # base.
        self._has_base = False
        end: ReceivingEnd = ends[0]
        if request.turns:
            place = {rank: number for number, rank in enumerate(request.senders)}
            end = TurnReceiver(ends, [place[rank] for rank in request.turns])
        stream = receive_tensors(end, deadline_s=request.deadline_s)
        return VerifiedWeights(stream, request, self._receiver)

    def accept(self, manifest: Manifest, kind: WeightKind = "merged") -> None:
        """Record a loaded version, which must have the tensors of the previous one.

        Args:
            manifest: Manifest of the stream.
            kind: An adapter that was sent alone belongs to the base that is loaded.

        Raises:
            WeightSyncError: Tensors are missing, are new, or have another shape.
        """
        if kind == "adapter":
            manifest = self._with_base(manifest)
        if self.manifest is not None:
            # Backends copy the tensors that come and leave the others as they are:
            # without this, a tensor that the trainer forgets would silently stay at its
            # old values.
            before = {e.name: (e.dtype, e.shape) for e in self.manifest.entries}
            now = {e.name: (e.dtype, e.shape) for e in manifest.entries}
            names = sorted(before.keys() | now.keys())
            odd = [name for name in names if before.get(name) != now.get(name)]
            if odd:
                raise WeightSyncError(
                    f"The {manifest.label} that {self._receiver} got differ from the "
                    f"{self.manifest.label} in what they consist of: {_listed(odd)}."
                )
        self.manifest = manifest
        self._has_base = kind != "merged"

    def _with_base(self, adapter: Manifest) -> Manifest:
        known = () if self.manifest is None else self.manifest.entries
        # With the base, so that `changed_weights` can also name a base tensor that
        # differs.
        base = (entry for entry in known if not is_of_adapter(entry.name))
        return replace(adapter, entries=(*base, *adapter.entries))

    def close(self) -> None:
        """Leave the link."""
        # Forgotten first: if closing raises, a broken end must not be used again.
        ends, self._ends, self._link = self._ends, (), None
        for end in ends:
            end.close()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def failure_text(error: Exception) -> str:
    """Return a replica's description of an error that occurred while loading."""
    # Our own messages say what failed and what to do; others need the class beside
    # them, as in `KeyError: 'x'`.
    if isinstance(error, DistributedError):
        return str(error)
    return f"{type(error).__name__}: {error}"
