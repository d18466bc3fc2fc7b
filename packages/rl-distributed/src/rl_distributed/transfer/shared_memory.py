"""A link between processes of one machine: blocks are files in shared memory.

The sender packs straight into a file under `/dev/shm`, and receivers map it: the bytes
are written once, whatever the number of receivers.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from rl_distributed.errors import ResourceInsufficientError, TransferError
from rl_distributed.transfer.folder import (
    announce,
    map_file,
    own_process,
    process_is_gone,
    reason_for_silence,
    replace_file,
    wait_for,
)
from rl_distributed.transfer.protocol import Header

__all__ = ["SharedMemoryLink", "SharedMemoryReceiver", "SharedMemorySender"]

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rl-transfer"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SharedMemoryLink:
    """A link whose ends are on one machine; `create` makes it.

    At most `max_blocks` blocks exist that a receiver has not taken. A block's memory is
    freed when all receivers have taken it and no tensor of it is left.
    """

    folder: str
    num_receivers: int = 1
    max_blocks: int = 2

    @classmethod
    def create(
        cls,
        num_receivers: int = 1,
        *,
        max_blocks: int = 2,
        parent: Path = _SHARED_MEMORY,
    ) -> Self:
        """Make the link's folder, readable by this user alone.

        What links of processes that were killed have left there is removed.
        """
        if num_receivers < 1 or max_blocks < 1:
            raise TransferError(
                "num_receivers and max_blocks must be positive: got "
                f"{num_receivers} and {max_blocks}"
            )
        _sweep(parent)
        own = own_process()
        name = "-".join(
            [
                _PREFIX,
                *(str(int(own[key])) for key in ("namespace", "pid", "started_s")),
                secrets.token_hex(4),
            ]
        )
        folder = parent / name
        folder.mkdir(mode=0o700)
        return cls(str(folder), num_receivers, max_blocks)

    def sender(self, *, deadline_s: float = 60.0) -> SharedMemorySender:
        """The sending end; on the machine of the folder."""
        _check_folder(self.folder)
        return SharedMemorySender(self)

    def receiver(
        self, index: int = 0, *, deadline_s: float = 60.0
    ) -> SharedMemoryReceiver:
        """The end of receiver `index`; on the machine of the folder."""
        _check_folder(self.folder)
        if not 0 <= index < self.num_receivers:
            raise TransferError(
                f"receiver must be in 0..{self.num_receivers - 1}: got {index}"
            )
        return SharedMemoryReceiver(self, index)

    def close(self) -> None:
        """Remove the folder; tensors that were received stay valid."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """The link itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the link."""
        self.close()


class SharedMemorySender:
    """Writes each message as a file: block, header, length of the header."""

    def __init__(self, link: SharedMemoryLink) -> None:
        self._link = link
        self._folder = Path(link.folder)
        self._announced = self._folder / "sender.json"
        announce(self._announced)
        self._sent = self._kept = _lowest_taken(link)
        self._part = self._folder / ".block.part"
        self._memory: mmap.mmap | None = None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory of a new file, which becomes the message."""
        if num_bytes == 0:
            self._memory = None
            return torch.empty(0, dtype=torch.uint8)
        with self._part.open("w+b") as file:
            try:
                # Without it, running out of memory would kill the process.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise ResourceInsufficientError(
                    f"{self._folder.parent} has no room for a block of {num_bytes} "
                    f"bytes ({error.strerror}); send smaller buckets, allow fewer "
                    "blocks, or give the machine more shared memory"
                ) from error
            self._memory = mmap.mmap(file.fileno(), num_bytes)
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def send(
        self, header: Header, block: torch.Tensor | None, *, deadline_s: float
    ) -> None:
        """Wait for room, then publish the message."""
        self._wait_for_receivers(self._link.max_blocks - 1, deadline_s)
        text = header.to_json().encode()
        mode = "ab" if block is not None and block.numel() else "wb"
        with self._part.open(mode) as file:
            file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))
        self._memory = None
        self._part.replace(_message(self._folder, self._sent))
        self._sent += 1

    def close(self) -> None:
        """Say that nothing more will come."""
        if self._folder.exists():
            announce(self._announced, closed=True)

    def wait_until_taken(self, *, deadline_s: float) -> None:
        """Return once all receivers have taken all messages."""
        self._wait_for_receivers(0, deadline_s)

    def _wait_for_receivers(self, most: int, deadline_s: float) -> None:
        """Wait until at most `most` messages are not taken; remove the others."""

        def few_left() -> int | None:
            lowest = _lowest_taken(self._link)
            return lowest if self._sent - lowest <= most else None

        def watch() -> str | None:
            for index in range(self._link.num_receivers):
                path = self._folder / f"receiver-{index}.json"
                reason = reason_for_silence(path, f"receiver {index}")
                if reason is not None:
                    return reason
            return None

        what = f"the receivers of message {self._sent - most - 1} in {self._folder}"
        lowest = wait_for(few_left, watch, what, deadline_s)
        for number in range(self._kept, lowest):
            _message(self._folder, number).unlink(missing_ok=True)
        self._kept = lowest


class SharedMemoryReceiver:
    """Maps each message."""

    def __init__(self, link: SharedMemoryLink, index: int) -> None:
        self._folder = Path(link.folder)
        self._announced = self._folder / f"receiver-{index}.json"
        announce(self._announced)
        self._taken = self._folder / f"taken-{index}"
        self._next = _number_in(self._taken)

    def receive(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """The next message; its block is memory of this process alone."""
        message = self.take(deadline_s=deadline_s)
        self.acknowledge()
        return message

    def take(self, *, deadline_s: float) -> tuple[Header, torch.Tensor]:
        """The next message, which the sender keeps until `acknowledge`."""
        path = _message(self._folder, self._next)
        sender = self._folder / "sender.json"
        whole = wait_for(
            lambda: map_file(path) if path.exists() else None,
            lambda: reason_for_silence(sender, "the sender"),
            f"message {self._next} in {self._folder}",
            deadline_s,
        )
        body = whole.numel() - _LENGTH_BYTES
        length = int.from_bytes(whole[body:].numpy().tobytes(), "little")
        text = whole[body - length : body].numpy().tobytes()
        return Header.from_json(text), whole[: body - length]

    def acknowledge(self) -> None:
        """Tell the sender that the message is taken."""
        self._next += 1
        replace_file(self._taken, str(self._next))

    def close(self) -> None:
        """Say that nothing more will be taken."""
        if self._folder.exists():
            announce(self._announced, closed=True)


def _message(folder: Path, number: int) -> Path:
    return folder / f"message-{number:08d}"


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0


def _lowest_taken(link: SharedMemoryLink) -> int:
    """How many messages all receivers have taken."""
    folder = Path(link.folder)
    return min(_number_in(folder / f"taken-{i}") for i in range(link.num_receivers))


def _check_folder(folder: str) -> None:
    if not Path(folder).is_dir():
        raise TransferError(
            f"the folder {folder} of the link is not on this machine, or its link is "
            "closed; shared memory connects processes of one machine only"
        )


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that ended without closing their links."""
    own = own_process()
    for folder in parent.glob(f"{_PREFIX}-*"):
        try:
            namespace, pid, started_s = map(int, folder.name.split("-")[2:5])
        except ValueError:
            continue
        process = {
            **own,
            "namespace": namespace,
            "pid": pid,
            "started_s": started_s + 0.5,
        }
        if process_is_gone(process):
            shutil.rmtree(folder, ignore_errors=True)
