"""The replica's side of a sync: messages as a verified stream of tensors.

The stream gives a tensor once its digest is that of the sender, and raises where one is
damaged, of another data type, missing or extra, at the latest at its end. Weights are
those of the version only after that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from rl_distributed.batch.tensor_buffers import decode
from rl_distributed.errors import DeadlineExceededError, DistributedError, TransferError
from rl_distributed.transfer import (
    Header,
    Manifest,
    ReceivingEnd,
    TensorLink,
    TensorStream,
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
                self._parts.popleft(), max(until_s - time.monotonic(), 0.001)
            )
        text, block = self._waiting.popleft()
        empty = torch.empty(0, dtype=torch.uint8)
        return Header.from_json(text), empty if block is None else decode(block)

    def close(self) -> None:
        """Let the messages go."""
        self._parts.clear()
        self._waiting.clear()


def _fetch(part: Any, deadline_s: float) -> list[Message]:
    # Messages may have been opened on the way, as in tests and where a trainer is
    # local.
    if not isinstance(part, ray.ObjectRef):
        return list(part)
    try:
        messages: list[Message] = ray.get(part, timeout=deadline_s)
    except GetTimeoutError as error:
        raise DeadlineExceededError(
            f"the trainer did not hand out a bucket within {deadline_s:g} s"
        ) from error
    except RayError as error:
        # The rest is the traceback of another process, which its own log has.
        first = str(error).strip().splitlines()[0]
        raise TransferError(f"the trainer failed or is gone: {first}") from error
    return messages


class VerifiedWeights:
    """The tensors of one version, each handed out once it is verified.

    Args:
        stream: The tensors as they come.
        request: What was announced.
        receiver: Who receives; named in errors.
    """

    def __init__(
        self, stream: TensorStream, request: WeightRequest, receiver: str
    ) -> None:
        self._stream = stream
        self._request = request
        self._receiver = receiver
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
        """Return what was received, once the stream was taken to its end.

        Raises:
            WeightSyncError: Something was left in it, or it is another version.
        """
        manifest = self._stream.manifest
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
    """Receives versions in one replica and remembers what they consist of."""

    def __init__(self, receiver: str) -> None:
        self._receiver = receiver
        self._link: TensorLink | None = None
        self._end: ReceivingEnd | None = None
        self._has_base = False
        self.manifest: Manifest | None = None
        """Of all weights that are loaded: of the last version, and of its base."""

    def open(self, link: TensorLink, index: int, deadline_s: float) -> None:
        """Join a link; the one before it is left."""
        self.close()
        self._end = link.receiver(index, deadline_s=deadline_s)
        self._link = link

    def weights(
        self, source: TensorLink | Sequence[Any], request: WeightRequest
    ) -> VerifiedWeights:
        """Return the tensors that come over a link that was opened, or in messages.

        Raises:
            WeightSyncError: The link is another one, or an adapter comes alone and its
                base is not here.
        """
        end: ReceivingEnd
        if isinstance(source, Sequence):
            end = MessageReceiver(source)
        elif self._end is not None and self._link == source:
            end = self._end
        else:
            raise WeightSyncError(f"the link was not opened by {self._receiver}")
        if request.kind == "adapter" and not self._has_base:
            raise WeightSyncError(
                f"{self._receiver} was sent the adapter of the {request.label} alone, "
                "and has no base for it. Sync the weights again."
            )
        # Until `accept`: an update that breaks off may have changed a part of it.
        self._has_base = False
        stream = receive_tensors(end, deadline_s=request.deadline_s)
        return VerifiedWeights(stream, request, self._receiver)

    def accept(self, manifest: Manifest, kind: WeightKind = "merged") -> None:
        """Note what was loaded; the tensors must be those of the version before.

        Args:
            manifest: What was received.
            kind: An adapter that came alone is on the base that is here.

        Raises:
            WeightSyncError: Tensors are missing, are new, or have another shape.
        """
        if kind == "adapter":
            manifest = self._with_base(manifest)
        if self.manifest is not None:
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
        base = (entry for entry in known if not is_of_adapter(entry.name))
        return replace(adapter, entries=(*base, *adapter.entries))

    def close(self) -> None:
        """Leave the link."""
        end, self._end, self._link = self._end, None, None
        if end is not None:
            end.close()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def failure_text(error: Exception) -> str:
    """Return what a replica says about an error that came up while it loaded."""
    if isinstance(error, DistributedError):
        return str(error)
    return f"{type(error).__name__}: {error}"
